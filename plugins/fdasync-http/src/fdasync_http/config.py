"""Settings of the app and of the command's server: names, keys, bounds.

Pure data; `application.py` and every room of paths read the app's settings, `protocol.py` the connections'.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fdasync.errors import ConfigError
from fdasync.registry.mapping import check

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Dialect = Literal["sglang", "vllm"]

_MIN_KEY_CHARS = 16


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the app answers.

    Attributes:
        model: name of the model in answers; "": the name of the checkpoint's folder, or as the runner names it.
        dialect: whose server `owned_by` names, and whose form fields have that both dialects share. All paths are
            there in either.
        api_key: every path asks for `Authorization: Bearer KEY`, or `x-api-key: KEY`; "": none does.
        admin_key: paths that control the engine ask for this key instead; "": they ask for `api_key`.
        weights_root: folder from which, and from whose subfolders, weights may be loaded; "": none may.
        pulls_root: folder in which `/pull_weights` and `/fetch_weights` may write checkpoints, which may be loaded as
            well; "": they write nothing.
        rows: form of the rows of `/inference/v1/generate`, whose requests cannot ask for them: "npy" as vLLM answers,
            "prime_rl" as prime-rl's server, "none".
        memory_saver: whether `/server_info` says that memory can be released. "auto": where it can be. "off": it never
            does, for trainers that do not release any and compare this with their own setting.
        max_body_nbytes: most bytes of a request's body. Decoding it holds the loop, and with it every stream of the
            front: for some 6 ms a MiB of token ids.
        max_bodies_nbytes: most bytes of bodies that are being read at a time; a request that has more is answered with
            429.
        max_json_depth: most levels of arrays and objects in a body.
        max_live: most requests that generate at a time; the next one is answered with 429.
        body_timeout_s: longest that a body may take to arrive, in seconds.
        pull_s: longest that a pull may take, in seconds.
        group_s: longest that the ranks of a trainer's group may take to meet, and that the next bytes of its update may
            take to come, in seconds, where a client names no `timeout_s`; up to 3600.
        health_s: longest that the token of `/health_generate` may take, in seconds.
    """

    model: str = ""
    dialect: Dialect = "sglang"
    api_key: str = ""
    admin_key: str = ""
    weights_root: str = ""
    pulls_root: str = ""
    rows: Literal["npy", "prime_rl", "none"] = "npy"
    memory_saver: Literal["auto", "off"] = "auto"
    max_body_nbytes: Count = 4 << 20
    max_bodies_nbytes: Count = 512 << 20
    max_json_depth: Count = 32
    max_live: Count = 4096
    body_timeout_s: Seconds = 60.0
    pull_s: Seconds = 3600.0
    group_s: Annotated[float, Meta(gt=0, le=3600.0)] = 120.0
    health_s: Seconds = 20.0

    def __post_init__(self) -> None:
        check(self, error=ConfigError)
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key and (len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key):
                # not shown: it may be the secret with a slip
                raise ConfigError(name, "is no key", limit=f"{_MIN_KEY_CHARS} or more printable ASCII characters")
        if self.admin_key and not self.api_key:
            raise ConfigError("admin_key", "needs an api_key", hint="without one the other paths are open")


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of connections.

    Attributes:
        max_connections: open at a time; the next one is answered with 429 and closed.
        max_header_nbytes: the first line and all headers of a request; and what a chunked body has besides its bytes
            and their frames.
        max_pipelined: requests that may wait behind the current one; one more closes the connection.
        header_s: longest from the first byte of a connection, or of its next request, to the end of the headers; a
            connection that sends nothing has as long, and so has the rest of a body whose request was answered.
        write_s: longest that a client may read nothing while an answer waits.
    """

    max_connections: Count = 16384
    max_header_nbytes: Count = 64 << 10
    max_pipelined: Count = 16
    header_s: Seconds = 20.0
    write_s: Seconds = 120.0
