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

if TYPE_CHECKING:
    from fdasync_ray.config import FleetConfig

_LOOPBACK = "tcp://127.0.0.1:0"
_CONNECT_S = 10.0
_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_LONG_S = 3600.0


def run_up(config: FleetConfig, address: str, *, chosen: bool) -> int:
    """Run the fleet until a signal; returns the exit code. Raises FdasyncError where it cannot start.

    Args:
        address: of a Ray cluster that runs, or "auto"; "": one of this machine alone is started.
        chosen: somebody has said how many GPUs an instance has.
    """
    # of a cluster of its own, which ends with this process, no other machine is a part
    listen = config.listen or ("" if address else _LOOPBACK)
    config = msgspec.structs.replace(config, listen=listen, keys=config.keys and str(Path(config.keys).absolute()))
    config.check()
    _connect(address)
    import ray

    engine = config.engine
    try:
        if not chosen and engine.runner != "synthetic" and engine.runner_config.get("device") != "cpu":
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            config = msgspec.structs.replace(config, gpus=float(engine.tensor_parallel if has_gpus else 0))
            config.check()
        return uvloop.run(_run(config))
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    """Connect this process to a cluster. Raises ConfigError where none answers."""
    import ray

    hint = "start one: `ray start --head`, or leave --address out to have one of this machine alone"
    host, _, port = address.rpartition(":")
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
