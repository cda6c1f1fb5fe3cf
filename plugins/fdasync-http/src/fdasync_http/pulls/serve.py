"""The paths by which trainers have published weights pulled: slime's and Miles' `/pull_weights`, SkyRL's
`/fetch_weights` with what its client calls around it.

A pull writes a checkpoint in `pulls_root`, verified, while the engine works on; an update then loads it:
`/update_weights_from_disk` with the same folder, or SkyRL's `/update_weights`. Both paths may be called again. Called
by `paths.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import msgspec

from fdasync_http.calls import Call, UpdateCall
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.pulls.child import pull
from fdasync_http.pulls.local import Pull, state_of
from fdasync_http.sglang.control import OWN
from fdasync_http.weights import folder_within, local_within, resolved

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.front import Front

_Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
CALLS = "calls into workers are not served: each control path has a name of its own"
# SkyRL's words around an update; a folder is loaded whole, so nothing is to be done at either
_BRACKET = ("skyrl_start_weight_update", "skyrl_finish_weight_update")


class PullWeights(UpdateCall):
    """`POST /pull_weights`: answers once the checkpoint holds that version, whole or by its deltas, and every tensor
    that changed has the checksum that was published. Nothing is loaded.

    Attributes:
        local_checkpoint_dir: folder in `pulls_root` of the checkpoint that follows; made where it is not there.
        source_dir: folder in `weights_root` in which versions are published.
        target_version: the version to bring it to; 0: the engine's own checkpoint.
    """

    RULES: ClassVar[Table] = OWN

    local_checkpoint_dir: str
    source_dir: str
    target_version: _Version

    async def do(self, front: Front) -> Any:
        asked = _slime_pull(front, self)
        await _pull(front, asked)
        return f"{asked.local} holds version {asked.version}"


def _slime_pull(front: Front, body: PullWeights) -> Pull:
    config, version, named = front.config, body.target_version, body.source_dir
    local = local_within(config, body.local_checkpoint_dir, "local_checkpoint_dir")
    # version 0 is the engine's own checkpoint, and nothing is read of what is published, which need not be there yet
    source = folder_within(config, named, "source_dir") if version else resolved(named, "source_dir")
    return _checked(Pull(form="slime", local=local, base=_base(front), source=source, version=version))


class FetchWeights(Call):
    """`POST /fetch_weights`: answers once the checkpoint holds that version, verified. Nothing is loaded.

    Attributes:
        target_version: the version to bring the checkpoint to that `/init_weight_transfer_engine` named.
        sync_dir: folder in `weights_root` in which versions are published.
        uri: folder of this version; None: it has its usual name in `sync_dir`.
    """

    RULES: ClassVar[Table] = ignored("target_version says enough", "version", "update_kind")

    target_version: _Version
    sync_dir: str | None = None
    uri: str | None = None

    async def do(self, front: Front) -> Any:
        await _pull(front, _skyrl_pull(front, self))
        result = {"status": "ok", "target_version": self.target_version, "stats": {}}
        return {"status": "ok", "result": [result]}


def _skyrl_pull(front: Front, body: FetchWeights) -> Pull:
    config, local = front.config, named_checkpoint(front)
    for field, named in (("sync_dir", body.sync_dir), ("uri", body.uri)):
        if named is not None and "://" in named:
            raise Refused(400, f"{named:.200} is no folder: weights are fetched from folders alone", param=field)
    if body.sync_dir is None and body.uri is None:
        raise Refused(400, "sync_dir or uri is needed", param="sync_dir")
    last = "" if body.uri is None else folder_within(config, body.uri, "uri")
    source = os.path.dirname(last) if body.sync_dir is None else folder_within(config, body.sync_dir, "sync_dir")
    return _checked(
        Pull(form="skyrl", local=local, base=_base(front), source=source, version=body.target_version, last=last)
    )


async def _pull(front: Front, asked: Pull) -> None:
    """One after the other: each has a process, and the whole disk."""
    async with front.pulling:
        await pull(asked, front.config.pull_s)


def _base(front: Front) -> str:
    """The engine's own checkpoint. Raises Refused (400) where it is no folder of this machine."""
    base = front.generator.facts().model_path
    if not os.path.isdir(base):
        raise Refused(400, "the engine has no checkpoint folder here that a first version could be made of")
    return os.path.realpath(base)


def _checked(asked: Pull) -> Pull:
    if asked.local in (asked.base, asked.source, asked.last):
        raise Refused(400, f"{asked.local} is read for the pull, and cannot be written", param="local_checkpoint_dir")
    return asked


def named_checkpoint(front: Front) -> str:
    """The folder that SkyRL's deltas go to. Raises Refused (400) where none was named."""
    if not front.local_checkpoint:
        problem = "no checkpoint was named: local_checkpoint_dir of init_info at /init_weight_transfer_engine"
        raise Refused(400, problem, param="init_info.local_checkpoint_dir")
    return front.local_checkpoint


def fetched(front: Front, version: int) -> str:
    """The folder to load a version from. Raises Refused (400) unless `/fetch_weights` has brought that version."""
    local = named_checkpoint(front)
    state = state_of(local)
    if state is None or state.version != version:
        held = "no whole version" if state is None else f"version {state.version}"
        raise Refused(400, f"{local} holds {held}; call /fetch_weights for {version} first", param="target_version")
    return local


class CollectiveRpc(Call, forbid_unknown_fields=False):
    """`POST /collective_rpc`: refused, but for the two calls by which SkyRL brackets an update from what was fetched.
    Nothing is to be done at these. Their arguments are not read.

    Attributes:
        method: name of what is called.
    """

    STRICT: ClassVar[bool] = False

    method: str

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        # without such a checkpoint the body is not read
        if not front.local_checkpoint:
            raise Refused(501, CALLS, code="not_served")
        return await super().read(request, front)

    async def do(self, front: Front) -> Any:  # noqa: ARG002 - nothing is to be done
        if self.method not in _BRACKET:
            raise Refused(501, CALLS, code="not_served")
        return {"results": [None]}


class FinishSession(Call):
    """`POST /finish_session?session_id=ID`: the conversation is over. Nothing is held for one here: requests have no
    place of a session, and cached blocks go when their room is needed. So any name is right, as often as it comes.

    Attributes:
        session_id: name of the conversation; it may not be left out.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("session_id",)
    STRICT: ClassVar[bool] = False
    BODY: ClassVar[bool] = False

    session_id: str = ""

    async def do(self, front: Front) -> Any:  # noqa: ARG002 - nothing is to be done
        if not self.session_id:
            raise Refused(400, "is missing in the query", param="session_id")
        return {"status": "ok"}
