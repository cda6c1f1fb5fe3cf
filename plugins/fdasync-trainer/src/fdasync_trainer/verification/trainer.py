"""The trainer's side of a comparison: the library's model over whole sequences in padded batches, as a trainer runs it.

Knows no engine. Its arithmetic is the library's own, or under fixed numerics that of `fixed_numerics`, which trainers
use. Called by `fdasync verify-trainer`.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.named import NamedTensor, named_tensors, weights_fingerprint

from fdasync.errors import ConfigError
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.numerics.trainer import fixed_numerics
from fdasync_trainer.verification.logprob_table import LogprobTable, ScoredSequence, WeightsName
from fdasync_trainer.verification.modules import ModuleTrace, row_digests, traced
from fdasync_trainer.verification.reference import library_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from fdasync.request import WeightsFingerprint

# of a tensor's mean size: larger than a rounding to bfloat16, smaller than what a model forgets its text for
_STEP = 0.02


class TrainerSide:
    """A model to train, on the CPU until `place`.

    Args:
        folder: of the checkpoint.
        dtype: "auto" (the checkpoint's own) or its name.
        numerics: "default" or "fixed".
        sum_slices: of the rollout's fixed numerics.

    Attributes:
        model: the library's.
        dtype: its name.

    Raises CheckpointError, UnsupportedModel, ConfigError.
    """

    def __init__(
        self, folder: str | os.PathLike[str], dtype: str = "auto", numerics: str = "default", sum_slices: int = 1
    ) -> None:
        chosen = loading.choose_dtype(loading.read_checkpoint(str(folder)), dtype)
        self.dtype = str(chosen).removeprefix("torch.")
        self.model: Any = library_model(folder, chosen, alone=True)
        self._numerics = numerics
        self._context = _numerics_of(self.model, numerics, sum_slices)

    def step(self, seed: int) -> None:
        """Change all weights a little, as a step of an optimiser does; equal for equal seeds."""
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                if tensor.is_floating_point() and tensor.numel():
                    master = tensor.float()
                    drawn = torch.randn(tensor.shape, generator=noise)
                    tensor.copy_(master + drawn * (_STEP * master.abs().mean()))

    def fingerprint(self) -> WeightsFingerprint:
        return weights_fingerprint(self.model, dtype=self.dtype)

    def tensors(self) -> list[NamedTensor]:
        """Tensors for `engine.update_weights`; views of the model's memory while it is on the CPU."""
        return named_tensors(self.model)

    def place(self, device: str | None) -> None:
        """Move the model; None: to a GPU if there is one, as a runner would."""
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @torch.no_grad()
    def score(
        self,
        table: LogprobTable,
        *,
        batch: int = 4,
        seed: int = 0,
        with_digests: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> LogprobTable:
        """The table with this model's log-probs of all tokens that have one there, and this model's weights.

        Batches of so many sequences are drawn at random and padded on the right.

        Args:
            with_digests: of the decoder layers' outputs, too.
            progress: called with (sequences done, in all).
        """
        self._open()
        label = WeightsName("trainer", self.fingerprint().weights_id)
        order = list(range(len(table.sequences)))
        random.Random(seed).shuffle(order)
        made: dict[int, ScoredSequence] = {}
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            scored = self._batch([table.sequences[number] for number in chosen], with_digests)
            made.update(zip(chosen, scored, strict=True))
            if progress is not None:
                progress(len(made), len(order))
        return LogprobTable(tuple(made[number] for number in range(len(order))), (label,))

    @torch.no_grad()
    def trace(self, tokens: NDArray[np.int32]) -> ModuleTrace:
        """What each module gives for one sequence."""
        self._open()
        with traced(self.model) as trace:
            self._forward([tokens])
        return trace

    def _open(self) -> None:
        """Open the numerics before hooks watch: the first opening runs a token of its own."""
        with self._context:
            pass

    def _batch(self, sequences: Sequence[ScoredSequence], with_digests: bool) -> list[ScoredSequence]:
        layers: list[torch.Tensor] = []
        hooks = []
        if with_digests:
            hooks = [
                layer.register_forward_hook(lambda _m, _a, output: layers.append(_first(output)))
                for layer in decoder_layers(self.model)
            ]
        try:
            logits = self._forward([one.token_ids for one in sequences])
        finally:
            for hook in hooks:
                hook.remove()
        made = []
        for row, one in enumerate(sequences):
            count = len(one.token_ids)
            told = np.flatnonzero(one.told)
            values = np.full(count, np.nan, np.float32)
            if told.size:
                places = torch.from_numpy(told - 1).to(logits.device)
                targets = torch.from_numpy(one.token_ids[told].astype(np.int64)).to(logits.device)
                found = _logprobs(logits[row, places], targets, one.temperature, self._numerics)
                values[told] = found.float().cpu().numpy()
            digests = None
            if with_digests:
                columns = [row_digests(layer[row, :count], count) for layer in layers]
                digests = np.stack([column for column in columns if column is not None], axis=1)
            weights = np.where(np.isnan(values), -1, 0).astype(np.int32)
            made.append(msgspec.structs.replace(one, logprobs=values, weights=weights, digests=digests))
        return made

    def _forward(self, sequences: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        """Logits [sequences, longest, V]."""
        width = max(len(one) for one in sequences)
        ids = np.zeros((len(sequences), width), np.int64)
        mask = np.zeros((len(sequences), width), np.int64)
        for row, one in enumerate(sequences):
            ids[row, : len(one)], mask[row, : len(one)] = one, 1
        device = self.model.device
        with self._context:
            output = self.model(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits
        return logits


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The model's decoder layers, in order."""
    lists = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "layers"]
    return list(lists[0].children()) if lists else []


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


# -- what differs between the library's numerics and fixed ones ---------------------------------------


def _numerics_of(model: Any, numerics: str, sum_slices: int) -> AbstractContextManager[Any]:
    """A context for passes of the model, which may be entered again."""
    if numerics not in ("default", "fixed"):
        raise ConfigError("numerics", f"{numerics!r} is not known", limit=("default", "fixed"))
    return nullcontext() if numerics == "default" else fixed_numerics(model, sum_slices=sum_slices)


def _logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float, numerics: str) -> torch.Tensor:
    """Log-probs [n] of targets [n] under logits [n, V] over the temperature."""
    if numerics == "default":
        scaled = logits.float() / temperature
        found: torch.Tensor = scaled.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
        return found
    return logprobs_of_logits(logits, targets, temperature=temperature)
