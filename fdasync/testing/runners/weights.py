"""The part of the conformance suite for runners about new weights: from a folder, and tensor by tensor.

Used by `runners/suite.py`.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import InvariantBroken, WeightsRejected
from fdasync.request import WeightsFingerprint
from fdasync.runner.base import Runner, TensorMeta
from fdasync.runner.worker.weight_transfer import itemsize_of
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import on_bench
from fdasync.testing.runners.harness import RunnerSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from fdasync.testing.runners.bench import Answer, Bench

_TOKENS = 4
# an odd number of elements, so that pieces end anywhere
_PIECE = 997


class WeightsTests(RunnerSuite):
    """After an update a runner answers as a new one with those weights; after a refusal, as before."""

    def test_a_folder_changes_the_answers_and_back(self) -> None:
        if not self.loads:
            return

        async def test(folders: Sequence[Path]) -> None:
            fresh, ids = await self._fresh()
            async with on_bench(self.make(self.limits)) as on:
                self.assert_same(fresh[0], await self._answer(on, 0))
                # the same folder twice, and the first one again
                for number, weights in enumerate((1, 1, 0)):
                    weights_id = await on.runner.load_folder(str(folders[weights]))
                    equal(weights_id, ids[weights], f"load_folder of set {weights}: its weights id")
                    await _check_fingerprint(on.runner, weights_id)
                    self.assert_same(fresh[weights], await self._answer(on, 1 + number))

        self._run_with_folders(test)

    def test_a_folder_is_compared_without_being_loaded(self) -> None:
        if not self.loads:
            return

        async def test(folders: Sequence[Path]) -> None:
            fresh, ids = await self._fresh()
            async with on_bench(self.make(self.limits)) as on:
                if type(on.runner).read_weights_id is Runner.read_weights_id:
                    # the contract leaves it to the runner
                    return
                for weights in (1, 0):
                    weights_id = await on.runner.read_weights_id(str(folders[weights]))
                    equal(weights_id, ids[weights], f"read_weights_id of set {weights}")
                await _rejected(on.runner.read_weights_id(str(folders[2] / "nowhere")))
                self.assert_same(fresh[0], await self._answer(on, 0))
                # after an update as before it
                await on.runner.load_folder(str(folders[1]))
                equal(await on.runner.read_weights_id(str(folders[0])), ids[0], "read_weights_id of set 0 under set 1")
                self.assert_same(fresh[1], await self._answer(on, 1))

        self._run_with_folders(test)

    def test_a_broken_folder_changes_nothing(self) -> None:
        if not self.loads:
            return

        async def test(folders: Sequence[Path]) -> None:
            async with on_bench(self.make(self.limits)) as on:
                before = await self._answer(on, 0)
                for number, folder in enumerate((folders[2], folders[2] / "nowhere")):
                    await _rejected(on.runner.load_folder(str(folder)))
                    self.assert_same(before, await self._answer(on, 1 + number))
                await on.runner.load_folder(str(folders[1]))

        self._run_with_folders(test)

    @on_loop
    async def test_tensors_change_the_answers_and_back(self) -> None:
        if not self.loads:
            return
        fresh, ids = await self._fresh()
        async with on_bench(self.make(self.limits)) as on:
            for number, weights in enumerate((1, 1, 0)):
                await _write(on.runner, self.tensors_of(weights))
                await _check_fingerprint(on.runner, ids[weights])
                self.assert_same(fresh[weights], await self._answer(on, number))

    @on_loop
    async def test_tensors_that_do_not_fit_change_nothing(self) -> None:
        if not self.loads:
            return
        tensors = self.tensors_of(1)
        metas = [TensorMeta(name, dtype, shape) for name, dtype, shape, _ in tensors]
        good, rest = metas[0], metas[1:]
        bad = [
            [*metas, msgspec.structs.replace(good, name="not.in.the.model")],
            [*rest, msgspec.structs.replace(good, shape=(*good.shape, 2))],
            [*rest, msgspec.structs.replace(good, dtype="float1")],
            [*metas, good],
        ]
        async with on_bench(self.make(self.limits)) as on:
            before = await self._answer(on, 0)
            for number, way in enumerate(bad):
                await _rejected(on.runner.begin_tensors(way))
                self.assert_same(before, await self._answer(on, 1 + number))
            try:
                await on.runner.write_tensor(0, 0, memoryview(tensors[0][3]).cast("B")[:0])
            except InvariantBroken:
                pass
            else:
                raise AssertionError(f"a write of {tensors[0][0]}, which was not announced, returned")
            # a refusal is no failure
            await _write(on.runner, tensors)

    @on_loop
    async def test_after_weights_that_nobody_wants_all_tensors_must_come(self) -> None:
        tensors = self.tensors_of(1) if self.loads else []
        if len(tensors) < 2:
            return
        fresh, ids = await self._fresh()
        async with on_bench(self.make(self.limits)) as on:
            await _write(on.runner, self.tensors_of(0))
            await on.runner.forget_weights()
            some = [TensorMeta(name, dtype, shape) for name, dtype, shape, _ in tensors[1:]]
            await _rejected(on.runner.begin_tensors(some))
            await _write(on.runner, tensors)
            await _check_fingerprint(on.runner, ids[1])
            self.assert_same(fresh[1], await self._answer(on, 0))

    def _run_with_folders(self, test: Callable[[Sequence[Path]], Coroutine[Any, Any, None]]) -> None:
        """Run `test(folders)`: set 0, set 1, and set 1 broken, all written before there is a loop to block."""
        with _folders() as folders:
            for folder, weights in zip(folders, (0, 1, 1), strict=True):
                self.write_folder(folder, weights)
            self.break_folder(folders[2])
            self.run(test(folders))

    async def _fresh(self) -> tuple[list[Answer], list[str]]:
        """Answers and weights ids of new runners with either set."""
        answers, ids = [], []
        for weights in range(2):
            async with on_bench(self.make_of(self.limits, weights)) as on:
                answers.append(await self._answer(on, 0))
                ids.append(on.capacity.weights_id)
        tokens = [answer.tokens for answer in answers]
        check(tokens[0] != tokens[1], "tokens under two sets of weights, which must differ", tokens)
        check(ids[0] != ids[1], "ids of two sets of weights, which must differ", ids)
        return answers, ids

    async def _answer(self, on: Bench, key: int) -> Answer:
        # the blocks of the last sequence, whose KV is of other weights
        return await on.answer(key, on.prompt(on.size + 3), _TOKENS, [0, 1])


async def _check_fingerprint(runner: Runner, weights_id: str) -> None:
    """What a runner tells of the weights in use, where it tells it."""
    if type(runner).fingerprint_weights is Runner.fingerprint_weights:
        # the contract leaves it to the runner
        return
    plain, whole = await runner.fingerprint_weights(), await runner.fingerprint_weights(True)
    equal(plain, WeightsFingerprint(weights_id), "fingerprint_weights after load_folder")
    equal(whole.weights_id, weights_id, "fingerprint_weights with the digests of tensors")
    check(whole.tensors, "fingerprint_weights has a digest for every tensor where they are asked for", whole)


async def _write(runner: Runner, tensors: Sequence[tuple[str, str, tuple[int, ...], Any]]) -> None:
    await runner.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in tensors])
    for number, (_, dtype, _, buffer) in enumerate(tensors):
        data = memoryview(buffer).cast("B")
        step = _PIECE * itemsize_of(dtype)
        for offset in range(0, len(data), step):
            await runner.write_tensor(number, offset, data[offset : offset + step])
    await runner.end_tensors()


async def _rejected(update: Coroutine[Any, Any, Any]) -> None:
    try:
        answer = await update
    except WeightsRejected as error:
        check(error.problem, "weights that do not fit are refused with a problem in words", error)
        return
    raise AssertionError(f"weights that do not fit were taken: it returned {answer!r}")


@contextmanager
def _folders() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(prefix="fdasync-weights-") as base:
        folders = [Path(base, name) for name in ("zero", "one", "broken")]
        for folder in folders:
            folder.mkdir()
        yield folders
