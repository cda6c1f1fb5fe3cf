"""`fdasync ray up`: connects to a cluster and runs a `RayFleet` until a signal. Called by `command.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click
import msgspec
import uvloop

from fdasync.cli.common.signals import Signals
from fdasync_ray.config import FleetConfig

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_LONG_S = 3600.0


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line; see `fdasync ray up --help`."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    address: str | None = None
    name: str = "fleet"
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
        transport=options.transport,
        drain_s=options.drain_s,
    )
    config.check()
    import ray

    alone = {} if options.address else {"include_dashboard": False}
    ray.init(address=options.address or "local", log_to_driver=False, logging_level="ERROR", **alone)
    try:
        if options.ray_gpus is None and engine.runner != "synthetic" and engine.runner_config.get("device") != "cpu":
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            config = msgspec.structs.replace(config, gpus=float(engine.tensor_parallel if has_gpus else 0))
        return uvloop.run(_run(config))
    finally:
        ray.shutdown()


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
            for one in await fleet.members():
                _say(f"{one.name} ({one.role}) at {one.address} on node {one.node[:8]}")
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
