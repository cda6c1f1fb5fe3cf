"""Answers of engines held against the library's own eager forward pass on the same device.

Judging is `verify`'s: rows and tokens are exact, tied or wrong. Added here: equal answers of several engines are judged
once; an answer whose weights were changed in its middle is judged in two pieces, the second on the keys and values that
the first weights left. Knows results of engines, and no engine. Used by `exact.py`.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_trainer import Served, forced_routing, verify
from fdasync_transformers.weights.quiet import no_progress_bars
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fdasync.result import Result, Sample

# all of them: of tied ones the distance is looked at
_MAX_DIFFERENCES = 100_000


@dataclass(frozen=True)
class Answer:
    """One sample of a result.

    Attributes:
        spans: (output tokens [start, stop), weight version), as the result told them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    greedy: bool
    routing: Any
    spans: tuple[tuple[int, int, int], ...]
    finish_reason: str

    @classmethod
    def of(cls, result: Result, sample: Sample, *, greedy: bool) -> Answer:
        spans = tuple((span.start, span.stop, int(span.version)) for span in sample.weight_version)
        prompt = tuple(result.prompt_token_ids)
        return cls(prompt, sample.token_ids, greedy, sample.routing, spans, sample.finish_reason)


@dataclass
class Findings:
    """What was found in some answers.

    Attributes:
        counts: exact, tied and wrong rows and tokens, missing rows; and `answers`.
        tied_distances: of tied rows, over the largest score.
        worst: of what is wrong, in words; the first few.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tied_distances: list[float] = field(default_factory=list)
    worst: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.counts.update(other.counts)
        self.tied_distances += other.tied_distances
        self.worst = (self.worst + other.worst)[:10]

    @property
    def wrong(self) -> int:
        return self.counts["wrong_rows"] + self.counts["wrong_tokens"] + self.counts["missing_rows"]


class Judge:
    """Reference models of one family, and what they said already.

    Args:
        folders: checkpoint of each name of weights.
        weights: name of the weights of each version.
        dtype: of the reference; `verify` wants float32.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        weights: dict[int, str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._folders = folders
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._models: dict[str, Any] = {}
        self._said: dict[bytes, Findings] = {}

    def model(self, weights: str) -> Any:
        """The library's model, eager in attention and experts; loaded when first asked for."""
        if weights not in self._models:
            self._models[weights] = self._load(weights)
        return self._models[weights]

    def _load(self, weights: str) -> Any:
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                self._folders[weights], dtype=self._dtype, attn_implementation="eager", local_files_only=True
            )
        model.set_experts_implementation("eager")
        model.requires_grad_(False)
        return model.to(self._device).eval()

    def judge(self, answers: list[Answer]) -> Findings:
        """All of them."""
        found = Findings()
        for answer in answers:
            key = self._key(answer)
            if key not in self._said:
                self._said[key] = self._one(answer)
            found.add(self._said[key])
            found.counts["answers"] += 1
        return found

    def _key(self, answer: Answer) -> bytes:
        """Equal where the verdicts are: order within a row does not count."""
        rows = None if answer.routing is None else np.sort(answer.routing.array, axis=-1)
        weights = [self._weights[version] for _, _, version in answer.spans] or [self._weights[0]]
        start = 0 if answer.routing is None else answer.routing.start
        facts = (start, answer.prompt, answer.tokens, answer.greedy, weights, answer.spans[:-1], answer.finish_reason)
        return hashlib.sha256(repr(facts).encode() + (b"" if rows is None else rows.tobytes())).digest()

    def _one(self, answer: Answer) -> Findings:
        if len(answer.spans) > 1:
            return self._in_two(answer)
        weights = self._weights[answer.spans[0][2] if answer.spans else 0]
        start = 0 if answer.routing is None else answer.routing.start
        served = Served(answer.prompt, answer.tokens, answer.greedy, answer.routing, bool(answer.tokens))
        return self._verify(self.model(weights), served, start)

    def _verify(self, model: Any, served: Served, first: int) -> Findings:
        report = verify(model, [served], max_differences=_MAX_DIFFERENCES)
        found = Findings()
        found.counts.update(
            exact_rows=report.rows_exact,
            tied_rows=report.rows_tied,
            wrong_rows=report.rows_wrong,
            missing_rows=report.rows_missing,
            exact_tokens=report.tokens_equal,
            tied_tokens=report.tokens_tied,
            wrong_tokens=report.tokens_wrong,
        )
        rows = [one for one in report.differences if one.layer is not None]
        found.tied_distances = [one.distance for one in rows if one.verdict == "tied"]
        found.worst = [f"{one} (rows from {first})" for one in report.differences if one.verdict == "wrong"][:3]
        return found

    def _in_two(self, answer: Answer) -> Findings:
        """New weights came in the middle, and the sequence kept its keys and values."""
        if len(answer.spans) > 2 or answer.routing is None or answer.routing.start:
            raise ValueError(f"cannot judge weights {answer.spans} of rows from {answer.routing}")
        (_, stop, version), (_, _, later) = answer.spans
        tokens = answer.prompt + answer.tokens
        # output i was sampled where position len(prompt) - 1 + i was forwarded
        turn = len(answer.prompt) - 1 + stop
        before = self.model(self._weights[version])
        found = self._verify(
            before, Served(answer.prompt, answer.tokens[:stop], answer.greedy, _part(answer.routing, 0, turn), True), 0
        )
        rows = answer.routing.array[:turn].astype(np.int64)
        forced = {layer: rows[:, index] for index, layer in enumerate(answer.routing.layer_ids)}
        ids = torch.tensor([tokens[:turn]], device=self._device)
        with torch.no_grad(), forced_routing(before, forced):
            past = before(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        rest = Served(
            tokens[turn : turn + 1], tokens[turn + 1 :], answer.greedy, _part(answer.routing, turn, None), True
        )
        with _after(self.model(self._weights[later]), past) as after:
            found.add(self._verify(after, rest, turn))
        return found


def _part(routing: Any, first: int, stop: int | None) -> Any:
    """Rows of some positions, as if the sequence began with them."""
    return SimpleNamespace(
        array=routing.array[first:stop], start=0, layer_ids=routing.layer_ids, num_experts=routing.num_experts
    )


@contextmanager
def _after(model: Any, past: Any) -> Iterator[Any]:
    """Within the context, every forward pass of the model goes on from these keys and values."""
    honest = model.forward

    def forward(**values: Any) -> Any:
        # a pass adds its own to them
        return honest(**{**values, "use_cache": True, "past_key_values": copy.deepcopy(past)})

    model.forward = forward
    try:
        yield model
    finally:
        del model.forward
