"""Says whether an instance can hold a request, by its context, its KV blocks and its limit of requests.

Instances may differ in how much they hold. `instances.py` leaves out the instances that cannot hold a request; where no
instance can, the error names the largest limit among them. Pure: knows no links and no load.
"""

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
        facts: the instance's limits, from its handshake.
        block_tokens: tokens of one of its blocks.
    """

    facts: Facts
    block_tokens: int

    @property
    def tokens(self) -> int:
        """Most tokens, prompt and output, of a sample that the instance serves whole. The last token needs no KV."""
        return min(self.facts.max_context_tokens, self.facts.num_blocks * self.block_tokens + 1)


class Need(msgspec.Struct, frozen=True):
    """How much a request needs.

    Attributes:
        prompt_tokens: tokens of the prompt; of a text, a lower bound until an instance has tokenised it.
        max_tokens: most tokens of each sample.
        samples: number of samples.
    """

    prompt_tokens: int = 1
    max_tokens: int = 1
    samples: int = 1

    def fits_whole(self, room: Room) -> bool:
        """Whether one instance can serve the whole request; its samples may run in turn."""
        return self.prompt_tokens + self.max_tokens <= room.tokens and self.samples <= room.facts.max_requests

    def fits_prefill(self, room: Room) -> bool:
        """Whether an instance can prefill the request for another: it holds the prompt and a sample's first token."""
        return self.prompt_tokens + 1 <= room.tokens and self.samples <= room.facts.max_requests

    def fits_decode(self, room: Room) -> bool:
        """Whether an instance can take the request over: a group is one lease (docs/design.md, rule 20), which takes
        the prompt's full blocks and an open block for each sample at once."""
        at_once = self.prompt_tokens // room.block_tokens + self.samples
        return self.fits_whole(room) and at_once <= room.facts.num_blocks

    def refusal(self, rooms: Iterable[Room]) -> BadInput:
        """Why none of these (at least one) can serve the request."""
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
    """The need of a request, from the fields of its `Submit`."""
    count = len(tokens) // 4 if text is None else -(-len(text) // _MAX_TOKEN_CHARS)
    return Need(max(count, 1), max_tokens, samples)
