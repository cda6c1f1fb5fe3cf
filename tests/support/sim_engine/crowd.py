"""Everything at once on one engine: calls that stop it, change it or let it go on, at any time and beside each other,
and requests that want the positions that indexers choose.

`crowded` makes a workload of `workload.py` such a one; `Crowd` plays the calls. Whatever they are, every request ends,
and once all is undone nothing is left of them. Called by `simulation.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np

from fdasync.engine.chosen_output import chosen_nbytes
from fdasync.errors import Asleep, EngineClosed, EngineFailed, UpdateUnderWay
from fdasync.request import PauseMode, SleepMode
from fdasync.runner.chosen import ChosenShape
from fdasync.testing.harness.engines import _passes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.engine.engine import Engine
    from fdasync.request import SamplingParams
    from fdasync.result import Sample
    from fdasync.runner.synthetic.oracle import Oracle
    from fdasync.testing.harness.pass_model import Read
    from tests.support.sim_engine.workload import RequestPlan, Workload

Kind = Literal["pause", "resume", "update", "parts", "sleep", "wake", "reset", "abort_all", "hash"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
# labels of its updates, apart from those of a workload's own
_FIRST_LABEL = 1000


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """One call.

    Attributes:
        kind: of the call; "parts" begins an update in parts, and ends it without any.
        at_s: when.
        pause, sleep: mode of a pause, and of a sleep.
        aborts: an update is in mode "abort".
        weights_id: of an update.
        for_s: between beginning and end of an update in parts.
        patience_s: the caller gives up after so long; inf: never.
        prefix: of the names of requests that are aborted.
    """

    kind: Kind
    at_s: float
    pause: PauseMode
    sleep: SleepMode
    aborts: bool
    weights_id: int
    for_s: float
    patience_s: float
    prefix: str

    @property
    def may_abort(self) -> bool:
        """It may end requests."""
        return (
            (self.kind == "pause" and self.pause == "abort")
            or (self.kind == "sleep" and self.sleep == "abort")
            or (self.kind in ("update", "parts") and self.aborts)
            or self.kind == "abort_all"
        )


def crowded(work: Workload) -> Workload:
    """This workload with calls and chosen positions, drawn from its seed."""
    random = Random(f"crowd {work.seed}")
    change = msgspec.structs.replace
    span_s = max([work.ends_at_s, *[plan.arrives_s for plan in work.requests], 0.2])
    controls = tuple(
        Control(
            kind=random.choice(_KINDS),
            at_s=random.uniform(0.0, 1.5 * span_s),
            pause=random.choice(get_args(PauseMode)),
            sleep=random.choice(get_args(SleepMode)),
            aborts=random.random() < 0.5,
            weights_id=random.randint(1, 1 << 40),
            for_s=random.choice((0.0, 0.05)),
            patience_s=random.choice((float("inf"), float("inf"), 0.0, 0.02)),
            prefix=f"request-{random.randrange(10)}",
        )
        for _ in range(random.randint(3, 16))
    )
    # some meet in one turn
    meets = [random.choice(controls).at_s if random.random() < 0.3 else one.at_s for one in controls]
    controls = tuple([change(one, at_s=at_s) for one, at_s in zip(controls, meets, strict=True)])
    if random.random() < 0.6:
        # where nothing ends requests they are whole
        controls = tuple([one for one in controls if not one.may_abort])
    if random.random() < 0.35 and work.config.tensor_parallel == 1 and work.config.speculation is None:
        work = _narrow(work, random)
    room = work.runner.max_context_tokens
    work = change(
        work,
        updates=(),
        controls=controls,
        requests=_with_retries(work.requests, room, random),
        again=_with_retries(work.again, room, random),
    )
    if work.config.tensor_parallel > 1 or random.random() < 0.2:
        # groups of ranks tell no positions
        return work
    requests = tuple([_choosing(plan, work.config.max_requests, random) for plan in work.requests])
    again = tuple([_choosing(plan, work.config.max_requests, random) for plan in work.again])
    shape = ChosenShape((0, 2), 3)
    most = max([chosen_nbytes(shape, plan.params, len(plan.prompt)) for plan in (*requests, *again)], default=0)
    # some wait for the bytes of others
    bytes_of = random.choice((1, 2, 1 << 20))
    return change(
        work,
        runner=change(work.runner, chosen_top_k=shape.top_k),
        config=change(work.config, chosen_positions_nbytes=max(bytes_of * most, 1 << 12)),
        requests=requests,
        again=again,
    )


def _narrow(work: Workload, random: Random) -> Workload:
    """Two lanes, short steps, few blocks and slow copies from the host: requests wait for blocks in every way."""
    change = msgspec.structs.replace
    runner = change(
        work.runner,
        block_tokens=4,
        num_blocks=random.choice((10, 14, 20)),
        max_context_tokens=40,
        max_run_tokens=1,
        step_s=0.01,
        token_s=0.005,
        copy_s=random.choice((0.003, 0.03)),
        state_words=random.choice((0, 1)),
        num_snapshots=random.choice((2, 5)),
    )
    config = change(
        work.config,
        max_running=2,
        max_step_tokens=random.choice((2, 3, 4, 8)),
        max_requests=4096,
        prefix_cache=True,
        host_blocks=20,
        store=random.choice(("memory", "")),
        store_deadline_s=5.0,
        fetch_min_tokens=0,
        decode_reserve_blocks=1,
        state_every_tokens="auto",
        host_snapshots="auto",
    )

    tokens = range(runner.vocab_size)
    prompts = [tuple(random.choices(tokens, k=random.randint(12, 28))) for _ in range(3)]

    def fits(plan: RequestPlan) -> RequestPlan:
        prompt = random.choice(prompts)
        most = min(plan.params.max_tokens, 40 - len(prompt))
        scored = plan.params.prompt_logprobs_start
        params = change(
            plan.params,
            max_tokens=most,
            min_tokens=min(plan.params.min_tokens, most),
            prompt_logprobs_start=None if scored is None else min(scored, len(prompt) - 1),
        )
        arrives_s = random.uniform(0.0, 2.0)
        return change(plan, prompt=prompt, params=params, start=min(plan.start, len(prompt) - 1), arrives_s=arrives_s)

    requests = tuple([fits(plan) for plan in work.requests])
    again = tuple([fits(plan) for plan in work.again]) if config.store else ()
    return change(work, runner=runner, config=config, requests=requests, again=again)


def _with_retries(plans: tuple[RequestPlan, ...], room: int, random: Random) -> tuple[RequestPlan, ...]:
    """Some prompts come back whole, as those of rollouts do."""
    change, retried = msgspec.structs.replace, []
    for plan in plans:
        prompt, params = random.choice(plans).prompt, plan.params
        if random.random() < 0.5 and len(prompt) + params.max_tokens <= room:
            last = len(prompt) - 1
            scored = params.prompt_logprobs_start
            params = change(params, prompt_logprobs_start=None if scored is None else min(scored, last))
            plan = change(plan, prompt=prompt, params=params, start=min(plan.start, last))
        retried.append(plan)
    return tuple(retried)


def _choosing(plan: RequestPlan, most_samples: int, random: Random) -> RequestPlan:
    """Some want chosen positions, many of them for several samples, and with short answers: one may end early."""
    if random.random() < 0.4:
        return plan
    change, params = msgspec.structs.replace, plan.params
    start = random.choice((0, len(plan.prompt) - 1, random.randrange(len(plan.prompt))))
    max_tokens = min(params.max_tokens, random.choice((1, 3, 1 << 20)))
    params = change(
        params,
        chosen_positions_start=start,
        n=min(random.choice((params.n, 2, 3)), most_samples),
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
    )
    return change(plan, params=params)


class Crowd:
    """Plays the calls of a workload on its engine.

    Args:
        versions: labels of updates and their weights, to which those of this crowd are added as they begin.
        saw: told of the engine's failure.
    """

    def __init__(
        self, engine: Engine, work: Workload, versions: dict[int, int], saw: Callable[[EngineFailed], None]
    ) -> None:
        self._engine = engine
        self._work = work
        self._versions = versions
        self._saw = saw
        self.may_abort = any(one.may_abort for one in work.controls)

    async def play(self) -> None:
        """All calls; at the end everything is undone, and the engine runs, or has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, one in enumerate(self._work.controls):
                    group.create_task(self._one(number, one), name=f"control-{number}")
        finally:
            await self._undo()

    async def _one(self, number: int, one: Control) -> None:
        await asyncio.sleep(one.at_s)
        # refused while another change is under way, or cut short by its caller's impatience: it goes on, or never began
        with suppress(UpdateUnderWay, Asleep, TimeoutError):
            try:
                async with asyncio.timeout(None if one.patience_s == float("inf") else one.patience_s):
                    await self._call(number, one)
            except EngineFailed as error:
                self._saw(error)
            except EngineClosed:
                assert self._work.ends != "wait" or self._engine.state == "failed"

    async def _call(self, number: int, one: Control) -> None:
        engine = self._engine
        if one.kind == "pause":
            await engine.pause(one.pause)
        elif one.kind == "resume":
            await engine.resume()
        elif one.kind == "update":
            label = _FIRST_LABEL + number
            self._versions[label] = one.weights_id
            tensor = ("weights", "uint64", (1,), one.weights_id.to_bytes(8, "little"))
            await engine.update_weights(label, [tensor], "abort" if one.aborts else "keep")
        elif one.kind == "parts":
            await engine.begin_weight_update("abort" if one.aborts else "keep")
            await asyncio.sleep(one.for_s)
            await engine.end_weight_update()
        elif one.kind == "sleep":
            await engine.sleep(1, one.sleep)
        elif one.kind == "wake":
            await engine.wake()
        elif one.kind == "reset":
            await engine.reset_cache()
        elif one.kind == "abort_all":
            engine.abort_all(one.prefix)
        else:
            await engine.weights_fingerprint()

    async def _undo(self) -> None:
        engine = self._engine
        while engine.state in ("running", "draining"):
            with suppress(UpdateUnderWay, EngineClosed):
                try:
                    await engine.abandon_weight_update()
                    await engine.wake()
                    await engine.resume()
                except EngineFailed as error:
                    self._saw(error)
                    return
                if engine.load().doing == "running":
                    return
            await asyncio.sleep(0.01)


