"""Conformance of runners whose samples are held to grammars. Mixed into `RunnerTests`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput
from fdasync.request import Grammar
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite

if TYPE_CHECKING:
    from fdasync.request import SamplerSpec
    from fdasync.runner.base import Runner

# no grammar of any runner
_NONSENSE = Grammar("regex", "(")


async def _refusal(runner: Runner, grammar: Grammar) -> BadInput | None:
    try:
        await runner.check_grammar(grammar)
    except BadInput as error:
        return error
    return None


class GrammarTests(RunnerSuite):
    """See the module; without `RunnerSuite.grammar` a runner must say that it has none."""

    @on_loop
    async def test_grammars_are_checked(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            equal(on.capacity.grammars, self.grammar is not None, "Capacity.grammars, where the suite has a grammar")
            refusal = await _refusal(on.runner, _NONSENSE)
            assert refusal is not None, f"check_grammar of {_NONSENSE} returned instead of raising BadInput"
            equal(refusal.field, "grammar", "field of the error")
            if self.grammar is not None:
                equal(await _refusal(on.runner, self.grammar), None, "check_grammar of the suite's grammar raised")

    @on_loop
    async def test_a_grammar_holds_one_sequence_alone(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if self.grammar is None:
                return
            prompts = [on.prompt(5, salt=salt) for salt in range(3)]
            samplers = [noisy(3), self._under(noisy(4)), GREEDY]
            alone = [(await on.answer(key, prompts[key], 4, [key], sampler=samplers[key])).tokens for key in range(3)]
            check(
                alone[1] != (await on.answer(5, prompts[1], 4, [1], sampler=noisy(4))).tokens, "it has an effect", alone
            )
            starts = [on.start(10 + key, prompts[key], [key], sampler=samplers[key]) for key in range(3)]
            first = await on.launch_prefill(*starts)
            steps = [first.tokens, *[await on.step() for _ in range(3)]]
            for key, want in enumerate(alone):
                equal([step[key] for step in steps], want, f"tokens of sequence {key} of which 1 has a grammar")

    @on_loop
    async def test_a_resumed_sequence_goes_on_with_its_grammar(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if self.grammar is None:
                return
            prompt = on.prompt(on.size - 2)
            sampler = self._under(noisy(6))
            tokens = (await on.answer(0, prompt, 6, [0, 1], sampler=sampler)).tokens
            for known in (1, 3, 5):
                start = on.start(known, [*prompt, *tokens[:known]], [2, 3], prompt_len=len(prompt), sampler=sampler)
                resumed = [*(await on.launch_prefill(start)).tokens]
                resumed += await on.decode(known, len(prompt) + known, [2, 3], 5 - known)
                await on.leave(known)
                equal(resumed, tokens[known:], f"tokens of a sequence that was resumed behind {known} of them")

    @on_loop
    async def test_a_step_in_flight_has_taken_no_token_yet(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if self.grammar is None or not self.overlaps:
                return
            prompt, sampler = on.prompt(5), self._under(noisy(7))
            tokens = (await on.answer(0, prompt, 4, [0], sampler=sampler)).tokens
            started = on.launch_prefill(on.start(1, prompt, [1], sampler=sampler))
            steps = [started, *[on.launch() for _ in range(3)]]
            equal([(await step).tokens[0] for step in steps], tokens, "tokens of steps that were launched in a row")

    def _under(self, sampler: SamplerSpec) -> SamplerSpec:
        assert self.grammar is not None, f"the suite has a grammar: {self.grammar}"
        return msgspec.structs.replace(sampler, grammar=self.grammar.packed())
