"""The conformance suite for drafters: what `fdasync/drafting/base.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyDrafter(DrafterTests):
        def make(self, limits):
            return MyDrafter(MyConfig(...), limits)

Calls are drawn from fixed seeds. No test starts an engine.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from fdasync.drafting import DrafterLimits

if TYPE_CHECKING:
    from fdasync.drafting import Drafter

__all__ = ["DrafterTests"]

_LIMITS = DrafterLimits(path_tokens=7, max_running=16)
_TOP = 2**31 - 1


class DrafterTests:
    """Subclass it, name the subclass Test..., define `make`."""

    def make(self, limits: DrafterLimits) -> Drafter:
        """A new drafter, with equal settings at every call."""
        raise NotImplementedError

    def test_paths_keep_to_their_form(self) -> None:
        """Columns fit, no path is longer than asked for, and tokens are ids."""
        for seed in range(3):
            assert _play(self.make(_LIMITS), seed) is not None

    def test_equal_calls_give_equal_paths(self) -> None:
        first = _play(self.make(_LIMITS), 1)
        assert first == _play(self.make(_LIMITS), 1), "paths depend on more than the calls"

    def test_the_clock_alone_changes_nothing_within_a_life(self) -> None:
        """`now` says when to forget; while sequences live, paths do not depend on it."""
        paths = []
        for now in (0.0, 1e9):
            drafter = self.make(_LIMITS)
            text = [3, 4, 5, 6] * 20
            drafter.begin(1, 1, _packed([1, 2]), _packed(text), now=now)
            paths.append(_ask(drafter, (1,), [7]))
        assert paths[0] == paths[1]

    def test_arguments_are_not_kept(self) -> None:
        """The caller may write to its arrays again after `take`, and to the arrays that `propose` returned."""
        ours, theirs = self.make(_LIMITS), self.make(_LIMITS)
        for drafter in (ours, theirs):
            drafter.begin(1, 1, _packed([1, 2, 3]), b"")
        tokens, counts = np.zeros(4, np.int32), np.zeros(1, np.int64)
        for number in range(60):
            run = np.arange(number * 4, number * 4 + 4, dtype=np.int32) % 12
            tokens[:], counts[:] = run, 4
            ours.take((1,), counts, tokens)
            tokens[:], counts[:] = -5, -5
            theirs.take((1,), np.array([4]), run)
            lengths, path = ours.propose((1,), np.array([7]))
            told = (lengths.tolist(), path.tolist())
            lengths[:], path[:] = -7, -7
            other, text = theirs.propose((1,), np.array([7]))
            assert told == (other.tolist(), text.tolist()), "the drafter and its caller share an array"

    def test_sequences_that_begin_together_begin_as_one_after_the_other(self) -> None:
        """`begin_all` is so many calls of `begin`: of one prompt and of several, with answers of any length."""
        one_by_one, together = self.make(_LIMITS), self.make(_LIMITS)
        random = Random("together")
        keys = tuple(range(12))
        prompts = tuple([_packed([[1, 2, 3], [4]][key % 2]) for key in keys])
        lengths = (0, 1, 40, 300, 3, 700, 12, 40, 1, 0, 90, 260)
        answers = tuple([_packed([random.choice((1, 2, _TOP)) for _ in range(length)]) for length in lengths])
        salts = tuple(["s" if key % 5 == 0 else "" for key in keys])
        for key in keys:
            one_by_one.begin(key, key % 2, prompts[key], answers[key], salt=salts[key], now=3.0)
        together.begin_all(keys, tuple([key % 2 for key in keys]), prompts, answers, salts, now=3.0)
        for _ in range(8):
            most = [random.randrange(8) for _ in keys]
            assert _ask(one_by_one, keys, most) == _ask(together, keys, most)
            tokens = np.array([random.choice((1, 2, _TOP)) for _ in keys], np.int32)
            for drafter in (one_by_one, together):
                drafter.take(keys, np.ones(len(keys), np.int64), tokens)
        assert one_by_one.stats().sequences == together.stats().sequences

    def test_what_does_not_outlast_its_prompt_is_forgotten(self) -> None:
        """`outlasts` is a property. Where it is False, sequences show nothing of sequences that ended before them."""
        drafter, fresh = self.make(_LIMITS), self.make(_LIMITS)
        outlasts: object = drafter.outlasts
        assert isinstance(outlasts, bool), f"outlasts is {outlasts!r}, and not a property that is True or False"
        random = Random("outlasts")
        text = [random.randrange(1 << 20) for _ in range(100)]
        for key in (1, 2):
            drafter.begin(key, 1, _packed([1, 2]), _packed(text))
        for key in (1, 2):
            drafter.end(key)
        for one in (drafter, fresh):
            one.begin(3, 3, _packed([1, 2]), _packed(text[:50]))
        if not outlasts:
            assert _ask(drafter, (3,), [7]) == _ask(fresh, (3,), [7])

    def test_a_salt_keeps_sequences_apart(self) -> None:
        """Nothing of a sequence shows in the paths of a sequence with another salt, or another prompt."""
        random = Random("salt")
        text = [random.randrange(1 << 20) for _ in range(200)]
        alone, beside = self.make(_LIMITS), self.make(_LIMITS)
        beside.begin(8, 8, _packed([1, 2]), _packed(text), salt="theirs")
        beside.begin(9, 9, _packed([2, 1]), _packed(text))
        for drafter in (alone, beside):
            drafter.begin(1, 1, _packed([1, 2]), b"", salt="ours")
        for token in text:
            for drafter in (alone, beside):
                drafter.take((1,), np.array([1]), np.array([token], np.int32))
            assert _ask(alone, (1,), [7]) == _ask(beside, (1,), [7]), "a path shows what another caller generated"

    def test_memory_stays_within_what_it_tells(self) -> None:
        """Many prompts, many sequences, sequences that never end, a sequence that repeats itself for ever."""
        drafter = self.make(_LIMITS)
        drafter.begin(-1, -1, _packed([5]), b"")
        for number in range(1500):
            drafter.begin(number, number, _packed([number, 1, _TOP]), _packed([number] * 5), now=float(number))
            keys = tuple(range(max(0, number - 15), number + 1))
            drafter.take(keys, np.full(len(keys), 2), np.arange(2 * len(keys), dtype=np.int32))
            drafter.take((-1,), np.array([64]), np.full(64, 5, np.int32))
            if number % 3:
                drafter.end(number, now=float(number))
                # the caller names live sequences alone
                drafter.begin(number, number, _packed([7]), b"", now=float(number))
            stats = drafter.stats()
            assert 0 <= stats.nbytes <= stats.limit_nbytes, "it holds more than it tells"
        for number in (*range(1500), -1):
            drafter.end(number, now=1501.0)
        assert drafter.stats().sequences == 0

    def test_empty_columns(self) -> None:
        drafter = self.make(_LIMITS)
        none = np.zeros(0, np.int64)
        drafter.take((), none, np.zeros(0, np.int32))
        assert _ask(drafter, (), []) == ([], [])
        drafter.begin(1, 1, _packed([1]), b"")
        drafter.take((1,), np.array([0]), np.zeros(0, np.int32))
        assert _ask(drafter, (1,), [0]) == ([0], [])
        drafter.end(1)


def _packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _ask(drafter: Drafter, keys: tuple[int, ...], most: list[int]) -> tuple[list[int], list[int]]:
    counts, tokens = drafter.propose(keys, np.array(most, np.int64))
    assert len(counts) == len(keys), "a count for each sequence"
    assert all(0 <= count <= limit for count, limit in zip(counts.tolist(), most, strict=True)), "a path is too long"
    assert int(counts.sum()) == len(tokens), "counts and tokens do not fit"
    assert tokens.dtype == np.int32
    assert all(0 <= token <= _TOP for token in tokens.tolist()), "a token is no id"
    return counts.tolist(), tokens.tolist()


def _play(drafter: Drafter, seed: int) -> list[tuple[list[int], list[int]]]:
    """Sequences begin, repeat themselves and each other, and end; returns all paths."""
    random = Random(seed)
    live: list[int] = []
    paths = []
    for step in range(200):
        now = step * 0.1
        if len(live) < 12 and random.random() < 0.4:
            # keys are used again
            key = random.choice([key for key in range(20) if key not in live])
            prompt = [[1, 2, 3], [4], list(range(300))][random.randrange(3)]
            answer = [random.choice((1, 2, _TOP)) for _ in range(random.choice((0, 1, 40)))]
            drafter.begin(key, key // 4 * 4, _packed(prompt), _packed(answer), salt=random.choice(("", "s")), now=now)
            live.append(key)
        if live and random.random() < 0.15:
            drafter.end(live.pop(random.randrange(len(live))), now=now)
        random.shuffle(live)
        counts = [random.randrange(5) for _ in live]
        tokens = [random.choice((1, 2, _TOP)) for _ in range(sum(counts))]
        drafter.take(tuple(live), np.array(counts, np.int64), np.array(tokens, np.int32))
        some = live[: random.randint(0, len(live))]
        paths.append(_ask(drafter, tuple(some), [random.randrange(8) for _ in some]))
        stats = drafter.stats()
        assert 0 <= stats.sequences <= len(live)
        assert 0 <= stats.nbytes <= stats.limit_nbytes
    return paths