def check_chosen(
    sample: Sample,
    prompt: Sequence[int],
    params: SamplingParams,
    oracle: Oracle,
    seen: Sequence[Read] | None,
    first_seen: Sequence[Read] | None,
) -> None:
    """Raise AssertionError unless a sample has the oracle's positions: of one with tokens all of them.

    Args:
        seen, first_seen: as of `check_sample`, of this sample and of the first one of its request.
    """
    start, found = params.chosen_positions_start, sample.chosen_positions
    if start is None or found is None or sample.finish_reason == "failed":
        # one that ended before it was prepared has none
        assert start is not None or found is None
        assert found is not None or start is None or not sample.token_ids
        return
    assert found.start == start
    tokens = [*prompt, *sample.token_ids]
    count = len(found.array)
    if sample.token_ids:
        assert count == len(tokens) - 1 - start, f"{count} rows of chosen positions, {len(tokens) - 1 - start} are due"
    own, shared = _passes(tokens, oracle, seen)[0], _passes(prompt, oracle, first_seen)[0]
    # the first sample computes the prompt but for its last token for all
    digests = np.concatenate([shared[: len(prompt) - 1], own[len(prompt) - 1 :]])
    at = slice(start, start + count)
    assert np.array_equal(found.array, oracle.chosen(digests[at], np.arange(len(tokens))[at])), "wrong chosen positions"
