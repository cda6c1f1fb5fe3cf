"""The workload: groups of samples of one prompt, each of which goes on as a conversation; and the ideal hits.

Prompts of a group begin with the system prompt of one of some tasks. Each turn adds the answer and a result of a tool
to the prompt. All of it is drawn from a seed; what instances answer is part of the next turn's prompt.

`Ideal` is an oracle: it knows at once every block that any instance was ever given to compute, and forgets none. Knows
no router. Used by `scale_world.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.cache.identity import block_keys, root_key

if TYPE_CHECKING:
    from collections.abc import Sequence


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    requests: all requests, about; groups are whole.
    per_s: requests that arrive in a second, about.
    tasks, system_tokens: number of tasks, tokens of each system prompt.
    question_tokens: tokens of a group's question, at least and at most.
    samples: samples of a group, each a request of its own.
    turns: requests of each sample, at least and at most.
    answer_tokens: tokens of an answer, at least and at most.
    tool_tokens, tool_s: tokens of a tool's result, and its time, at least and at most.
    streams: share of groups whose callers read deltas.
    deadline_s: of a request. One that has not ended by then was no good.
    """

    requests: int = 100_000
    per_s: float = 2000.0
    tasks: int = 64
    system_tokens: int = 256
    question_tokens: tuple[int, int] = (256, 768)
    samples: int = 8
    turns: tuple[int, int] = (2, 4)
    answer_tokens: tuple[int, int] = (64, 320)
    tool_tokens: tuple[int, int] = (32, 224)
    tool_s: tuple[float, float] = (0.2, 2.0)
    streams: float = 0.0
    deadline_s: float = 30.0

    @property
    def groups(self) -> int:
        return max(round(self.requests / (self.samples * sum(self.turns) / 2)), 1)


class Source:
    """Draws the workload. Two sources of one seed draw the same, whatever comes between."""

    def __init__(self, work: Work, seed: int, vocab_size: int) -> None:
        self._work = work
        self._seed = seed
        self._vocab_size = vocab_size
        rng = np.random.default_rng((seed, 0))
        self._systems = [self._tokens(rng, work.system_tokens) for _ in range(work.tasks)]

    def _tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, self._vocab_size, count)]

    def rng(self, *names: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *names))

    def prompt(self, group: int) -> list[int]:
        rng = self.rng(1, group)
        system = self._systems[int(rng.integers(len(self._systems)))]
        return system + self._tokens(rng, between(rng, self._work.question_tokens))

    def tool(self, rng: np.random.Generator) -> list[int]:
        return self._tokens(rng, between(rng, self._work.tool_tokens))


def between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


class Ideal:
    """See the module.

    Attributes:
        hit_tokens: tokens of prompts that an ideal fleet would not compute.
    """

    def __init__(self, namespace: bytes, block_tokens: int) -> None:
        self.hit_tokens = 0
        self._root = root_key(namespace, b"")
        self._size = block_tokens
        self._known: set[bytes] = set()

    def ask(self, prompt: Sequence[int]) -> int:
        """A prompt is sent: returns, and counts, the tokens of it that are known; now all of it is."""
        keys = block_keys(self._root, prompt, self._size)
        had, most = 0, (len(prompt) - 1) // self._size
        while had < most and keys[had] in self._known:
            had += 1
        self._known.update(keys[had:])
        self.hit_tokens += had * self._size
        return had * self._size

    def add(self, tokens: Sequence[int]) -> None:
        """An answer is there: its blocks are known, but for that of its last token."""
        self._known.update(block_keys(self._root, tokens[:-1], self._size))
