"""`fdasync ray up`: connects to a cluster and runs a `RayFleet` until a signal. Called by `command.py`."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import uvloop

from fdasync.cli.common.signals import Signals
from fdasync.errors import ConfigError
from fdasync_ray.config import FleetConfig

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig

_LOOPBACK = "tcp://127.0.0.1:0"
_CONNECT_S = 10.0
_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_LONG_S = 3600.0


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line; see `fdasync ray up --help`."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    address: str | None = None
    name: str = "fleet"
    listen: str = ""
    keys: Path | None = None
    encrypt_blocks: bool = False
    room_s: float = 60.0
    cpus: float = 1.0
    ray_gpus: float | None = None
    transport: str = "auto"
    drain_s: float = 600.0


def run_up(engine: EngineConfig, options: UpOptions) -> int:
    """Run the fleet until a signal; returns the exit code. Raises FdasyncError where it cannot start."""
    config = FleetConfig(
        engine=engine,
        name=options.name,
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
        cpus=options.cpus,
        gpus=options.ray_gpus or 0.0,
        # of a cluster of its own, which ends with this process, no other machine is a part
        listen=options.listen or ("" if options.address else _LOOPBACK),
        keys="" if options.keys is None else str(options.keys.absolute()),
        transport=options.transport,
        serve_options=("--encrypt-blocks",) if options.encrypt_blocks else (),
        room_s=options.room_s,
        drain_s=options.drain_s,
    )
    config.check()
    _connect(options.address)
    import ray

    try:
        if options.ray_gpus is None and engine.runner != "synthetic" and engine.runner_config.get("device") != "cpu":
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            config = msgspec.structs.replace(config, gpus=float(engine.tensor_parallel if has_gpus else 0))
            config.check()
        return uvloop.run(_run(config))
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    """Connect this process to a cluster. Raises ConfigError where none answers."""
    import ray

    hint = "start one: `ray start --head`, or leave --address out to have one of this machine alone"
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        # Ray itself tries for two minutes, and then ends the process
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as error:
            raise ConfigError("--address", f"no Ray cluster answers at {address}: {error}", hint=hint) from None
    alone = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **alone)
    except (ConnectionError, ValueError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        raise ConfigError("--address", f"no connection to a Ray cluster at {address}: {told}", hint=hint) from None


async def _run(config: FleetConfig) -> int:
    from fdasync_ray.fleet import RayFleet

    fleet = RayFleet(config, _say)
    with Signals() as signals:
        entering = asyncio.ensure_future(fleet.__aenter__())
        try:
            _say(f"starting {sum(config.counts().values())} instances")
            await signals.wait(entering, count=1, timeout_s=_LONG_S)
            if not entering.done():
                _say("interrupted while they loaded")
                return _EXIT_INTERRUPTED
            entering.result()  # of a task that is done
            _say(f'ready; find it with fdasync_ray.attach("{config.name}")')
            while not signals.count:
                await signals.wait(count=1, timeout_s=_LONG_S)
            _say("draining; another signal ends all at once")
            draining = asyncio.ensure_future(fleet.drain())
            await signals.wait(draining, count=2, timeout_s=2 * config.drain_s + _LONG_S)
            whole = draining.done() and draining.result()
            draining.cancel()
            _say("all drained" if whole else "requests were cut short")
            return 0 if whole else _EXIT_FAILED
        finally:
            entering.cancel()
            await asyncio.wait([entering])
            await fleet.aclose()


def _say(line: str) -> None:
    click.echo(f"fdasync ray: {line}")
