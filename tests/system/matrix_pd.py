"""What is played in the cells of the matrix with several instances, and what must come of it.

Real sockets, real shared memory, on a real loop; whoever is to die is a process of its own and is killed. A burst like
that of `matrix_play.py` goes through a router: prompts that share prefixes, a group, a stream that is aborted, new
weights in its middle. Tokens, log-probs and rows are held against the oracle; rows carry the stamps of the instance
whose KV is in use: the prefiller's for what was sent, the decoder's for the prefix that it had and for what it made.

Called by `test_matrix.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.config import RouterConfig

import fdasync
from fdasync import Instance, SamplingParams, WeightSpan
from fdasync.errors import InstanceLost
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.scheduler.state.config import LeaseRules
from fdasync.testing import check_idle, check_sample, oracle_of
from fdasync.testing.harness.engines import expected, until
from fdasync.testing.harness.pass_model import Read
from tests.support.drafters import answers_of
from tests.system.matrix import BLOCK_TOKENS, NEW_WEIGHTS_ID, WEIGHTS_ID, engine_config
from tests.system.matrix_life import drafter_of, tokens
from tests.system.matrix_play import GROUP, LATE, LATEST, LEAVER, SHARED, SOLO, TAIL

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_fleet.router.router import Router

    from fdasync.result import Result, Sample
    from tests.support.drafters import Foretold
    from tests.system.covering import Cell

_LINKS = LinkConfig(beat_s=0.1, lost_s=1.5)
_RULES = LeaseRules(ttl_s=2.0, receive_s=2.0, silent_s=1.0)
_DEADLINE_S = 120.0
# of each instance's stamps; who is to die comes first
_STAMPS = 100_000
_CHILD = "from fdasync.cli.main import main; main()"


class PdPlay:
    """One cell."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self.folder = folder
        self.oracle = oracle_of(self._config("decode", 0))
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams, int, Result]] = {}
        self.lost: list[str] = []
        self.seeds = iter(range(1, 1000))
        self.bases: dict[str, list[int]] = {"prefill": [], "decode": []}
        self.here: list[Instance] = []
        self._drafters: list[Foretold] = []
        self.mortal: asyncio.subprocess.Process | None = None
        self.mortal_address = ""
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights_id": NEW_WEIGHTS_ID}))
        # who is to die comes first of its kind
        for number, role in enumerate(self._roles(), 1):
            config = self._config(role, number)
            if config.speculation is not None:
                # a process has an installed one
                speculation = msgspec.structs.replace(config.speculation, drafter="ngram")
                config = msgspec.structs.replace(config, speculation=speculation)
            self._path(number).write_bytes(msgspec.json.encode(config))

    def _roles(self) -> list[str]:
        return [role for role in ("prefill", "decode") for _ in range(1 + self.wants("dies", role))]

    def _path(self, number: int) -> Path:
        return self.folder / f"config{number}.json"

    def wants(self, dimension: str, *values: str) -> bool:
        return self.cell[dimension] in values

    def _config(self, role: Any, number: int) -> fdasync.EngineConfig:
        store = {"path": str(self.folder / f"store{number}"), "max_nbytes": 64 << 20}
        config = engine_config(self.cell, store if self.wants("tier", "file") else None, role=role)
        runner = {**config.runner_config, "stamp_base": number * _STAMPS}
        return msgspec.structs.replace(config, role=role, runner_config=runner, leases=_RULES, seed=number)

    # -- who is there ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises AssertionError."""
        async with asyncio.timeout(3 * _DEADLINE_S), AsyncExitStack() as stack:
            addresses = []
            for number, role in enumerate(self._roles(), 1):
                mortal = self.wants("dies", role) and not self.bases[role]
                self.bases[role].append(number * _STAMPS)
                addresses.append(await self._begin(stack, role, number, mortal=mortal))
            router = fdasync.connect(addresses, RouterConfig(retries=5, connect_s=_DEADLINE_S), links=_LINKS, seed=1)
            await stack.enter_async_context(router)
            if self.wants("hit", "yes"):
                await self._warm(addresses)
            await self._burst(router)
            await self._come_back(router)
            if self.wants("pd", "device"):
                assert [instance.notice for instance in self.here] == [""] * len(self.here)
            await until(lambda: not any(self._held(instance) for instance in self.here), _DEADLINE_S, 0.01)
            for instance in self.here:
                check_idle(instance.engine)
        self._check_all()

    async def _begin(self, stack: AsyncExitStack, role: Any, number: int, *, mortal: bool) -> str:
        config = self._config(role, number)
        address = f"ipc://{self.folder}/{role[0]}{number}"
        if mortal:
            self.mortal_address = address
            self.mortal = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _CHILD, "serve", "--config", str(self._path(number)), "--listen", address,
                "--transport", self.cell["pd"], stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            stack.push_async_callback(self._bury, self.mortal)
            return address
        drafter = drafter_of(config)
        if drafter is not None:
            self._drafters.append(drafter)
        instance = Instance(config, listen=address, transport=self.cell["pd"], links=_LINKS, drafter=drafter)
        await stack.enter_async_context(instance)
        self.here.append(instance)
        return address

    @staticmethod
    async def _bury(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    @staticmethod
    def _held(instance: Instance) -> int:
        stats = instance.engine.stats()
        counters = stats.scheduler
        return (
            stats.live
            + counters.hand_offs
            + counters.leased
            + counters.moving
            + counters.writing
            + stats.steps_in_flight
        )

    async def _warm(self, addresses: list[str]) -> None:
        """Decode instances serve the common beginning whole, once each."""
        for address in addresses:
            if address.startswith(f"ipc://{self.folder}/d"):
                async with fdasync.connect([address], RouterConfig(connect_s=_DEADLINE_S), links=_LINKS) as alone:
                    await alone.complete((*SHARED, 1), SamplingParams(max_tokens=2, temperature=0.0, seed=0))

    # -- the burst ------------------------------------------------------------------------------------

    def _params(self, params: SamplingParams, max_tokens: int, n: int = 1) -> SamplingParams:
        return msgspec.structs.replace(params, max_tokens=max_tokens, n=n, seed=next(self.seeds))

    def _foretell(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        for drafter in self._drafters:
            drafter.learn(answers_of([(prompt, params)], self.oracle))

    async def _ask(
        self, router: Router, name: str, prompt: tuple[int, ...], params: SamplingParams, start: int = 0
    ) -> None:
        self._foretell(prompt, params)
        try:
            result = await router.complete(prompt, params, request_id=name, start=start, deadline_s=_DEADLINE_S)
        except InstanceLost:
            self.lost.append(name)
        else:
            self.asked[name] = prompt, params, start, result

    async def _burst(self, router: Router) -> None:
        greedy = SamplingParams(temperature=0.0, logprobs="raw")
        sampled = SamplingParams(temperature=1.0, logprobs="both")
        async with asyncio.TaskGroup() as group:
            ask = [
                ("solo", SOLO, self._params(greedy, 48), 0),
                ("group", GROUP, self._params(sampled, 14, 2), 0),
                ("tail", TAIL, self._params(greedy, 20), 5),
                ("latest", LATEST, self._params(sampled, 24), 0),
                ("aligned", tokens("aligned", 3 * BLOCK_TOKENS), self._params(sampled, 24), 0),
                ("again", SHARED + tokens("again", 9), self._params(greedy, 30), 0),
            ]
            for name, prompt, params, start in ask:
                group.create_task(self._ask(router, name, prompt, params, start))
            leaver = group.create_task(self._leave(router))
            if not self.wants("update", "none"):
                await until(lambda: self._decoding() or bool(leaver.done()), _DEADLINE_S, 0.001)
                group.create_task(self._ask(router, "late", LATE, self._params(sampled, 6)))
                await self._update(router)
            if self.mortal is not None:
                member = router.table.find(self.mortal_address)
                assert member is not None
                # in the middle of something, unless the update outlasted all of it
                await until(lambda: member.live > 0 or not router.live, _DEADLINE_S, 0.001)
                self.mortal.kill()

    def _decoding(self) -> bool:
        return any(instance.engine.stats().scheduler.running > 1 for instance in self.here)

    async def _leave(self, router: Router) -> None:
        """A stream; in some cells it is aborted."""
        params = self._params(SamplingParams(temperature=1.0, logprobs="both"), 40)
        self._foretell(LEAVER, params)
        told: list[int] = []
        try:
            async with router.generate(LEAVER, params, request_id="leaver", deadline_s=_DEADLINE_S) as stream:
                async for delta in stream:
                    told += delta.token_ids
                    if self.wants("abort", "yes") and len(told) >= 4:
                        stream.abort()
            result = stream.result
        except InstanceLost as lost:
            self.lost.append("leaver")
            kept = lost.partial.token_ids
            if kept != tuple(told):
                raise AssertionError(f"{kept} are said to have come, {told} did") from lost
            return
        assert result.token_ids == tuple(told)
        if self.wants("abort", "yes") and self.wants("dies", "nobody") and not self.wants("update", "abort"):
            assert result.finish_reason == "abort"
            assert 4 <= len(told) < 40
        self.asked["leaver"] = LEAVER, params, 0, result

    async def _update(self, router: Router) -> None:
        await router.update_weights(1, str(self.folder), "abort" if self.wants("update", "abort") else "keep")

    async def _come_back(self, router: Router) -> None:
        """Whoever is left serves what comes; and knows what it knew."""
        greedy = SamplingParams(temperature=0.0, logprobs="raw")
        await self._ask(router, "once more", SOLO, self._params(greedy, 3))
        await self._ask(router, "once again", SOLO, self._params(greedy, 3))
        assert self.asked["once again"][3].samples[0].finish_reason == "length"

    # -- checks ---------------------------------------------------------------------------------------

    def _check_all(self) -> None:
        # only what was told already may not be sent again
        assert set(self.lost) <= ({"leaver"} if self.wants("dies", "decode") else set()), f"{self.lost} were lost"
        for name, (prompt, params, start, result) in self.asked.items():
            assert result.prompt_token_ids == prompt
            assert len(result.samples) == params.n
            for sample in result.samples:
                try:
                    self._check(prompt, params, start, sample)
                except AssertionError as error:
                    error.add_note(f"sample {sample.index} of request {name!r}")
                    raise
        updated = {span.version for *_, result in self.asked.values() for span in result.samples[0].weight_version}
        assert updated == ({"0"} if self.wants("update", "none") else updated | {"1"})
        stats = [instance.engine.stats().scheduler for instance in self.here]
        drafted, accepted = (sum(getattr(one, f"{what}_tokens") for one in stats) for what in ("drafted", "accepted"))
        if self.wants("drafts", "none"):
            assert not drafted
        elif self.wants("dies", "nobody") and self.wants("update", "none"):
            assert 0 < accepted < drafted
        if self.wants("dies", "nobody"):
            assert sum(counters.leases_granted for counters in stats) >= 6
            assert sum(counters.received_blocks for counters in stats) > 0
        if self.wants("pd", "device") and self.wants("dies", "nobody") and self.wants("preempt", "none"):
            # of those whom it was handed to nothing came by way of the host
            decoder = next(one for one in self.here if one.engine.config.role == "decode")
            assert decoder.engine.stats().scheduler.swapped_in_blocks == 0
        if self.wants("tier", "file") and self.wants("dies", "nobody") and self.wants("preempt", "none"):
            assert all(counters.written_blocks for counters in stats)

    def _check(self, prompt: tuple[int, ...], params: SamplingParams, start: int, sample: Sample) -> None:
        seen = self._seen(prompt, sample)
        # who was aborted, and whose instance was gone before it could answer, has what had come: no rows
        spans = sample.weight_version
        if len(spans) > 1 and (spans[0].stop == 1 or not self.wants("preempt", "none")):
            # kept and maybe preempted later, or sent back to the start before its first step where it was handed to:
            # which of its KV is of which weights only a trace could tell
            self._check_kept(prompt, params, start, sample)
            return
        gone = sample.finish_reason == "abort" and self.wants("dies", "decode") and sample.routing is None
        if gone:
            self._check_gone(prompt, params, start, sample)
            return
        check_sample(sample, prompt, params, self.oracle, start=start, seen=seen)
        if not sample.token_ids:
            return
        stamps = sample.aux["stamp"][:, 0].tolist()
        owners = ["prefill" if stamp // _STAMPS * _STAMPS in self.bases["prefill"] else "decode" for stamp in stamps]
        # with one decoder and nobody lost, what came by a lease is the prefiller's, the rest the decoder's
        made = owners[len(prompt) - start :]
        if self.wants("dies", "nobody", "prefill") and self.wants("preempt", "none"):
            assert set(made) <= {"decode"}
        if self.wants("dies", "nobody") and self.wants("update", "none") and self.wants("preempt", "none"):
            self._check_prefix(prompt, owners, start)

    def _check_gone(self, prompt: tuple[int, ...], params: SamplingParams, start: int, sample: Sample) -> None:
        """Its instance died before it could tell which tokens are of which weights: they are right for some switch
        from the old to the new ones, with the KV of before it kept, or computed again after a preemption."""
        candidates = [self._seen(prompt, sample)]
        if self.wants("update", "keep"):
            for stop in range(len(sample.token_ids)):
                spans = (WeightSpan(0, stop, "0"), WeightSpan(stop, len(sample.token_ids), "1"))
                seen = self._seen(prompt, msgspec.structs.replace(sample, weight_version=spans))
                assert seen is not None
                switch = len(prompt) - 1 + stop
                again = [Read((NEW_WEIGHTS_ID,), NEW_WEIGHTS_ID)] * (len(seen) - switch)
                candidates += [seen, seen[:switch] + again]
        errors = []
        for seen in candidates:
            try:
                check_sample(sample, prompt, params, self.oracle, start=start, seen=seen, names=())
            except AssertionError as error:
                errors.append(error)
            else:
                return
        raise errors[0]

    def _check_kept(self, prompt: tuple[int, ...], params: SamplingParams, start: int, sample: Sample) -> None:
        """Of the first weights, up to there."""
        count = sample.weight_version[0].stop
        assert sample.token_ids[:count] == expected(prompt, params, sample.index, self.oracle).token_ids[:count]
        assert sample.routing is not None
        rows = sample.routing.array
        assert len(rows) == len(prompt) + len(sample.token_ids) - 1 - start
        known = len(prompt) - 1 + count
        digests = self.oracle.digests([*prompt, *sample.token_ids])[start:known]
        assert np.array_equal(rows[: known - start], self.oracle.rows(digests))

    def _check_prefix(self, prompt: tuple[int, ...], owners: list[str], start: int) -> None:
        shared = len(SHARED) if prompt[: len(SHARED)] == SHARED else 0
        had = shared if self.wants("hit", "yes") else 0
        assert set(owners[: max(had - start, 0)]) <= {"decode"}
        if not had and prompt not in (SOLO,):
            assert owners[0] == "prefill", "nobody else had its first token before"

    def _seen(self, prompt: tuple[int, ...], sample: Sample) -> list[Read] | None:
        """Weights of each pass: of who was kept through an update, the old ones up to there."""
        if self.wants("update", "none"):
            return None
        ids = (WEIGHTS_ID, NEW_WEIGHTS_ID)
        spans = sample.weight_version
        total = len(prompt) + len(sample.token_ids)
        if len(spans) < 2:
            weights = ids[int(spans[0].version) if spans else 0]
            return [Read((weights,), weights)] * total
        switch = len(prompt) - 1 + spans[1].start
        old, new = Read((ids[0],), ids[0]), ids[1]
        mixed = [Read((ids[0],) * switch + (new,) * (at - switch + 1), new) for at in range(switch, total)]
        return [old] * switch + mixed
