"""A drafter whose acceptance is imposed: it knows the answers of a recorded run, and tells each token right or wrong.

Drafts are verified as any others are. A run whose tokens leave the recorded ones (batch numerics) has fewer right
drafts than were imposed; the benchmark reports what was accepted. Called by `speculation.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.drafting import Drafter, DrafterLimits, DrafterStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.drafting.base import Counts, Tokens


class Imposed(Drafter):
    """Proposes nothing until it knows answers. An answer is found by its prompt and followed by position, also behind
    a token that was another."""

    def __init__(self, limits: DrafterLimits) -> None:
        super().__init__(None, limits)
        self._rows: dict[bytes, int] = {}
        self._paths = np.zeros((0, 0), np.int32)
        self._ends = np.zeros(0, np.int64)
        # row and number of known tokens of each live key
        self._live: dict[int, list[int]] = {}

    def know(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], acceptance: float) -> None:
        """From now on each token of these answers is drafted, right with this chance. No sequence is live."""
        assert not self._live
        self._rows = {np.array(prompt, "<i4").tobytes(): number for number, prompt in enumerate(prompts)}
        self._ends = np.array([len(answer) for answer in answers], np.int64)
        self._paths = np.zeros((len(answers), int(self._ends.max(initial=0)) + self.limits.path_tokens), np.int32)
        for row, answer in zip(self._paths, answers, strict=True):
            row[: len(answer)] = answer
        wrong = np.random.default_rng(7).random(self._paths.shape) >= acceptance
        # another token: the one beside it
        self._paths ^= wrong.astype(np.int32)

    def forget(self) -> None:
        """Propose nothing from now on."""
        self.know([], [], 0.0)

    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        del group, salt, now
        self._live[key] = [self._rows.get(prompt, -1), len(answer) // 4]

    def take(self, keys: tuple[int, ...], counts: Counts, tokens: Tokens) -> None:
        del tokens
        for key, count in zip(keys, counts.tolist(), strict=True):
            self._live[key][1] += count

    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        if not self._rows:
            return np.zeros(len(keys), np.int64), np.zeros(0, np.int32)
        rows, known = np.array([self._live[key] for key in keys], np.int64).reshape(-1, 2).T
        left = np.where(rows < 0, 0, self._ends[rows] - known)
        counts = np.clip(left, 0, most)
        number = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return counts, self._paths[rows[number], known[number] + within]

    def end(self, key: int, *, now: float = 0.0) -> None:
        del now, self._live[key]

    def stats(self) -> DrafterStats:
        return DrafterStats(
            sequences=len(self._live), prompts=len(self._rows), nbytes=self._paths.nbytes, limit_nbytes=1 << 40
        )
