"""The logits processor `no_repeat_ngram`: no run of `size` tokens comes twice, prompt included.

As transformers' `no_repeat_ngram_size`. Knows no steps. Found by its entry point (`processors.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import BadInput
from fdasync_transformers.sampling.processors import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.sampling.processors import ProcessedRows

_MOST = 64


class NoRepeatNgram(LogitsProcessor):
    """See the module. Its one setting is `size`."""

    def read(self, settings: Mapping[str, Any]) -> int:
        size = settings.get("size")
        if set(settings) != {"size"} or not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST:
            raise BadInput(
                "size", f"the settings {dict(settings)!r:.100} are not one whole number", limit=f"1 to {_MOST}"
            )
        return size

    def process(self, rows: ProcessedRows) -> None:
        tokens, known = rows.known()
        lengths = rows.lengths[:, None]
        sizes = rows.column(rows.settings)
        # a run that ends at each place, against the last tokens with room for one more
        repeats = known.clone()
        for back in range(1, max(rows.settings)):
            last = tokens.gather(1, (lengths - back).clamp(min=0))
            same = torch.zeros_like(known)
            same[:, back:] = tokens[:, :-back] == last
            repeats &= (back >= sizes) | (same & (lengths >= back))
        banned = torch.zeros(len(tokens), rows.logits.shape[1] + 1, dtype=torch.bool, device=tokens.device)
        # one column more takes what is none
        banned.scatter_(1, tokens.where(repeats, rows.logits.shape[1]), True)
        rows.logits.masked_fill_(banned[:, :-1], float("-inf"))
