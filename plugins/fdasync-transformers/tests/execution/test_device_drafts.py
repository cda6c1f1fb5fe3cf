"""Steps of the device path that verify drafts: on a GPU where there is one, else in Triton's interpreter.

Held against the path of CPUs, which computes one token a step, and against the conformance suite: all of it on a GPU,
what takes the interpreter seconds elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from device_path import DEVICE, make_small_checkpoint
from device_waits import waits_raise
from fdasync_transformers import TransformersConfig, TransformersRunner, make_random_checkpoint
from fdasync_transformers.execution import passes
from fdasync_transformers.execution.passes import lone_sizes
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

from fdasync import Grammar
from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk
from fdasync.runner.drafts import path_tokens
from fdasync.testing import DraftTests
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import runs_of

if TYPE_CHECKING:
    from pathlib import Path

    from step_driver import Sequence

    from fdasync.runner.base import Runner, RunnerLimits, StepOutput
    from fdasync.testing.runners.bench import Answer

MOST = 3
OWN: dict[str, Any] = {"self_check": False, **DEVICE}


class OnTheDevice(DraftTests):
    """On a folder's checkpoint."""

    logprob_error = 1e-4
    own = OWN

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def make(self, limits: RunnerLimits) -> Runner:
        limits = msgspec.structs.replace(limits, model=str(self.folder), max_context_tokens=64)
        # of as many rows as may run
        sizes = (1, 4, 16) if limits.speculation else (1, 4)
        return TransformersRunner(TransformersConfig(**{"dtype": "float32", "graph_sizes": sizes, **self.own}), limits)


