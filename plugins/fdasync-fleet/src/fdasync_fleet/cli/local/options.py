"""What `fdasync serve` and `fdasync up` are told besides the engine's configuration; each field is an option.

Pure data. Made by the commands, and read by what they run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fdasync.cli.common.fields import Address, Fields, File
from fdasync.telemetry.logs import LogOptions

Count = Annotated[int, Meta(ge=0, le=64)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Descriptor = Annotated[int, Meta(ge=0)]


class LinkOptions(LogOptions, frozen=True, kw_only=True):
    """How an instance meets others, what it logs, and how it ends.

    Attributes:
        listen: tcp://HOST:PORT of the first instance, instead of sockets; the others listen at the ports behind it, or
            each at a free one with port 0; beyond the loopback with --keys alone.
        host: what other machines dial in place of the host of --listen, behind address translation or where --listen is
            tcp://0.0.0.0:PORT: an address in numbers, or an interface.
        keys: file of `fdasync keys new`: every link that is not ipc is authenticated and encrypted.
        encrypt_blocks: blocks that go over tcp do so by TLS 1.3, both ways; needs --keys, and the package
            cryptography.
        trusted_network: whoever reaches this machine's ports may read and write blocks on their way: have them come
            from other machines by Mooncake's engine (fdasync-mooncake), over RDMA or TCP, where both instances say so.
        transport: how blocks come from other instances: shm (mapped memory), tcp (a loopback port), a plugin's name, or
            auto: shm where that works, else tcp; both where --listen is a tcp address. device: from GPU to GPU of one
            machine where both instances say so, else as auto.
        drain_s: longest that the first signal waits for requests.
    """

    listen: Address = ""
    host: Annotated[str, Meta(title="HOST")] = ""
    keys: File = ""
    encrypt_blocks: bool = False
    trusted_network: bool = False
    transport: Annotated[str, Meta(title="NAME")] = "auto"
    drain_s: Seconds = 600.0


class ServeOptions(LinkOptions, frozen=True, kw_only=True):
    """Of `fdasync serve`.

    Attributes:
        role: mixed serves requests whole; prefill ones compute prompts and hand over to decode ones; the file's, or
            mixed.
        listen: ipc:///path, or tcp://127.0.0.1:PORT (0: any); with --keys tcp://HOST:PORT: an address that the other
            machines reach, or an interface's name.
        data_port: port from which other machines read blocks, where address translation has to pass it on; 0: any.
        peers: a decode instance to connect to at once; to others it connects when a router names them.
        name: for people; the address by default.
        json_log: append events as JSON lines; - is stderr.
        metrics_port: Prometheus on the loopback; 0: any free port.
        ready_fd: write one JSON line to this descriptor when ready.
        log_fd: write the lines of --log-level to this descriptor in place of stderr.
        parent: end when this process, our parent, ends.
    """

    listen: Address
    role: Literal["mixed", "prefill", "decode"] | None = None
    data_port: Port = 0
    peers: tuple[Address, ...] = ()
    name: str = ""
    json_log: Annotated[str, Meta(title="PATH")] = ""
    metrics_port: Port | None = None
    ready_fd: Descriptor | None = None
    log_fd: Descriptor = 2
    parent: Annotated[int, Meta(ge=1)] | None = None


class UpOptions(LinkOptions, frozen=True, kw_only=True):
    """Of `fdasync up`.

    Attributes:
        prefill: prefill instances.
        decode: decode instances.
        mixed: mixed instances.
        folder: where the sockets are made, and removed at the end; holds nothing else; made if missing; addresses are
            ipc://FOLDER/p0, .../d0 and so on; a private temporary folder by default.
        json_log: append the events of each instance to DIR/NAME.jsonl, as JSON lines.
        restart: whether an instance that fails or is killed is started again.
    """

    prefill: Count = 0
    decode: Count = 0
    mixed: Count = 0
    folder: Annotated[str, Meta(title="FOLDER")] = ""
    json_log: Annotated[str, Meta(title="FOLDER")] = ""
    restart: Literal["on-failure", "no"] = "on-failure"


def missing_half(prefill: int, decode: int, mixed: int) -> str:
    """The option that is missing where there is one half of a pair alone; "": none is."""
    if bool(prefill) == bool(decode) or mixed:
        return ""
    return "--decode" if prefill else "--prefill"


_SECURE = ("host", "keys", "encrypt_blocks", "trusted_network", "transport")
_LOGS = ("log_level", "log_json")
SERVE = Fields(
    ServeOptions,
    groups={
        "Instance": ("role", "listen", "name", "drain_s", "json_log", "metrics_port", "ready_fd"),
        "Links": ("peers", "data_port", *_SECURE),
        "Logs": _LOGS,
    },
    names={"peers": "--peer"},
    hidden=("log_fd", "parent"),
)
UP = Fields(
    UpOptions,
    groups={
        "Instances": ("prefill", "decode", "mixed", "folder", "drain_s", "json_log", "restart"),
        "Links": ("listen", *_SECURE),
        "Logs": _LOGS,
    },
)
LINKS = Fields(LinkOptions, leave=("listen",))
