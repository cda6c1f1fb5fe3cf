"""Steps on a CPU that verify drafts: the conformance suite on a checkpoint, and steps by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Grammar
from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk
from fdasync.testing import DraftTests
from fdasync.testing.runners.bench import GREEDY, noisy, on_bench
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import columns_of, runs_of

if TYPE_CHECKING:
    from fdasync.request import SamplerSpec
    from fdasync.runner.base import Runner, RunnerLimits

TABLES = ([0, 5, 2, 7], [1, 8, 3, 9])


class OnACpu(DraftTests):
    """On a folder's checkpoint."""

    logprob_error = 1e-4

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def make(self, limits: RunnerLimits) -> Runner:
        config = TransformersConfig(dtype="float32", device="cpu", num_threads=1, self_check=False)
        return TransformersRunner(config, msgspec.structs.replace(limits, model=str(self.folder)))


@pytest.mark.ci
class TestCpuRuns(OnACpu):
    """Drafts of a host on a mixture of experts, whose rows are its routing."""

    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.getbasetemp() / "cpu-runs"
        if not self.folder.exists():
            # a dense layer and one of experts
            make_tiny_checkpoint(self.folder, "qwen3_moe", num_hidden_layers=2)

    @pytest.mark.parametrize(
        ("changes", "takes"),
        [
            ({"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.4}, False),
            ({"min_tokens": 9, "stop_ids": tuple(range(0, 250, 3))}, False),
            ({"top_k": 4, "top_p": 0.9, "raw": True, "processed": True, "top": 2}, True),
            ({"grammar": Grammar("regex", "[a-f]{2}[0-9]{4}x*").packed()}, False),
        ],
        ids=["penalties", "stops", "log-probs", "grammar"],
    )
    async def test_each_row_sees_the_drafts_before_it(self, changes: dict[str, object], takes: bool) -> None:
        """Right drafts as far as a third token that is wrong. Where samples depend on more than the tokens' positions
        none are verified, and the tokens are the same."""
        for sampler in (GREEDY, noisy(5, 2)):
            await self._compare_rows(msgspec.structs.replace(sampler, **changes), takes)

    async def _compare_rows(self, sampler: SamplerSpec, takes: bool) -> None:
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as plain, on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(9)
            wanted = [await plain.launch_prefill(plain.start(0, prompt, [0], sampler=sampler))]
            wanted += [await plain.launch(appends=[plain.append(0, 5)] if not step else []) for step in range(13)]
            stream = prompt + [token for output in wanted for token in output.tokens]
            found = [await on.launch_prefill(on.start(0, prompt, [1], sampler=sampler))]
            known, lengths = len(prompt) + 1, []
            for bad in (3, 1, 3, 2) if takes else (3, 1, 2, 3, 3, 3, 3, 3, 3, 3, 0, 0, 0):
                drafts = stream[known : known + 3]
                if bad < len(drafts):
                    drafts[bad] = (drafts[bad] + 1) % on.capacity.vocab_size
                appends = [on.append(0, 8)] if len(found) == 1 else []
                found.append(await on.launch(appends=appends, drafts=drafts_of({0: (known, drafts, 3)})))
                lengths.append(len(found[-1].tokens))
                known += lengths[-1]
            assert lengths == ([4, 2, 4, 3] if takes else [1] * 13)
            assert [token for output in found for token in output.tokens] == stream[len(prompt) :]
            if sampler.raw:
                columns = [[entry for output in outputs for entry in columns_of(output)] for outputs in (wanted, found)]
                for number in (1, 2):
                    one, other = (np.array([entry[number] for entry in column]) for column in columns)
                    assert np.abs(one - other).max() <= self.logprob_error
                assert [entry[3].token_ids for entry in columns[0]] == [entry[3].token_ids for entry in columns[1]]

    async def test_a_full_block_table_forwards_nothing(self) -> None:
        """Beside a sequence that goes on, and one whose prompt is still in chunks."""
        async with on_bench(self.make(self.limits)) as on:
            size = on.size
            full, other, late = on.prompt(size - 1), on.prompt(4), on.prompt(6)
            alone = (await on.answer(9, other, 6, TABLES[1])).tokens
            await on.launch_prefill(on.start(0, full, [0]), on.start(1, other, [1]))
            start = on.start(2, late, [2])
            mixed = await on.launch(starts=[start], chunks=[Chunk(2, 3, False)])
            assert [len(run) for run in runs_of(mixed)] == [1, 1]
            mixed = await on.launch(chunks=[Chunk(2, 3, True)], drafts=drafts_of({1: (6, alone[2:4], 2)}))
            runs = runs_of(mixed)
            assert [runs[0], runs[1], len(runs[2])] == [[], alone[2:5], 1]
            on.rows([1], 0, 4 + 4)
            # nothing at all to forward
            assert runs_of(await on.launch(skips=[1, 2])) == [[]]
            # with a block it goes on where it was
            assert [len(run) for run in runs_of(await on.launch(appends=[on.append(0, 5)]))] == [1, 1, 1]

    async def test_drafts_are_refused_where_none_were_asked_for(self) -> None:
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as on:
            await on.launch_prefill(on.start(0, on.prompt(3), [0]))
            with pytest.raises(RunnerError, match="has drafts, and this runner verifies none"):
                await on.launch(drafts=drafts_of({0: (4, [1], 1)}))


@pytest.mark.nightly
class TestCpuStates(OnACpu):
    """The same suite on recurrent layers, whose state must go on behind the last draft that was right."""

    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.getbasetemp() / "cpu-states"
        if not self.folder.exists():
            make_tiny_checkpoint(self.folder, "qwen3_next")
