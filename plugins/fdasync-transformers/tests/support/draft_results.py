"""A drafter that knows answers, and what must be equal with and without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync.drafting import Drafter, DrafterLimits, DrafterStats

if TYPE_CHECKING:
    from fdasync import Result


class Known(Drafter):
    """Knows the answers of prompts, and tells each third token wrong."""

    def __init__(self, answers: dict[bytes, list[tuple[int, ...]]], limits: DrafterLimits) -> None:
        super().__init__(None, limits)
        self._answers = answers
        self._live: dict[int, tuple[bytes, list[int]]] = {}

    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        self._live[key] = (prompt, np.frombuffer(answer, "<i4").tolist())

    def take(self, keys: tuple[int, ...], counts: Any, tokens: Any) -> None:
        for key, part in zip(keys, np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            self._live[key][1].extend(part.tolist())

    def propose(self, keys: tuple[int, ...], most: Any) -> tuple[Any, Any]:
        paths = [self._path(key, limit) for key, limit in zip(keys, most.tolist(), strict=True)]
        counts = np.array([len(path) for path in paths], np.int64)
        return counts, np.array([token for path in paths for token in path], np.int32)

    def _path(self, key: int, most: int) -> list[int]:
        prompt, known = self._live[key]
        for answer in self._answers.get(prompt, []):
            if list(answer[: len(known)]) == known:
                rest = answer[len(known) :][:most]
                return [token if (len(known) + at) % 3 else token ^ 1 for at, token in enumerate(rest)]
        return []

    def end(self, key: int, *, now: float = 0.0) -> None:
        del self._live[key]

    def stats(self) -> DrafterStats:
        return DrafterStats(sequences=len(self._live), prompts=0, nbytes=0, limit_nbytes=1 << 20)


def assert_same(results: list[Result], wanted: list[Result], *, ordered: bool = True) -> None:
    """`ordered`: the experts of a row, too, which kernels may have in another order than the library."""
    for result, want in zip(results, wanted, strict=True):
        for sample, other in zip(result.samples, want.samples, strict=True):
            assert (sample.token_ids, sample.finish_reason) == (other.token_ids, other.finish_reason)
            np.testing.assert_allclose(sample.raw_logprobs, other.raw_logprobs, rtol=0, atol=1e-4)
            assert sample.routing is not None
            assert other.routing is not None
            rows = sample.routing.array, other.routing.array
            assert np.array_equal(*(each if ordered else np.sort(each, -1) for each in rows))
