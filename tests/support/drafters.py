"""Drafters for tests of engines: one that knows the answers and tells them right, wrong or half right; broken ones."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from fdasync.drafting import Drafter, DrafterLimits, DrafterStats
from fdasync.testing import expected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.drafting.base import Counts, Tokens
    from fdasync.request import SamplingParams
    from fdasync.runner.synthetic.oracle import Oracle

Kind = Literal["right", "wrong", "half", "wild"]


def answers_of(
    requests: Sequence[tuple[Sequence[int], SamplingParams]], oracle: Oracle
) -> list[tuple[Sequence[int], tuple[int, ...]]]:
    """Prompt and answer of each sample, if nothing but its length limit ended it and the weights stayed."""
    change = msgspec.structs.replace
    free = [(prompt, change(params, stop=(), stop_token_ids=(), ignore_eos=True)) for prompt, params in requests]
    return [
        (prompt, expected(prompt, params, index, oracle).token_ids)
        for prompt, params in free
        for index in range(params.n)
    ]


class Foretold(Drafter):
    """Knows answers by their prompts. "half": every second draft is right; "wild": paths of any length, in which tokens
    are right, wrong, or no ids at all. Where it knows several answers of a prompt it follows the first one that agrees
    with the tokens so far, else none."""

    def __init__(self, kind: Kind, answers: Sequence[tuple[Sequence[int], Sequence[int]]], limits: DrafterLimits):
        super().__init__(None, limits)
        self.kind = kind
        self._answers: dict[bytes, list[list[int]]] = {}
        self.learn(answers)
        self._live: dict[int, tuple[bytes, list[int]]] = {}

    def learn(self, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """More answers that it is asked for from now on."""
        for prompt, answer in answers:
            self._answers.setdefault(np.array(prompt, "<i4").tobytes(), []).append(list(answer))

    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        assert key not in self._live, "a live key begins again"
        assert prompt
        self._live[key] = (prompt, np.frombuffer(answer, "<i4").tolist())

    def take(self, keys: tuple[int, ...], counts: Counts, tokens: Tokens) -> None:
        assert len(set(keys)) == len(keys)
        at = 0
        for key, count in zip(keys, counts.tolist(), strict=True):
            self._live[key][1].extend(tokens[at : at + count].tolist())
            at += count
        assert at == len(tokens)

    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        paths = [self._path(key, count) for key, count in zip(keys, most.tolist(), strict=True)]
        counts = np.array([len(path) for path in paths], np.int64)
        return counts, np.array([token for path in paths for token in path], np.int32)

    def _path(self, key: int, most: int) -> list[int]:
        prompt, known = self._live[key]
        answer = next((a for a in self._answers.get(prompt, ()) if a[: len(known)] == known), [])
        path = answer[len(known) : len(known) + most]
        first = len(known)
        if self.kind == "wrong":
            return [token + 1 for token in path]
        if self.kind == "half":
            return [token + (first + number) % 2 for number, token in enumerate(path)]
        if self.kind == "wild":
            random = Random(f"{key} {first}")
            path = [*path, *[random.randrange(60) for _ in range(most - len(path))]][: random.randint(0, most)]
            return [random.choice((token, token, token, 0, -1, 2**31 - 1, -(2**31))) for token in path]
        return path

    def end(self, key: int, *, now: float = 0.0) -> None:
        del self._live[key]

    def stats(self) -> DrafterStats:
        return DrafterStats(sequences=len(self._live), prompts=0, nbytes=0, limit_nbytes=0)


class Broken(Drafter):
    """Raises, or returns nonsense, in one of its calls from the `after`-th call of `propose` on.

    Args:
        fault: a call's name, in which it raises; or what `propose` does to its answer.
    """

    def __init__(self, fault: str, limits: DrafterLimits, after: int = 3):
        super().__init__(None, limits)
        self.fault, self.after = fault, after

    def _may_raise(self, call: str) -> None:
        if self.fault == call and self.after <= 0:
            raise KeyError(f"{call} is at a loss")

    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        self._may_raise("begin")

    def take(self, keys: tuple[int, ...], counts: Counts, tokens: Tokens) -> None:
        self._may_raise("take")

    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        self.after -= 1
        counts, tokens = most.copy(), np.zeros(int(most.sum()), np.int32)
        if self.after > 0:
            return counts, tokens
        self._may_raise("propose")
        answers = {
            "none": None,
            "lists": (counts.tolist(), tokens.tolist()),
            "long": (counts + 1, np.zeros(int((counts + 1).sum()), np.int32)),
            "negative": (counts - 100, tokens),
            "few counts": (counts[1:], tokens),
            "few tokens": (counts, tokens[1:]),
            "int64": (counts, tokens.astype(np.int64)),
            "floats": (counts.astype(np.float64), tokens),
        }
        return answers.get(self.fault, (counts, tokens))  # type: ignore[return-value]

    def end(self, key: int, *, now: float = 0.0) -> None:
        self._may_raise("end")

    def stats(self) -> DrafterStats:
        return DrafterStats(sequences=0, prompts=0, nbytes=0, limit_nbytes=0)
