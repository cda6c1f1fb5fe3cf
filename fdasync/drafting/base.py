"""Drafters: guess the tokens that a sequence is going to have. The contract.

A drafter makes paths: guessed tokens of one sequence, side by side, from the end of what is known of it. A runner
forwards some of them behind the last sampled token and keeps each that equals what it samples, so a wrong guess costs
time and never a token. A drafter is pure: it has no weights, no clock, no I/O and draws nothing, so that the replay of
a trace makes the same paths. It lives in the engine's process and is called on its loop: every call is short.

`planning.py` calls drafters; plugins extend `Drafter` under the entry point group `fdasync.drafters`. The module knows
no scheduler and no runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from fdasync.events.actions import path_tokens

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


class DrafterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells the drafters that it makes.

    Attributes:
        path_tokens: the most tokens of one path that are ever asked for.
        max_running: how many sequences run at a time at most. More may be live, as preempted sequences are.
    """

    path_tokens: Annotated[int, msgspec.Meta(ge=1, le=255)]
    max_running: Annotated[int, msgspec.Meta(ge=1)]

    @classmethod
    def of(cls, max_drafts: int, depth: int, max_running: int) -> DrafterLimits:
        """The limits for steps that verify up to `max_drafts` of a sequence, with `depth` steps in flight."""
        return cls(path_tokens=path_tokens(max_drafts, depth), max_running=max_running)


class DrafterStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter holds, now.

    Attributes:
        sequences: sequences between `begin` and `end`.
        prompts: prompts whose tokens are held, also prompts that are kept for a while after their last sequence.
        nbytes: bytes that it holds, all in all.
        limit_nbytes: the most that it will ever hold; what it does to stay below is its own affair.
    """

    sequences: int
    prompts: int
    nbytes: int
    limit_nbytes: int


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a drafter that has none."""


class Drafter(ABC):
    """Makes paths for sequences that decode.

    All calls are synchronous, from one thread, and take columns: entry i of each argument belongs to one sequence.
    A drafter that does not pay is off for many steps: it is told before the next `propose` what sequences got
    meanwhile. So a sequence may begin with a long answer, or end right after it began. Equal calls in equal order give
    equal paths, in any process. A path has tokens between 0 and 2^31 - 1. Memory is bounded by what `stats` tells as
    `limit_nbytes`, whatever comes; a drafter that has no room for more forgets, and proposes less. What a drafter
    learns from a sequence shows in paths of sequences of the same prompt and salt alone. `fdasync.testing.DrafterTests`
    holds a drafter to all of this.

    `config_type` is a frozen msgspec Struct that holds the drafter's settings; one without settings leaves it out.
    `in_use` tells that an engine has this object, and is set by engines.
    """

    config_type: ClassVar[type[msgspec.Struct]] = NoSettings
    in_use = False

    def __init__(self, config: Any, limits: DrafterLimits) -> None:
        self.config = config
        self.limits = limits

    @abstractmethod
    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        """A sequence begins to decode.

        Args:
            key: names it until `end`; the caller may use a key again after that, never a live one.
            group: key of its request's first sample; sequences of a group have the same prompt.
            prompt, answer: its tokens known so far, int32 little-endian; the prompt is not empty.
            salt: sequences of different salts must not learn from each other.
            now: seconds of the caller's clock, which never goes back.
        """

    def begin_all(
        self,
        keys: tuple[int, ...],
        groups: tuple[int, ...],
        prompts: tuple[bytes, ...],
        answers: tuple[bytes, ...],
        salts: tuple[str, ...],
        *,
        now: float = 0.0,
    ) -> None:
        """Sequences begin to decode, in this order: the same as so many calls of `begin`, but that a drafter whose
        memory is full may forget other text. Worth overriding where many cost less together."""
        for key, group, prompt, answer, salt in zip(keys, groups, prompts, answers, salts, strict=True):
            self.begin(key, group, prompt, answer, salt=salt, now=now)

    @property
    def outlasts(self) -> bool:
        """Whether a sequence may show in paths when all sequences of its prompt and salt have ended. Where this is
        False, what was not told of them by then never is."""
        return True

    @abstractmethod
    def take(self, keys: tuple[int, ...], counts: Counts, tokens: Tokens) -> None:
        """Sequences have new tokens. Keeps none of its arguments.

        Args:
            keys: live sequences, each once.
            counts: how many tokens each has, from 0 on.
            tokens: all of them, sequence after sequence.
        """

    @abstractmethod
    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        """Paths from the end of what was taken of each sequence.

        Args:
            keys: live sequences, each once.
            most: the most tokens that each path may have, from 0 to `path_tokens`.

        Returns:
            How many tokens each path has (0: none), and all of them, path after path. The caller owns the arrays.
        """

    @abstractmethod
    def end(self, key: int, *, now: float = 0.0) -> None:
        """A live sequence ended. `now` as in `begin`."""

    @abstractmethod
    def stats(self) -> DrafterStats:
        """What it holds; cheap."""
