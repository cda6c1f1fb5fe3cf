"""SGLang's calls that control a server: pause, abort, flush, memory, weights from disk, versions; and its load.

Trainers repeat these calls until they answer 200, and add the body of any other answer to their own error. So each is
idempotent, and says what it did. Called by `paths.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from starlette.responses import Response

from fdasync.errors import ConfigError
from fdasync_http.calls import Call, UpdateCall, reply
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.weights import folder_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from fdasync import Doing, MemoryPart, SleepMode
    from fdasync_http.front import Front

#: clients send SGLang's own objects as they are
OWN: Table = ignored("they are of SGLang's own processes", "rid", "http_worker_ipc")


class PauseGeneration(Call):
    """`POST /pause_generation`: no step runs when it answers; requests that come meanwhile wait.

    Attributes:
        mode: what becomes of requests that run.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"

    async def do(self, front: Front) -> Any:
        await front.pause(self.mode)
        return {"message": f"paused ({self.mode})", "status": "ok"}


class ContinueGeneration(Call):
    """`POST /continue_generation`: the engine goes on after a pause; also where it was not paused."""

    RULES: ClassVar[Table] = ignored("memory is the engine's own matter", "torch_empty_cache")

    async def do(self, front: Front) -> Any:
        await front.generator.resume()
        return {"message": "goes on", "status": "ok"}


class FlushCache(Call):
    """`GET` or `POST /flush_cache`: 200 once nothing runs and every cached block is forgotten, else 400.

    In a pause, waiting requests (new ones and retracted ones) are no hindrance. They have no blocks, and they cannot
    end before the trainer goes on.

    Attributes:
        timeout: not looked at: it never waits, and is asked again.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("timeout",)
    BODY: ClassVar[bool] = False

    timeout: str = ""

    async def do(self, front: Front) -> Any:
        load = front.generator.load()
        busy = min(load.running, load.live) if load.paused else load.live
        if busy:
            words = f"the cache was not flushed: {busy} requests are live; abort them, or ask again"
            raise Refused(400, words, code="busy")
        await front.generator.reset_cache()
        return Response("Cache flushed.\n", media_type="text/plain")


class AbortRequest(Call):
    """`POST /abort_request`: 200 at once, whether there was such a request or not.

    Attributes:
        rid: name of a request; "": none.
        abort_all: every request.
        prefix: `rid` is the beginning of the names.
    """

    STRICT: ClassVar[bool] = False
    RULES: ClassVar[Table] = ignored("an abort has one message", "abort_message")

    rid: str | None = ""
    abort_all: bool = False
    prefix: bool = False

    async def do(self, front: Front) -> Any:
        if self.abort_all:
            front.generator.abort_all()
        elif self.rid and self.prefix:
            front.generator.abort_all(self.rid)
        elif self.rid:
            front.abort(self.rid)
        else:
            raise Refused(400, "is missing; give it, or abort_all", param="rid")
        return Response()


class MemoryCall(Call):
    """A call for memory.

    Attributes:
        tags: the parts that are meant; None and []: all.
    """

    RULES: ClassVar[Table] = OWN

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class ReleaseMemory(MemoryCall):
    """`POST /release_memory_occupation`: the device's memory is free when it answers. Weights are kept in host memory,
    so that a client that pushes none finds the old ones again; requests wait, and go on after it."""

    async def do(self, front: Front) -> Any:
        await sleep(front, 1, "keep", self.tags or None)
        return {"message": "memory is released", "status": "ok"}


class ResumeMemory(MemoryCall):
    """`POST /resume_memory_occupation`: the engine goes on as soon as all parts are there, unless it is paused. 202
    where an update has to bring weights first."""

    async def do(self, front: Front) -> Any:
        return woken(await front.generator.wake(self.tags), "ok")


# what a wake has done, by the engine's state after it
_WOKEN: dict[Doing, str] = {
    "running": "memory is taken back",
    "paused": "memory is taken back; requests wait for the end of a pause",
    "waits_for_weights": "memory is taken back, and an update has to bring the weights: requests wait for it",
    "broken": "memory is taken back, and the weights are broken: an update has to mend them",
    "updating": "memory is taken back; an update of weights is under way",
    "asleep": "memory of these parts is taken back, that of others is still released: requests wait for it",
    "waking": "another wake is under way",
}


def woken(doing: Doing, status: str = "") -> Response:
    """The answer after a wake: 202 where weights that were dropped are still missing, which clients take for 200.

    Args:
        status: of the dialect; "": "awake" where it is, else what it does.
    """
    awake = "awake" if doing in ("running", "paused") else doing
    told = {"status": status or awake, "message": _WOKEN[doing], "doing": doing}
    return reply(told, 202 if doing == "waits_for_weights" else 200)


async def sleep(front: Front, level: Literal[0, 1, 2], mode: SleepMode, tags: Sequence[MemoryPart] | None) -> None:
    """Raises Refused with status 501 where the engine's memory cannot be released, with the reason."""
    try:
        await front.generator.sleep(level, mode, tags=tags)
    except ConfigError as error:
        raise Refused(501, str(error), code="not_served") from error


