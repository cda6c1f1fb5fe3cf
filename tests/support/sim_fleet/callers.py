"""The callers of a simulated fleet, and their checks: each request ends exactly once, in time, with a right result.

A caller waits, streams, reads slowly, leaves, aborts or is cancelled, as its plan says. Called by `simulation.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, FdasyncError, InstanceLost, PeerUnreachable, TooLong
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing.harness.engines import check_deltas, check_prompt_logprobs, expected
from tests.support.helpers import check_early_samples
from tests.support.sim_engine.workload import RequestPlan, arguments
from tests.support.sim_fleet.checks import Served, check_served
from tests.support.sim_fleet.workload import PATIENT_S

if TYPE_CHECKING:
    from fdasync_fleet.router.router import Router

    from fdasync.result import Delta, Result, Sample
    from tests.support.sim_fleet.fleet import Fleet

# the router's own, and some time for the loop
_GRACE_S = 5.01


class Callers:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def _router(self, name: str) -> Router:
        """The router that a request goes to."""
        routers = self._fleet.routers
        return routers[int(name.removeprefix("request-")) % len(routers)]

    async def call(self, number: int, plan: RequestPlan) -> None:
        """One request, from its arrival to its end."""
        await asyncio.sleep(plan.arrives_s)
        name = f"request-{number}"
        loop = asyncio.get_running_loop()
        began = loop.time()
        updates, current = self._fleet.updates, self._fleet.current
        try:
            if plan.way in ("stream", "slow", "leave"):
                result: Result | None = await self._read(name, plan)
            elif plan.way == "cancel":
                result = await self._cancelled(name, plan)
            else:
                if plan.way == "abort":
                    loop.call_later(plan.after_s, self._abort, name)
                result = await self._router(name).complete(plan.prompt, plan.params, request_id=name, **arguments(plan))
        except (InstanceLost, DeadlineExceeded, PeerUnreachable) as error:
            self._check_error(plan, error)
            self._fleet.outcomes[type(error).__name__] += 1
        except TooLong as error:
            self._check_too_long(name, plan, error)
            self._fleet.outcomes["TooLong"] += 1
        else:
            if result is None:
                self._fleet.outcomes["cancelled"] += 1
            else:
                try:
                    self._check_result(name, plan, result)
                    if current is not None and updates == self._fleet.updates:
                        self._check_version(result, current)
                except AssertionError as error:
                    error.add_note(f"{name}: {plan}")
                    raise
                self._fleet.outcomes.update(sample.finish_reason for sample in result.samples)
        # a slow reader takes its time after the end
        if plan.way != "slow":
            spent = loop.time() - began
            assert spent < plan.deadline_s + _GRACE_S, f"{name} took {spent} s, its deadline was {plan.deadline_s} s"

    def _abort(self, name: str) -> None:
        self._router(name).abort(name)
        self._router(name).abort(name)

    async def _cancelled(self, name: str, plan: RequestPlan) -> Result | None:
        try:
            async with asyncio.timeout(plan.after_s):
                return await self._router(name).complete(plan.prompt, plan.params, request_id=name, **arguments(plan))
        except DeadlineExceeded:
            raise
        except TimeoutError:
            return None

    async def _read(self, name: str, plan: RequestPlan) -> Result:
        deltas: list[Delta] = []
        early: list[Sample] = []
        call = self._router(name).generate(plan.prompt, plan.params, request_id=name, **arguments(plan))
        async with call as stream:
            async for delta in stream:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    early.append(stream.sample(delta.index))
                if plan.way == "slow":
                    await asyncio.sleep(plan.after_s)
                if plan.way == "leave" and len(deltas) > 2:
                    break
        result = stream.result
        check_early_samples(early, result)
        check_deltas(deltas, result, whole=plan.way != "leave", ends=False)
        return result

    # -- checks ---------------------------------------------------------------------------------------

    def _check_error(self, plan: RequestPlan, error: FdasyncError) -> None:
        # a link that is slow may tell an instance's end of a short request too late
        late = isinstance(error, DeadlineExceeded) or (isinstance(error, InstanceLost) and "in time" in error.problem)
        # an instance whose blocks were taken off offer, since their request ended, may tell this before the end is told
        torn = isinstance(error, InstanceLost) and "not all of it was handed over" in error.problem
        ended = torn and plan.way in ("abort", "leave")
        impatient = (late or torn) and plan.deadline_s < PATIENT_S
        assert ended or impatient or not self._fleet.work.calm, f"nothing went wrong, and yet: {error}"
        partial = error.partial if isinstance(error, InstanceLost) else None
        if partial is not None and self._fleet.steady:
            self._check_tokens(plan, partial)

    def _check_too_long(self, name: str, plan: RequestPlan, error: TooLong) -> None:
        """No instance that the router knows can hold the request, and the error names the largest limit among them."""
        sizes = {machine.address: machine.plan.most_tokens for machine in self._fleet.machines}
        limit = max(sizes[member.address] for member in self._router(name).table.instances.values())
        count = len(plan.prompt)
        assert count + plan.params.max_tokens > limit, f"refused, and one holds {limit} tokens: {error}"
        assert (error.limit, error.prompt_tokens) == (limit, count)

    @staticmethod
    def _check_version(result: Result, current: int) -> None:
        """No update was under way while it ran."""
        for sample in result.samples:
            versions = {int(span.version) for span in sample.weight_version}
            assert versions <= {current}, f"served under the versions {versions}, the router's is {current}"

    def _check_tokens(self, plan: RequestPlan, result: Result) -> None:
        for sample in result.samples:
            want = expected(plan.prompt, plan.params, sample.index, Oracle(self._fleet.work.shape)).token_ids
            assert sample.token_ids == want[: len(sample.token_ids)]

    def _served(self, place: tuple[str, str], plan: RequestPlan, index: int) -> Served:
        """The way of a sample of a request that an instance answered under a name."""
        last = next(machine for machine in self._fleet.machines if machine.name == place[0])
        first = next(
            (other for other in self._fleet.machines if other is not last and place[1] in other.hand_offs), None
        )
        # a prefiller answers a request that ended before it was handed over
        keys = last.keys.get(place[1]) or last.hand_offs.get(place[1]) or [-1] * plan.params.n
        own = keys[index]
        theirs = -1 if first is None else first.hand_offs[place[1]][index]
        return Served(last, own, first, theirs, index)

    def _check_result(self, name: str, plan: RequestPlan, result: Result) -> None:
        assert result.request_id == name
        assert [sample.index for sample in result.samples] == list(range(plan.params.n))
        assert result.total_s < plan.deadline_s + _GRACE_S, f"it ended at {result.total_s} s"
        answered = self._fleet.answered.get(name)
        for sample in result.samples:
            caused = {
                "stop": True,
                "length": True,
                "abort": plan.way in ("abort", "leave") or self._fleet.aborting,
                "deadline": plan.deadline_s < PATIENT_S or not self._fleet.work.calm,
            }
            assert caused.get(sample.finish_reason), f"{sample.finish_reason}, and the plan has no cause for it"
        if answered is None:
            # the router ended the request: it has the samples that had ended before, and nothing of the others
            whole = [sample for sample in result.samples if sample.weight_version]
            cut = [sample for sample in result.samples if not sample.weight_version]
            assert {sample.finish_reason for sample in cut} <= {"abort", "deadline"}
            assert not any(sample.token_ids for sample in cut), "tokens without rows and versions"
            for sample in whole:
                served = self._served(self._fleet.began[name], plan, sample.index)
                check_served(plan, sample, served, steady=self._fleet.steady)
            self._fleet.counts["kept_samples"] += len(whole)
            return
        # a request that ended before it was prepared has no prompt
        assert result.prompt_token_ids in (plan.prompt, ())
        for sample in result.samples:
            check_served(plan, sample, self._served(answered, plan, sample.index), steady=self._fleet.steady)
        served = self._served(answered, plan, 0)
        seen = None if self._fleet.steady else served.seen(len(plan.prompt))
        check_prompt_logprobs(result, plan.prompt, plan.params, served.last.oracle, seen)
        self._fleet.counts["scored"] += plan.params.prompt_logprobs_start is not None
        needs = len(plan.prompt) + plan.params.max_tokens
        self._fleet.counts["left_out"] += any(machine.plan.most_tokens < needs for machine in self._fleet.machines)
        self._fleet.counts["handed_over"] += served.first is not None
        self._fleet.counts["results"] += 1