@pytest.mark.gpu
class TestDraftsOnAGpu(OnTheDevice):
    """All of the suite, with graphs of a few numbers of rows."""

    own = {"self_check": False, "device": "cuda"}  # noqa: RUF012

    @pytest.fixture(autouse=True, params=["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.getbasetemp() / f"device-drafts-{request.param}"
        if not self.folder.exists():
            make_tiny_checkpoint(self.folder, request.param)


@pytest.mark.ci
@pytest.mark.parametrize(
    "test",
    [
        "test_a_step_goes_on_where_the_path_leads_it",
        "test_a_path_that_was_wrong_is_followed_on",
        "test_positions_behind_a_rejected_draft_have_no_rows",
        "test_each_sequence_has_its_own_drafts",
        pytest.param("test_what_is_right_is_accepted", marks=pytest.mark.nightly),
        pytest.param("test_log_probs_stand_beside_their_tokens", marks=pytest.mark.nightly),
        pytest.param("test_drafts_that_do_not_fit_fail_the_step", marks=pytest.mark.nightly),
    ],
)
def test_the_suite(tmp_path: Path, test: str) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    suite = OnTheDevice()
    suite.folder = tmp_path  # type: ignore[attr-defined]
    getattr(suite, test)()


@pytest.mark.gpu
class TestFixedDraftsOnAGpu(OnTheDevice):
    """With fixed numerics tokens and log-probs have the bits that they have without drafts, in bfloat16 too."""

    limits = msgspec.structs.replace(OnTheDevice.limits, numerics="fixed")
    logprob_error = 0.0
    own = {"device": "cuda", "dtype": "bfloat16"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        make_tiny_checkpoint(tmp_path, "qwen3_moe")

    def assert_same(self, one: Answer, other: Answer) -> None:
        assert one.tokens == other.tokens
        for name, rows in one.rows.items():
            assert np.array_equal(np.sort(rows, axis=-1), np.sort(other.rows[name], axis=-1)), f"rows of {name} differ"


@pytest.mark.ci
@pytest.mark.parametrize(
    "way",
    ["decodes", pytest.param("tiles", marks=pytest.mark.nightly), pytest.param("both", marks=pytest.mark.nightly)],
)
async def test_prompts_beside_drafts(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the step attends: rows of drafts that were not wanted are padding among those of a prompt."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    plain = await Driver.open(tmp_path, config={"self_check": False, "device": "cpu", "num_threads": 1})
    wanted = [plain.sequence([1, 8, 15, 22, 29], 8), plain.sequence([3, 5, 9, 11, 2, 3], 5)]
    await plain.run(wanted)
    rows = [np.sort(plain.rows(one), -1) for one in wanted]
    await plain.close()
    ways = []
    kept = passes.Passes.way
    monkeypatch.setattr(passes.Passes, "way", lambda self, batch: ways.append(kept(self, batch)) or ways[-1])
    driver = await Driver.open(tmp_path, config=OWN, pipeline_depth=2, speculation=MOST)
    executor: Any = driver.runner.bound.executor
    executor.passes.flat_tokens = 64 if way == "decodes" else 0
    if way == "both":
        # a GPU would replay a graph
        executor.passes.mixed = None
    if way == "tiles":
        with executor._services.streams.on("compute"):
            executor.capture_mixed((16,), 16)
    one, two = driver.sequence(wanted[0].prompt, 8), driver.sequence(wanted[1].prompt, 5)
    stream = wanted[0].prompt + wanted[0].tokens
    await driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 5, True)])
    one.tokens = stream[5:6]
    # the path is too short for the second step, which has rows for drafts of the first one all the same
    path = drafts_of({one.key: (6, stream[6:10], MOST)})
    flights = [
        driver.launch(appends=driver.append(one, 7), starts=[driver.start(two)], chunks=[Chunk(two.key, 2, False)],
                      drafts=path),
        driver.launch(chunks=[Chunk(two.key, 4, True)], drafts=path),
    ]  # fmt: skip
    runs = [runs_of(await flight) for flight in flights]
    assert runs == [[stream[6:10]], [stream[10:11], wanted[1].tokens[:1]]]
    one.tokens += stream[6:11]
    two.tokens = wanted[1].tokens[:1]
    assert set(ways[-2:]) == {way}
    for number, seq in enumerate((one, two)):
        found = np.sort(driver.rows(seq), -1)
        assert np.array_equal(found, rows[number][: len(found)])
    await driver.close()


@pytest.mark.ci
async def test_a_full_block_table_forwards_nothing(tmp_path: Path) -> None:
    """As a step in flight finds out, and alone: it goes on with a block, where it was."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    (tokens, _, _), *_ = await plainly(tmp_path, 6)
    driver = await Driver.open(tmp_path, config=OWN, pipeline_depth=2, speculation=MOST)
    one = driver.sequence([1, 8, 15, 22, 29], 6)
    await driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 5, True)])
    # three positions are free
    paths = drafts_of({one.key: (6, tokens[1:6], MOST)})
    flights = [driver.launch(drafts=paths), driver.launch(drafts=paths)]
    assert [runs_of(await flight) for flight in flights] == [[tokens[1:4]], [[]]]
    assert runs_of(await driver.launch()) == [[]]
    one.tokens = tokens[:4]
    assert runs_of(await driver.launch(appends=driver.append(one))) == [tokens[4:5]]
    await driver.close()


def prompts_of(driver: Driver, count: int) -> list[Sequence]:
    """A greedy one, one that draws and wants log-probs, and one whose samples depend on the tokens before."""
    return [
        driver.sequence([1, 8, 15, 22, 29], count),
        driver.sequence([3, 5, 9, 11, 2, 3], count, temperature=1.0, seed=4, raw=True, processed=True, top=2),
        driver.sequence([3] * 7, count, repetition_penalty=1.3, presence_penalty=0.2),
    ]


async def plainly(folder: Path, count: int) -> list[tuple[list[int], Any, list[float]]]:
    """Tokens, rows and raw log-probs without drafts, by the path of CPUs."""
    driver = await Driver.open(folder, config={"self_check": False, "device": "cpu", "num_threads": 1})
    asked = prompts_of(driver, count)
    await driver.run(asked)
    found = [(one.tokens, np.sort(driver.rows(one), -1), one.raw if one.spec.raw else []) for one in asked]
    await driver.close()
    return found


def guessed(kind: str, stream: list[int], start: int) -> list[int]:
    """A path from a position of the stream: right, wrong, or wrong at every third position."""
    path = stream[start : start + path_tokens(MOST, 2)]
    bad = {"right": 0, "wrong": 1, "half right": 3}[kind]
    return [(token + 1) % 50 if bad and (start + at) % bad == 0 else token for at, token in enumerate(path)]


async def drafted(
    folder: Path, kind: str, count: int, wanted: list[tuple[list[int], Any, list[float]]], **options: Any
) -> tuple[list[tuple[list[int], Any, list[float]]], int]:
    """The same with drafts and two steps in flight; and how many steps it took."""
    driver = await Driver.open(folder, config={**OWN, **options}, pipeline_depth=2, speculation=MOST)
    assert driver.capacity.max_run_tokens == MOST + 1
    asked = prompts_of(driver, count)
    starts = [driver.start(one) for one in asked]
    flights = [driver.launch(starts=starts, chunks=[Chunk(one.key, len(one.prompt), True) for one in asked])]
    steps = 0

    def take(output: StepOutput) -> None:
        place = 0
        for one, run in zip(asked, runs_of(output), strict=True):
            one.tokens += run
            if one.spec.raw:
                assert output.raw is not None
                one.raw += output.raw[place : place + len(run)]
            place += len(run)

    while min(len(one.tokens) for one in asked) < count:
        steps += 1
        # room for all that two steps in flight may take; several blocks at once
        appends = [entry for one in asked for entry in driver.append(one, 2 * MOST + 3)]
        paths = {}
        for one, (tokens, _, _) in zip(asked, wanted, strict=True):
            stream, start = one.prompt + tokens, len(one.prompt) + len(one.tokens)
            if one.tokens and (path := guessed(kind, stream, start)):
                paths[one.key] = (start, path, MOST)
        flights.append(driver.launch(appends=appends, drafts=drafts_of(paths) if paths else None))
        take(await flights.pop(0))
    for flight in flights:
        take(await flight)
    found = []
    for one in asked:
        one.tokens = one.tokens[:count]
        found.append((one.tokens, np.sort(driver.rows(one), -1), one.raw[:count]))
    await driver.close()
    return found, steps


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind", ["half right", *[pytest.param(one, marks=pytest.mark.nightly) for one in ("right", "wrong")]]
)
async def test_whatever_is_drafted_answers_stay(tmp_path: Path, kind: str) -> None:
    """Two steps in flight, runs over the ends of blocks, beside a sequence that takes no drafts."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    count = 9
    wanted = await plainly(tmp_path, count)
    found, steps = await drafted(tmp_path, kind, count, wanted)
    for (tokens, rows, raw), (right_tokens, right_rows, right_raw) in zip(found, wanted, strict=True):
        assert tokens == right_tokens
        assert np.array_equal(rows, right_rows)
        assert np.allclose(raw, right_raw, atol=2e-4)
    # the last one has a token a step
    assert steps >= count


@pytest.mark.ci
async def test_drafts_are_refused_where_none_were_asked_for(tmp_path: Path) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config=OWN)
    assert driver.capacity.max_run_tokens == 1
    one = driver.sequence([3, 4, 5], 3)
    await driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
    with pytest.raises(RunnerError, match="has drafts, and this runner verifies none"):
        await driver.launch(drafts=drafts_of({one.key: (4, [1], 1)}))
    await driver.close()