class UpdateFromDisk(UpdateCall):
    """`POST /update_weights_from_disk`: 400 with `success` false where the weights are not taken; then the old ones are
    in use, under their version.

    Attributes:
        model_path: a checkpoint folder within `weights_root`.
        load_format: only None and "auto" are served.
        weight_version: label of these weights; None: the last one, counted up.
        abort_all_requests: requests that run end; else they go on, on the KV that they have.
        expected_weights_id: fingerprint that the weights must have once they are in place, 32 hex digits (503 where it
            is another, and no step uses them); None: any.
    """

    RULES: ClassVar[Table] = {
        **OWN,
        **ignored("cached blocks of other weights match nothing", "flush_cache"),
        **ignored("memory is the engine's own matter", "torch_empty_cache", "recapture_cuda_graph"),
        **ignored("an update pauses and goes on by itself", "keep_pause", "is_async", "token_step", "manifest"),
        **ignored("abort_all_requests says it", "abort_all_request"),
    }

    model_path: str
    load_format: str | None = None
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    expected_weights_id: str | None = None

    async def do(self, front: Front) -> Any:
        if self.load_format not in (None, "auto"):
            raise Refused(400, f"{self.load_format!r} is not served; send none", param="load_format")
        folder = folder_within(front.config, self.model_path, "model_path")
        mode: Literal["abort", "keep"] = "abort" if self.abort_all_requests else "keep"
        await front.generator.update_weights(self.weight_version, folder, mode, expected=self.expected_weights_id)
        front.update.begins()


class UpdateVersion(Call):
    """`POST /update_weight_version`: names the weights in use.

    Attributes:
        new_version: label of the weights in use from now on.
        abort_all_requests: requests that run end, once the label is taken.
    """

    RULES: ClassVar[Table] = OWN

    new_version: str | int
    abort_all_requests: bool = True

    async def do(self, front: Front) -> Any:
        await front.generator.set_weight_version(self.new_version)
        # a label that is refused ends nothing
        if self.abort_all_requests:
            front.generator.abort_all()
        version = front.generator.facts().weight_version
        return {"success": True, "message": f"version {version}", "new_version": version}


def _loads(front: Front) -> list[dict[str, Any]]:
    load = front.generator.load()
    # instances tell a router what runs once a heartbeat; what is live here is known at once
    running = min(load.running, load.live)
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.live,
            "num_total_reqs": load.live,
            "num_running_reqs": running,
            "num_waiting_reqs": load.live - running,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity_tokens,
            "token_usage": load.used_tokens / max(load.capacity_tokens, 1),
        }
    ]


async def v1_loads(_request: Request, front: Front) -> Response:
    """`GET /v1/loads`: requests that run and wait."""
    return reply({"loads": _loads(front)})


async def get_load(_request: Request, front: Front) -> Response:
    """`GET /get_load`: the same as a bare list."""
    return reply(_loads(front))
