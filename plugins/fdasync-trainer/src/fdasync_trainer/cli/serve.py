"""Serves the requests of `fdasync verify-trainer`: by one engine, by a prefill and a decode instance, and one alone.

Computes no log-probs of its own and compares nothing. Called by `run.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.cli.demo.pd import totals_of
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import connect

from fdasync.engine.config import EngineConfig
from fdasync.engine.engine import Engine
from fdasync.runner.plugins import make_runner
from fdasync_trainer.cli.workload import (
    BLOCK_TOKENS,
    MAX_RUNNING,
    MAX_STEP_TOKENS,
    Answers,
    Ask,
    Play,
    TrainerOptions,
    Update,
    check_room,
    few_blocks,
    make_asks,
)

if TYPE_CHECKING:
    from fdasync.result import Result


def config_of(options: TrainerOptions) -> EngineConfig:
    """The engines' configuration, but for the number of their blocks. Raises ConfigError."""
    runner_config: dict[str, Any] = {"dtype": options.dtype}
    runner_config |= {
        name: value
        for name, value in (("device", options.device), ("num_threads", options.num_threads))
        if value is not None
    }
    values: dict[str, Any] = {
        "model": str(options.model),
        "runner_config": runner_config,
        "tokenizer": "none",
        "block_tokens": BLOCK_TOKENS,
        "max_running": MAX_RUNNING,
        "max_step_tokens": MAX_STEP_TOKENS,
        "pipeline_depth": 2,
        "seed": options.seed,
        "sum_slices": options.sum_slices,
        "tensor_parallel": options.tensor_parallel,
    }
    if options.numerics != "default":
        values["numerics"] = options.numerics
    return EngineConfig.from_mapping(values)


async def serve_all(options: TrainerOptions, vocab_size: int, update: Update | None) -> list[Play]:
    """Serve all requests in all ways that the options ask for."""
    config = config_of(options)
    ways = 2 if options.pd else 1
    asks = make_asks("engine", -(-options.tokens // ways), vocab_size, options.seed)
    plays = [await _by_one_engine(_with_blocks(config, asks), asks, update)]
    if options.pd:
        asks = make_asks("pd", -(-options.tokens // ways), vocab_size, options.seed)
        plays.append(await _by_two(_with_blocks(config, asks), asks, plays[0].weights_ids))
    return plays


def _with_blocks(config: EngineConfig, asks: list[Ask]) -> EngineConfig:
    return msgspec.structs.replace(config, num_blocks=few_blocks(asks))


async def _by_one_engine(config: EngineConfig, asks: list[Ask], update: Update | None) -> Play:
    """Two steps in flight, chunks of odd sizes, shared prefixes, too few blocks; weights are updated in the middle."""
    async with Engine(config) as engine:
        check_room(engine.capacity.max_context_tokens)
        weights_ids = {engine.facts().weight_version: engine.capacity.weights_id}
        crossed: frozenset[str] = frozenset()
        if update is None:
            results = await Answers(asks).serve(engine)
        else:
            before, after = Answers(asks[: len(asks) // 2]), Answers(asks[len(asks) // 2 :])
            async with asyncio.TaskGroup() as group:
                early = group.create_task(before.serve(engine))
                # requests have deadlines: each ends, and a failed one ends the group
                await before.third.wait()
                crossed = frozenset({ask.name for ask in asks[: len(asks) // 2]} - before.results.keys())
                await engine.update_weights(None, update.tensors, "keep", expected=update.expected)
                weights_ids[engine.facts().weight_version] = engine.capacity.weights_id
                late = group.create_task(after.serve(engine))
            results = [*early.result(), *late.result()]  # of tasks that are done
        return Play(
            name="engine",
            asks=asks,
            results=results,
            weights_ids=weights_ids,
            crossed=crossed,
            totals=engine.stats().scheduler,
        )


async def _by_two(config: EngineConfig, asks: list[Ask], weights_ids: dict[str, str]) -> Play:
    """Serve by a prefill and a decode instance, processes of their own, with the checkpoint's weights."""
    first = next(iter(weights_ids))
    fleet = LocalFleet(plans_for(config, {"prefill": 1, "decode": 1}))
    async with fleet, connect(fleet.addresses, RouterConfig(require="all")) as router:
        results = await fleet.while_alive(Answers(asks).serve(router))
        totals, moved = await fleet.while_alive(totals_of(router, (1, 1)))
        return Play(
            name="prefill and decode",
            asks=asks,
            results=results,
            weights_ids={first: weights_ids[first]},
            crossed=frozenset(),
            totals=totals,
            moved_blocks=moved.blocks,
        )


async def serve_alone(config: EngineConfig, ask: Ask, update: Update | None, plugin: Any) -> tuple[Result, Any]:
    """Serve one request alone, in this process; returns its result, and the trace of the served model's modules."""
    # hooks do not see what graphs run
    runner_config = {**config.runner_config, "cuda_graphs": False}
    # one process has the bits of all ranks, where they promise the trainer's
    alone = {"process": "inline", "pipeline_depth": 1, "tensor_parallel": 1}
    config = msgspec.structs.replace(config, runner_config=runner_config, **alone)
    config = _with_blocks(config, [ask])
    runner: Any = make_runner(config.runner, config.runner_config, config.runner_limits())
    async with Engine(config, runner=runner) as engine:
        if update is not None:
            await engine.update_weights(None, update.tensors, expected=update.expected)
        with plugin.traced(runner.model) as trace:
            result = await engine.complete(ask.prompt, ask.params, request_id=ask.name)
        return result, trace
