"""What the drafter has not been told yet: sequences that began, their tokens, and sequences that ended. Pure.

Where drafts do not pay, an engine asks for paths once in hundreds of steps. In between a token must not cost anything:
it stands in the sequence anyway. So a step tells the planner nothing, and a sequence that begins or ends is noted here.
`tell` brings all of it to the planner at once, before it asks the drafter. Sequences that no path could show any more
are not told at all: a prompt's, once all of them have ended, if the drafter does not keep such text.

Ended sequences are held up to a limit, and told when it is reached. Called by `drafts.py`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from fdasync.drafting import Beginning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.drafting import DraftPlanner
    from fdasync.scheduler.state.sequence import Sequence

# so many sequences that ended, or so many tokens of theirs and of their prompts, wait to be told at most
_MOST_ENDED, _MOST_ENDED_TOKENS = 1024, 1 << 16


class _Prompt:
    """A prompt whose sequences draft, or have drafted: their answers serve each other.

    Attributes:
        tokens, salt: as of `Drafter.begin`.
        live: how many of its sequences have not ended.
        ended: keys of the sequences that have ended, but the drafter has not been told so.
    """

    __slots__ = ("ended", "live", "salt", "tokens")

    def __init__(self, tokens: bytes, salt: str) -> None:
        self.tokens = tokens
        self.salt = salt
        self.live = 0
        self.ended: list[int] = []


class _Live:
    """A live sequence.

    Attributes:
        seq, prompt: it, and its prompt.
        length: how many tokens it had when it began.
        is_told: the planner knows it.
    """

    __slots__ = ("is_told", "length", "prompt", "seq")

    def __init__(self, seq: Sequence, prompt: _Prompt) -> None:
        self.seq = seq
        self.prompt = prompt
        self.length = len(seq.tokens)
        self.is_told = False


class _Ended(NamedTuple):
    """A sequence that ended.

    Attributes:
        key, group, prompt, is_told: of the sequence.
        tokens: what the planner has not been told.
        at: when it ended.
    """

    key: int
    group: int
    prompt: _Prompt
    is_told: bool
    tokens: list[int]
    at: float


class HeldText:
    """See the module."""

    def __init__(self, planner: DraftPlanner) -> None:
        self._planner = planner
        self._live: dict[int, _Live] = {}
        self._untold: dict[int, _Live] = {}
        self._ended: dict[int, _Ended] = {}
        self._ended_tokens = 0
        self._prompts: dict[tuple[str, bytes], _Prompt] = {}
        # samples of a request begin one after the other
        self._last: tuple[int, _Prompt] = (-1, _Prompt(b"", ""))
        self._outlasts = planner.outlasts
        # tokens that no decode step gave, by key: the first ones after a preemption
        self._resumed: dict[int, int] = {}
        # steps have passed whose tokens the planner has not been told
        self._lags = False
        self._told_at = 0.0

    def begin(self, seq: Sequence) -> None:
        """A sequence has its first tokens. Does nothing for a live sequence."""
        key = seq.key
        if key in self._live:
            return
        if key in self._ended:
            self.tell(self._told_at)
        group, prompt = self._last
        if group != seq.group or not prompt.live:
            prompt = self._prompt_of(seq)
            self._last = (seq.group, prompt)
        prompt.live += 1
        self._live[key] = self._untold[key] = _Live(seq, prompt)

    def step_done(self, samplers: list[Sequence], *, is_told: bool) -> None:
        """A step completed.

        Args:
            samplers: sequences whose last chunk it computed.
            is_told: the planner was told its tokens.
        """
        self._lags |= not is_told
        for seq in samplers:
            if seq.key in (self._untold if is_told else self._live):
                self._resumed[seq.key] = self._resumed.get(seq.key, 0) + 1

    def end(self, seq: Sequence, now: float) -> tuple[int, int, int]:
        """A sequence ended; returns `DraftPlanner.tally` of it. Does nothing for a sequence that is not live."""
        key = seq.key
        one = self._live.pop(key, None)
        if one is None:
            return (0, 0, 0)
        prompt = one.prompt
        prompt.live -= 1
        if one.is_told:
            # a run that was cut has tokens there that are not the sequence's own
            held = seq.tokens[self._planner.length(key) :] if self._lags else []
            steps = len(held) - self._resumed.pop(key, 0)
            tally = self._planner.tally(key)
        else:
            del self._untold[key]
            held = seq.tokens[seq.prompt_len :]
            steps = len(seq.tokens) - one.length - self._resumed.pop(key, 0)
            tally = (0, 0, 0)
        if one.is_told and (not held or self._is_over(prompt)):
            self._planner.end(key, now=now)
            self._told_at = now
        elif not self._is_over(prompt):
            self._ended[key] = _Ended(key, seq.group, prompt, one.is_told, held, now)
            self._ended_tokens += len(held)
            prompt.ended.append(key)
        if not prompt.live:
            self._close(prompt, now)
        if self._ended_tokens > _MOST_ENDED_TOKENS or len(self._ended) > _MOST_ENDED:
            self.tell(now)
        return tally[0] + steps, tally[1], tally[2]

    def tell(self, now: float) -> None:
        """Tell the planner everything."""
        ended = list(self._ended.values())
        if self._lags:
            self._tell_tokens(ended)
        fresh = [
            Beginning(one.key, one.group, one.prompt.tokens, array("i", one.tokens).tobytes(), salt=one.prompt.salt)
            for one in ended
            if not one.is_told
        ]
        for key, live in self._untold.items():
            seq, live.is_told = live.seq, True
            steps = len(seq.tokens) - live.length - self._resumed.pop(key, 0)
            answer = array("i", seq.tokens[seq.prompt_len :]).tobytes()
            prompt = live.prompt
            fresh.append(Beginning(key, seq.group, prompt.tokens, answer, seq.max_len, prompt.salt, steps))
        self._untold.clear()
        # these sequences ended before now, and the drafter's clock must not go back
        self._told_at = max(self._told_at, ended[0].at if ended else now)
        if fresh:
            self._planner.begin(fresh, now=self._told_at)
        for one in ended:
            self._told_at = max(self._told_at, one.at)
            self._planner.end(one.key, now=self._told_at)
            one.prompt.ended.clear()
        self._ended.clear()
        self._ended_tokens = 0

    @property
    def keys(self) -> Iterable[int]:
        """Keys of live sequences."""
        return self._live.keys()

    # -- parts ------------------------------------------------------------------------------------

    def _tell_tokens(self, ended: list[_Ended]) -> None:
        """Tell what live sequences got in past steps, and which sequences have ended since."""
        self._lags = False
        known = [live for live in self._live.values() if live.is_told]
        keys: list[int] = []
        steps: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        for live, length in zip(known, self._planner.lengths(tuple([one.seq.key for one in known])), strict=True):
            more = live.seq.tokens[length:]
            if more:
                keys.append(live.seq.key)
                counts.append(len(more))
                steps.append(len(more) - self._resumed.pop(live.seq.key, 0))
                tokens += more
        for one in ended:
            if one.is_told:
                keys.append(one.key)
                counts.append(len(one.tokens))
                # its steps were told when it ended
                steps.append(0)
                tokens += one.tokens
        if keys:
            self._planner.take(tuple(keys), steps, counts, tokens)

    def _prompt_of(self, seq: Sequence) -> _Prompt:
        tokens = array("i", seq.tokens[: seq.prompt_len]).tobytes()
        prompt = self._prompts.get((seq.salt, tokens))
        if prompt is None:
            prompt = self._prompts[seq.salt, tokens] = _Prompt(tokens, seq.salt)
        return prompt

    def _is_over(self, prompt: _Prompt) -> bool:
        """Whether no path can show anything of a prompt any more."""
        return not prompt.live and not self._outlasts

    def _close(self, prompt: _Prompt, now: float) -> None:
        """The last live sequence of a prompt ended."""
        del self._prompts[prompt.salt, prompt.tokens]
        if self._outlasts:
            # it is held only for sequences that have ended
            self._ended_tokens += len(prompt.tokens) // 4 if prompt.ended else 0
            return
        for key in prompt.ended:
            one = self._ended.pop(key)
            self._ended_tokens -= len(one.tokens)
            if one.is_told:
                self._planner.end(key, now=now)
                self._told_at = now
        prompt.ended.clear()
