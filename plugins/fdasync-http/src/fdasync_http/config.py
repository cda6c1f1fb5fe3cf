"""Settings of the app and of the command's server: names, keys, bounds.

Pure data; `application.py` and every room of paths read the app's settings, `protocol.py` the connections'.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fdasync.cli.common.fields import Address, File, Folder
from fdasync.errors import ConfigError
from fdasync.registry.mapping import check
from fdasync.telemetry.logs import LogOptions

Most = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Instances = Annotated[int, Meta(ge=0, le=64)]
Dialect = Literal["sglang", "vllm"]

_MIN_KEY_CHARS = 16


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the app answers.

    Attributes:
        model: name of the model in answers; "": the name of the checkpoint's folder, or as the runner names it.
        dialect: whose server `owned_by` names, and whose form fields have that both dialects share. All paths are
            there in either.
        unknown_models: a request that names a model which is not served: "serve" it all the same, or "refuse" it with
            404. "auto": as the server of the dialect does: SGLang's serves, vLLM's refuses.
        api_key: every path asks for `Authorization: Bearer KEY`, or `x-api-key: KEY`; "": none does.
        admin_key: paths that control the engine ask for this key instead; "": they ask for `api_key`.
        weights_root: folder from which, and from whose subfolders, weights may be loaded; "": none may.
        pulls_root: folder in which `/pull_weights` and `/fetch_weights` may write checkpoints, which may be loaded as
            well; "": they write nothing.
        rows: form of the rows of `/inference/v1/generate`, whose requests cannot ask for them: "npy" as vLLM answers,
            "prime_rl" as prime-rl's server, "none".
        memory_saver: whether `/server_info` says that memory can be released. "auto": where it can be. "off": it never
            does, for trainers that do not release any and compare this with their own setting.
        max_body_nbytes: the largest body of a request; above it 413. Decoding it holds the loop, and with it every
            stream of the front: for some 6 ms a MiB of token ids.
        max_bodies_nbytes: bodies that are being read at a time, together; above it 429.
        max_json_depth: most levels of arrays and objects in a body; above it 400.
        max_live: most requests that generate at a time; above it 429.
        body_timeout_s: longest that a body may take to arrive, in seconds; then 408.
        pull_s: longest that a pull may take, in seconds; then 503.
        group_s: longest that the ranks of a trainer's group may take to meet, and that the next bytes of its update may
            take to come, in seconds, where a client names no `timeout_s`; then 400 or 503.
        health_s: longest that the token of `/health_generate` may take, in seconds.
    """

    model: str = ""
    dialect: Dialect = "sglang"
    unknown_models: Literal["auto", "serve", "refuse"] = "auto"
    api_key: str = ""
    admin_key: str = ""
    weights_root: Folder = ""
    pulls_root: Folder = ""
    rows: Literal["npy", "prime_rl", "none"] = "npy"
    memory_saver: Literal["auto", "off"] = "auto"
    max_body_nbytes: Most = 4 << 20
    max_bodies_nbytes: Most = 512 << 20
    max_json_depth: Most = 32
    max_live: Most = 4096
    body_timeout_s: Seconds = 60.0
    pull_s: Seconds = 3600.0
    group_s: Annotated[float, Meta(gt=0, le=3600.0)] = 120.0
    health_s: Seconds = 20.0

    def __post_init__(self) -> None:
        for name in ("weights_root", "pulls_root"):
            folder = getattr(self, name)
            if isinstance(folder, os.PathLike):
                msgspec.structs.force_setattr(self, name, os.fspath(folder))
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
        max_header_nbytes: the first line and all headers of a request, and what a chunked body has besides its bytes
            and their frames; above it 431.
        max_pipelined: requests that may wait behind the current one; one more closes the connection.
        header_s: longest from the first byte of a connection, or of its next request, to the end of the headers; a
            connection that sends nothing has as long, and so has the rest of a body whose request was answered.
        write_s: longest that a client may read nothing while an answer waits.
    """

    max_connections: Count = 16384
    max_header_nbytes: Annotated[int, Meta(ge=1, le=1 << 20)] = 64 << 10
    max_pipelined: Annotated[int, Meta(ge=1, le=1024)] = 16
    header_s: Seconds = 20.0
    write_s: Seconds = 120.0


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to listen.

    Attributes:
        host: name or address to listen on; only loopback ones without a key or client certificates.
        port: 0: any free one.
        certificate: PEM file: serve HTTPS; "": plain HTTP.
        key: PEM file with the certificate's key.
        client_authority: PEM file: clients must show a certificate of this authority; "": they show none.
        drain_s: longest that the end waits for answers under way.
        limits: of connections.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    certificate: File = ""
    key: File = ""
    client_authority: File = ""
    drain_s: float = 30.0
    limits: ConnectionLimits = ConnectionLimits()


class HttpOptions(LogOptions, frozen=True, kw_only=True):
    """What `fdasync http` serves.

    Attributes:
        prefill: prefill instances to start.
        decode: decode instances to start.
        mixed: mixed instances to start; one where nothing else is said.
        front: in-process: one engine on this process's loop, which JSON and slow readers then hold up.
        addresses: serve instances that run already (`fdasync serve`, `fdasync up`) instead of starting some; several
            fronts may serve the same ones.
        connect_s: with --connect: longest that the first instance may take to answer.
        keys: with --connect: file of `fdasync keys new`.
        tokenizer: with --connect: checkpoint folder for chats and text.
        api_key_file: file with the key that every path asks for.
        admin_key_file: file with the key that paths which control the engine ask for.
        drain_s: longest that the first signal waits for answers under way.
        traces: append a span of each request to this file, one line of JSON each (needs opentelemetry-sdk).
        access_log: a line on stderr for each answer, whatever the level.
        ready_fd: write one JSON line to this descriptor when ready.
    """

    prefill: Instances = 0
    decode: Instances = 0
    mixed: Instances = 0
    front: Literal["process", "in-process"] = "process"
    addresses: tuple[Address, ...] = ()
    connect_s: Annotated[float, Meta(ge=0.1, le=1e6)] = 30.0
    keys: File = ""
    tokenizer: Folder = ""
    api_key_file: File = ""
    admin_key_file: File = ""
    drain_s: Annotated[float, Meta(ge=0, le=1e9)] = 60.0
    traces: Annotated[str, Meta(title="PATH")] = ""
    access_log: bool = False
    ready_fd: Annotated[int, Meta(ge=0)] | None = None

    def counts(self) -> dict[Literal["prefill", "decode", "mixed"], int]:
        """How many instances of each role to start: a mixed one where nothing else is said."""
        starts = not self.addresses and self.front == "process"
        mixed = self.mixed or int(starts and not self.prefill)
        return {"prefill": self.prefill, "decode": self.decode, "mixed": mixed}
