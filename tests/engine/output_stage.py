"""One request in the engine's output, and tokenizers that are easy to check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.aux_arena import AuxArena
from fdasync.engine.output import OutputProcessor
from fdasync.engine.request_state import RequestState
from fdasync.events.actions import EmitTokens, FinishRequest
from fdasync.events.bus import EventBus
from fdasync.request import SamplingParams
from fdasync.runner.base import StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

from tests.support.helpers import SPECS, make_capacity


class ByteTokenizer:
    """One token per UTF-8 byte, and token 256, a special one without text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class WordTokenizer:
    """Tokens that stand for given pieces of bytes, so that a piece may hold half a character or half a stop."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


class OutputStage:
    """One request in an `OutputProcessor`, and the bus that it answers on."""

    def __init__(self, tokenizer=None, rows=False, streams=True, n=1, prompt=(1, 2, 3), start=0, **params):
        self.params = SamplingParams(n=n, **{"max_tokens": 64, **params})
        self.arena = AuxArena.create(8, 4, SPECS) if rows else None
        self.bus = EventBus(lambda: 5.0)
        self.ended = []
        self.processor = OutputProcessor(self.bus, lambda: 5.0, self.arena, self.ended.append)
        self.request = RequestState("r", self.params, start=start, now=1.0)
        self.request.prompt = prompt
        self.request.specs = SPECS if rows else ()
        self.processor.add(self.request, list(range(n)), tokenizer)
        self.step = 0

    def emit(self, *tokens, keys=None, **logprobs):
        keys = range(len(tokens)) if keys is None else keys
        rows = tuple(range(len(tokens)))
        self.step += 1
        self.processor.emit(EmitTokens(self.step, tuple(keys), tokens, rows), StepOutput(self.step, tokens, **logprobs))

    def emit_all(self, tokens):
        for token in tokens:
            self.emit(token)

    def finish(self, tokens, reason="length", key=0, num_rows=0, cached=0, spans=((0, "3", "a" * 32),)):
        self.processor.finish(FinishRequest(key, reason, tuple(tokens), num_rows, (cached, 0, 0), spans))

    def deltas(self):
        found = []
        for sample in self.request.samples:
            while (delta := sample.delta()) is not None:
                found.append(delta)
        return found

    def answers(self):
        return self.bus.drain()

    @property
    def sample(self):
        return self.request.result(make_capacity()).samples[0]


def letters(text):
    return list(text.encode())
