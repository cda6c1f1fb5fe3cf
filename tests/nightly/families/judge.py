"""Answers of one family's engines, held against the library's own model: by `verify`, and by its `generate` (of
nemotron_h with the bound of its plain pass: `model/recurrent/time_steps.py` of the plugin).

`verify` finds MoE layers as the runner does, and so would miss a layer that both overlook: layers are also counted
here, by the names of the weights. Knows results of engines, and no engine. Used by `play.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from fdasync_trainer.verification.scores import TOLERANCE, token_distance
from fdasync_transformers.model.recurrent.time_steps import bounded_time_steps

from benchmarks.gpu.judge import Answer, Findings, Judge

if TYPE_CHECKING:
    from collections.abc import Sequence


_EXPERTS_OF_LAYER = re.compile(r"\.(?:layers|blocks)\.(\d+)\..*\bexperts\.")


class FamilyJudge(Judge):
    """Judges as `verify` does, and greedy answers by `generate` too; equal answers once. Rows of layers that were not
    recorded are missing.

    Args:
        reference: the library's float32 model in eval mode.
    """

    def __init__(self, reference: Any) -> None:
        super().__init__({}, {0: ""}, torch.device("cpu"), torch.float32)
        self._reference = reference
        self._generated: dict[tuple[int, ...], list[int]] = {}
        found = [_EXPERTS_OF_LAYER.search(name) for name in reference.state_dict()]
        self._layers = {int(match.group(1)) for match in found if match is not None}

    def _load(self, _weights: str) -> Any:
        return self._reference

    def _one(self, answer: Answer) -> Findings:
        found = super()._one(answer)
        known, start = ((), 0) if answer.routing is None else (answer.routing.layer_ids, answer.routing.start)
        if answer.tokens and (lost := self._layers.difference(known)):
            found.counts["missing_rows"] += len(lost) * (len(answer.prompt) + len(answer.tokens) - 1 - start)
            found.worst.append(f"layers {sorted(lost)} have experts and no rows")
        # what `verify` found wrong, `generate` would find again
        if answer.greedy and answer.tokens and not found.counts["wrong_tokens"]:
            place = first_difference(answer.tokens, self._generate(answer.prompt, len(answer.tokens)))
            if place is not None and not self._tied(answer, place):
                found.counts["wrong_tokens"] += 1
                found.counts["exact_tokens"] -= 1
                found.worst.append(f"token {place} of {answer.prompt} differs from generate")
        return found

    def _generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        if len(self._generated.get(prompt, ())) < count:
            options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            with torch.no_grad(), bounded_time_steps(self._reference):
                tokens = self._reference.generate(torch.tensor([prompt]), max_new_tokens=count, **options)
            self._generated[prompt] = tokens[0, len(prompt) :].tolist()
        return self._generated[prompt]

    def _tied(self, answer: Answer, place: int) -> bool:
        """Whether the token at this place is within rounding of the largest logit of a plain pass."""
        known = torch.tensor([[*answer.prompt, *answer.tokens[:place]]])
        with torch.no_grad():
            logits = self._reference(input_ids=known, use_cache=False).logits[0, -1].double().numpy()
        return token_distance(logits, answer.tokens[place]) <= TOLERANCE and (
            token_distance(logits, self._generated[answer.prompt][place]) <= TOLERANCE
        )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token of `one` that `other`, which is as long or longer, does not have there."""
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