@pytest.mark.ci
async def test_beside_a_sequence_under_a_grammar(tmp_path: Path) -> None:
    """Which has one row a step, sampled when the step before has ended, or none where its block table is full."""
    make_random_checkpoint(tmp_path, size="tiny")
    grammar = Grammar("regex", "[a-f]{2}[0-9]{4}x*").packed()
    plain = await Driver.open(tmp_path, config={"self_check": False, "device": "cpu", "num_threads": 1})
    wanted = [plain.sequence([5, 6, 7], 4, grammar=grammar), plain.sequence([8, 9, 10], 12)]
    await plain.run(wanted)
    await plain.close()
    driver = await Driver.open(tmp_path, config=OWN, pipeline_depth=2, speculation=MOST)
    held, free = driver.sequence([5, 6, 7], 4, grammar=grammar), driver.sequence([8, 9, 10], 12)
    flights = [
        driver.launch(
            starts=[driver.start(held), driver.start(free)], chunks=[Chunk(held.key, 3, True), Chunk(free.key, 3, True)]
        )
    ]
    stream = free.prompt + wanted[1].tokens
    runs: list[list[list[int]]] = []
    for turn in range(4):
        known = 3 + sum(len(run[1]) for run in runs)
        drafts = drafts_of({free.key: (known, stream[known : known + 7], MOST)}) if runs else None
        appends = driver.append(free, 12)
        if turn == 3:
            held.tokens = [run[0][0] for run in runs if run[0]]
            appends += driver.append(held)
        flights.append(driver.launch(appends=appends, drafts=drafts))
        runs.append(runs_of(await flights.pop(0)))
    runs += [runs_of(await flight) for flight in flights]
    await driver.close()
    assert [token for run in runs for token in run[0]] == wanted[0].tokens[:3]
    assert [len(run[0]) for run in runs] == [1, 1, 0, 0, 1]
    assert [token for run in runs for token in run[1]][:12] == wanted[1].tokens
    assert max(len(run[1]) for run in runs) == MOST + 1


@pytest.mark.gpu
async def test_no_step_with_drafts_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    wanted = await plainly(tmp_path, 20)
    honest = TransformersRunner.launch

    def strictly(self: TransformersRunner, step: Any) -> Any:
        with waits_raise():
            return honest(self, step)

    monkeypatch.setattr(TransformersRunner, "launch", strictly)
    found, _ = await drafted(tmp_path, "half right", 20, wanted)
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in wanted]


def test_steps_without_drafts_have_graphs_of_as_many_rows_as_run():
    assert lone_sizes((1, 2, 4, 8, 16), 4) == (1, 2, 4)
    assert lone_sizes((1, 2, 4, 8, 16), 5) == (1, 2, 4, 8)
    assert lone_sizes((1, 2), 5) == (1, 2)
