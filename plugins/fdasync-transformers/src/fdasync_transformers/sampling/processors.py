"""The contract of logits processors: plugins that change the logits of the requests that ask for them, on the device.

A processor is a class under the entry point group `fdasync.processors` (docs/write-a-processor.md). A runner makes one
object of each class that its configuration names. In each step it calls each object once, with the rows of all requests
that ask for it.
Drafts are tokens like others: a row behind a draft has it among its tokens, and counts only if the draft was right.
Knows no steps and no requests. `no_repeat_ngram.py` is one; `execution/parts/processors.py` calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class ProcessedRows:
    """R rows of a step, from each of which a token is sampled. Tensors are on the device, and valid for the call.

    Attributes:
        logits: float32 [R, V], the caller's; change them in place. At least one of each row stays finite, and none
            becomes NaN or +inf.
        tokens: int32 [lanes, most tokens], the known tokens of all sequences, prompt first. Read only; behind a row's
            `lengths` its lane has anything.
        lanes: int64 [R], the lane of each row.
        lengths: int64 [R], how many tokens the row's sequence has before the one that is sampled.
        prompt_lengths: how many of these are its prompt, on the host.
        settings: of each row, as `LogitsProcessor.read` made them.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    lanes: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: Sequence[int]
    settings: Sequence[Any]

    def known(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [R, most tokens], the tokens of each row, and bool of the same shape, which of them are known."""
        tokens = self.tokens.index_select(0, self.lanes).long()
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens, places < self.lengths[:, None]

    def column(self, numbers: Sequence[float]) -> torch.Tensor:
        """[R, 1], one number of the host for each row, on the device; nothing is waited for."""
        made = torch.tensor(numbers)[:, None]
        device = self.logits.device
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made

    def row(self, number: int) -> ProcessedRows:
        """One of the rows alone; its logits are a view."""
        part = slice(number, number + 1)
        return ProcessedRows(
            self.logits[part], self.tokens, self.lanes[part], self.lengths[part], self.prompt_lengths[part],
            self.settings[part],
        )  # fmt: skip


class LogitsProcessor(ABC):
    """Changes logits; made once for each runner, used from its loop. It keeps nothing of a sequence between calls: what
    it needs is in the tokens.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def read(self, settings: Mapping[str, Any]) -> Any:
        """What `process` gets of a request with these settings. Called when its sequence enters the runner.

        Raises BadInput, or anything else, where they make no sense: the request then ends with ProcessorFailed."""

    @abstractmethod
    def process(self, rows: ProcessedRows) -> None:
        """Change the logits; on a GPU queue work on the current stream, and wait for nothing.

        Where it raises, it is called for each row alone, and a request whose row raises again ends with
        ProcessorFailed. So does a request whose row has nothing finite afterwards, or NaN or +inf."""
