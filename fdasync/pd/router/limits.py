"""What a request needs of an instance, and whether one can hold it: its context, and the KV blocks of its device.

Instances may differ in how much they hold. Who cannot hold a request is left out (`instances.py`); where nobody can,
the error names the largest limit among them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput, TooLong
from fdasync.pd.messages import Facts

if TYPE_CHECKING:
    from collections.abc import Iterable

# no tokenizer has longer tokens (`prepare.py`)
_MAX_TOKEN_CHARS = 256


class Room(msgspec.Struct, frozen=True):
    """How much an instance holds.

    Attributes:
        block_tokens: of one of its blocks.
    """

    facts: Facts
    block_tokens: int

    @property
    def tokens(self) -> int:
        """Of one sample that it serves whole, prompt and output: the last token is never forwarded."""
        return min(self.facts.max_context_tokens, self.facts.num_blocks * self.block_tokens + 1)


class Need(msgspec.Struct, frozen=True):
    """What a request needs.

    Attributes:
        prompt_tokens: of a text, at least so many: more is known when somebody has tokenised it.
    """

    prompt_tokens: int = 1
    max_tokens: int = 1
    samples: int = 1

    def fits_whole(self, room: Room) -> bool:
        """Whether one instance can serve all of it; its samples may run in turn."""
        return self.prompt_tokens + self.max_tokens <= room.tokens and self.samples <= room.facts.max_requests

    def fits_prefill(self, room: Room) -> bool:
        """Whether an instance can prefill it for another: the prompt and the first token of a sample are there."""
        return self.prompt_tokens + 1 <= room.tokens and self.samples <= room.facts.max_requests

    def fits_decode(self, room: Room) -> bool:
        """Whether an instance can take it from another: a group is one lease (DECISIONS 20), which holds its full
        blocks, and an open one for each sample, at once."""
        at_once = self.prompt_tokens // room.block_tokens + self.samples
        return self.fits_whole(room) and at_once <= room.facts.num_blocks

    def refusal(self, rooms: Iterable[Room]) -> BadInput:
        """Why none of these, one at least, can serve it."""
        rooms = list(rooms)
        most = max(room.facts.max_requests for room in rooms)
        if self.samples > most:
            return BadInput("n", f"{self.samples} samples are more than any instance takes", limit=most)
        # only those that take as many samples
        room = max([room for room in rooms if self.samples <= room.facts.max_requests], key=lambda room: room.tokens)
        limit, count = room.tokens, self.prompt_tokens
        what = "the context" if limit == room.facts.max_context_tokens else "the KV blocks"
        if count + 1 > limit:
            problem = f"{count} tokens leave no room to answer in {what} of any instance"
            return TooLong("prompt", problem, limit=limit, prompt_tokens=count)
        problem = f"prompt {count} + max_tokens {self.max_tokens} tokens are beyond {what} of every instance"
        return TooLong("max_tokens", problem, limit=limit, prompt_tokens=count)


def need_of(text: str | None, tokens: bytes, max_tokens: int, samples: int) -> Need:
    """Of a request as it is sent (`messages.Submit`): token ids are int32."""
    count = len(tokens) // 4 if text is None else -(-len(text) // _MAX_TOKEN_CHARS)
    return Need(max(count, 1), max_tokens, samples)
