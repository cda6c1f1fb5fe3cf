"""A parameter whose values stay as they are stored: what its module's code, the kernels and the digest read of it.

The parameter's values and scales are two parameters of the module, so whatever treats parameters (memory, sleep,
devices) needs to know nothing. Behind the parameter's name the module's own code finds a `Kept` (as an attribute of the
module, which goes before parameters): indexed by expert it is the dequantised matrix, so the library's loop over
experts computes with it as with plain weights. Knows modules; knows no names of checkpoints and no files. Made by
`keep.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.experts.stored import StoredWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync_transformers.model.kept.forms import Form


class Kept:
    """Matrices [experts, ...], or one matrix, in bfloat16, as far as shape, dtype and the values of some go.

    Args:
        form: of the values.
        parts: parameters of a module, values and scales among them; read at each use, as modules may get others.
        name: of the values; scales have the form's end behind it.
    """

    dtype = torch.bfloat16

    def __init__(self, form: Form, parts: Mapping[str, Any], name: str) -> None:
        self.form = form
        self._parts = parts
        self._name = name
        self._stored: StoredWeights | None = None

    @classmethod
    def empty(cls, form: Form, logical: Sequence[int], device: torch.device | str) -> Kept:
        """Matrices with memory of their own, of no module."""
        values, scales = form.empty(logical, device)
        return cls(form, {"": values, form.scales_end: scales}, "")

    @classmethod
    def made_of(cls, plain: torch.Tensor, form: Form) -> Kept:
        """Made of plain matrices by the form's recipe, on their device. Raises BadInput for weights it cannot have."""
        if plain.dim() == 2:
            values, scales = form.quantised(plain)
            return cls(form, {"": values, form.scales_end: scales}, "")
        made = cls.empty(form, plain.shape, plain.device)
        for expert in range(len(plain)):
            made.values[expert], made.scales[expert] = form.quantised(plain[expert])
        return made

    @property
    def values(self) -> torch.Tensor:
        """As the form has them."""
        found: torch.Tensor = self._parts[self._name]
        return found

    @property
    def scales(self) -> torch.Tensor:
        """As the form has them."""
        found: torch.Tensor = self._parts[self._name + self.form.scales_end]
        return found

    @property
    def stored(self) -> StoredWeights:
        """As the experts' kernels read them. Raises BadInput where they cannot."""
        values, made = self.values, self._stored
        if made is None or made.values.data_ptr() != values.data_ptr():
            made = self._stored = StoredWeights(self.form.kind, values.detach(), self.scales.detach())
        return made

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.form.logical(self.values.shape))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """That they take."""
        return self.values.nbytes + self.scales.nbytes

    def dim(self) -> int:
        return self.values.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def data_ptr(self) -> int:
        """Address of the values."""
        return self.values.data_ptr()

    def detach(self) -> Kept:
        return self

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | torch.Tensor | slice) -> torch.Tensor:
        """The matrix of an expert, or several experts' matrices, new; of one matrix its rows. A number that lies on a
        device is waited for."""
        if self.dim() == 2:
            return self.form.dequantised(self.values.detach(), self.scales.detach())[index]
        if isinstance(index, slice):
            found = [self[number] for number in range(*index.indices(len(self)))]
            return torch.stack(found) if found else torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        number = int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"expert {number} of {len(self)}")
        matrix = self.stored.dequantised(number)
        return matrix if self.form.kind == "fp8" else matrix.T


def kept_of(module: torch.nn.Module) -> dict[str, Kept]:
    """The kept parameters of a module, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Kept)}


def kept_forms(model: torch.nn.Module) -> dict[str, Form]:
    """The forms of a model's kept tensors, by their names in its state dict."""
    return {name: held.form for name, held in logical_state(model).items() if isinstance(held, Kept)}


def logical_state(model: torch.nn.Module) -> dict[str, torch.Tensor | Kept]:
    """A model's state dict as if nothing were kept: names and shapes of plain weights, and no scales."""
    state: dict[str, torch.Tensor | Kept] = dict(model.state_dict())
    for path, module in model.named_modules():
        for name, kept in kept_of(module).items():
            full = f"{path}.{name}" if path else name
            state[full] = kept
            del state[full + kept.form.scales_end]
    return state
