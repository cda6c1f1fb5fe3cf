"""Says whether an instance can serve a request, by its context, its KV blocks, its limit of requests, and its runner.

Instances may differ in how much they hold, and in whether they know grammars. `instances.py` leaves out the instances
that cannot serve a request; where none can, the error names the largest limit among them. Pure: knows
no links and no load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput, TooLong
from fdasync.runner.facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.request import SamplingParams

# no tokenizer has longer tokens (`prepare.py`)
_MAX_TOKEN_CHARS = 256


class Room(msgspec.Struct, frozen=True):
    """How much an instance holds.

    Attributes:
        facts: the instance's limits, from its handshake.
    """

    facts: ModelFacts

    @property
    def tokens(self) -> int:
        """Most tokens, prompt and output, of a sample that the instance serves whole. The last token needs no KV."""
        return min(self.facts.max_context_tokens, self.facts.num_blocks * self.facts.block_tokens + 1)


class Need(msgspec.Struct, frozen=True):
    """What a request needs.

    Attributes:
        prompt_tokens: tokens of the prompt; of a text, a lower bound until an instance has tokenised it.
        max_tokens: most tokens of each sample.
        samples: number of samples.
        grammar: its samples are drawn under a grammar.
        scores: its prompt gets log-probs.
    """

    prompt_tokens: int = 1
    max_tokens: int = 1
    samples: int = 1
    grammar: bool = False
    scores: bool = False

    def _is_known(self, room: Room) -> bool:
        """Whether the instance's runner can do what is asked, however small it is."""
        facts = room.facts
        return (facts.grammars or not self.grammar) and (facts.scores_prompts or not self.scores)

    def fits_whole(self, room: Room) -> bool:
        """Whether one instance can serve the whole request; its samples may run in turn."""
        fits = self.prompt_tokens + self.max_tokens <= room.tokens and self.samples <= room.facts.max_requests
        return fits and self._is_known(room)

    def fits_prefill(self, room: Room) -> bool:
        """Whether an instance can prefill the request for another: it holds the prompt and a sample's first token."""
        fits = self.prompt_tokens + 1 <= room.tokens and self.samples <= room.facts.max_requests
        return fits and self._is_known(room)

    def fits_decode(self, room: Room) -> bool:
        """Whether an instance can take the request over: a group is one lease (docs/design.md, rule 20), which takes
        the prompt's full blocks and an open block for each sample at once."""
        at_once = self.prompt_tokens // room.facts.block_tokens + self.samples
        return self.fits_whole(room) and at_once <= room.facts.num_blocks

    def refusal(self, rooms: Iterable[Room]) -> BadInput:
        """Why none of these (at least one) can serve the request."""
        rooms = list(rooms)
        if self.grammar and not any(room.facts.grammars for room in rooms):
            return BadInput("grammar", "was asked for, but no instance's runner samples under one")
        if self.scores and not any(room.facts.scores_prompts for room in rooms):
            return BadInput("prompt_logprobs_start", "was asked for, but no instance's runner scores prompts")
        if not (able := list(filter(self._is_known, rooms))):
            return BadInput("grammar", "was asked for beside log-probs of the prompt; no instance has both")
        rooms = able
        most = max(room.facts.max_requests for room in rooms)
        if self.samples > most:
            return BadInput("n", f"{self.samples} samples are more than any instance takes", limit=most)
        # only rooms that take as many samples
        room = max([room for room in rooms if self.samples <= room.facts.max_requests], key=lambda room: room.tokens)
        limit, count = room.tokens, self.prompt_tokens
        what = "the context" if limit == room.facts.max_context_tokens else "the KV blocks"
        if count + 1 > limit:
            problem = f"{count} tokens leave no room to answer in {what} of any instance"
            return TooLong("prompt", problem, limit=limit, prompt_tokens=count)
        problem = f"prompt {count} + {self.max_tokens} new tokens are beyond {what} of every instance"
        return TooLong("max_tokens", problem, limit=limit, prompt_tokens=count)


def need_of(text: str | None, tokens: bytes, params: SamplingParams) -> Need:
    """The need of a request, from the fields of its `Submit`."""
    count = len(tokens) // 4 if text is None else -(-len(text) // _MAX_TOKEN_CHARS)
    scores = params.prompt_logprobs_start is not None
    return Need(
        prompt_tokens=max(count, 1),
        max_tokens=params.max_tokens,
        samples=params.n,
        grammar=params.grammar is not None,
        scores=scores,
    )
