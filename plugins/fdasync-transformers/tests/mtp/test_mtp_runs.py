"""Steps that verify what multi-token prediction layers drafted: the conformance suite of runs, on a checkpoint whose
layers are often right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from agreeing import make_agreeing_checkpoint
from fdasync_transformers import TransformersConfig, TransformersRunner

from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk
from fdasync.testing import RunTests
from fdasync.testing.runners.bench import noisy, on_bench
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import runs_of

if TYPE_CHECKING:
    from fdasync.runner.base import Runner, RunnerLimits


@pytest.mark.ci
class TestMtpRuns(RunTests):
    limits = msgspec.structs.replace(RunTests.limits, speculation=3)
    logprob_error = 1e-4

    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.getbasetemp() / "mtp-runs"
        if not self.folder.exists():
            make_agreeing_checkpoint(self.folder)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def runner(self, limits: RunnerLimits, *, mtp: bool) -> Runner:
        config = TransformersConfig(dtype="float32", device="cpu", num_threads=1, self_check=False, mtp=mtp)
        return TransformersRunner(config, msgspec.structs.replace(limits, model=str(self.folder)))

    def make(self, limits: RunnerLimits) -> Runner:
        return self.runner(limits, mtp=True)

    def make_plain(self, limits: RunnerLimits) -> Runner:
        return self.runner(msgspec.structs.replace(limits, speculation=0), mtp=False)

    @pytest.mark.parametrize(("temperature", "least"), [(0.0, 90), (1.0, 62)])
    async def test_drafts_are_made_with_the_noise_of_their_positions(self, temperature: float, least: int) -> None:
        """So they are often right with noise, too: 70 tokens where the likeliest ones as drafts give 55."""
        sampler = msgspec.structs.replace(noisy(3), temperature=temperature)
        async with on_bench(self.make(self.limits)) as on:
            starts = [on.start(key, on.prompt(9, salt=key), [key], sampler=sampler) for key in range(4)]
            await on.launch_prefill(*starts)
            appends = [on.append(key, 4 + 4 * part + key) for key in range(4) for part in range(3)]
            outputs = [await on.launch(appends=appends if not step else []) for step in range(12)]
        # 48 runs
        assert sum(len(output.tokens) for output in outputs) >= least

    async def test_a_step_drafts_as_many_tokens_as_it_is_told(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            start = on.start(1, on.prompt(9), [0, 1])
            await on.launch(starts=[start], chunks=[Chunk(1, 9, True)], own_drafts=2)
            appends = [on.append(1, block) for block in (4, 8)]
            outputs = [await on.launch(appends=appends, own_drafts=0)]
            outputs += [await on.launch(own_drafts=most) for most in (1, None, None)]
            forwarded = [output.own_drafts for output in outputs]
            with pytest.raises(RunnerError, match="asks for 4 drafts, up to 3 are made"):
                await on.launch(own_drafts=4)
        assert forwarded == [(2,), (0,), (1,), (3,)]

    async def test_the_host_s_drafts_go_first(self) -> None:
        """A wrong one ends a run that the layers would have made longer; behind it they go on as before."""
        longest = 0
        async with on_bench(self.make(self.limits)) as on:
            for salt in range(3):
                prompt = on.prompt(9, salt=salt)
                streams = []
                for key in (2 * salt, 2 * salt + 1):
                    stream = list((await on.launch_prefill(on.start(key, prompt, [0]))).tokens)
                    drafts = None
                    if key % 2:
                        wrong = (streams[0][1] + 1) % on.capacity.vocab_size
                        drafts = drafts_of({key: (len(prompt) + 1, [wrong], 3)})
                    (run,) = runs_of(await on.launch(appends=[on.append(key, 1)], drafts=drafts))
                    stream += run
                    for _ in range(3):
                        stream += runs_of(await on.launch())[0]
                    await on.leave(key)
                    if key % 2:
                        assert len(run) == 1
                    else:
                        longest = max(longest, len(run))
                    streams.append(stream)
                shared = min(map(len, streams))
                assert streams[0][:shared] == streams[1][:shared]
        assert longest > 1
