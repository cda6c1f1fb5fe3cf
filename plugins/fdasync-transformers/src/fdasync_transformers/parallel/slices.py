"""Sums whose bits do not depend on the number of ranks: S slices, whatever the width, joined in one tree.

What S ranks would sum is computed slice by slice by fewer ranks too, and by one process: row-parallel linear layers
over parts of their inputs, experts over parts of their width, as the library's plan for S ranks cuts them. Each slice's
output has the model's dtype, as a rank's own code gives it. Slices are added in float32 as a tree, (0 + 1) + (2 + 3):
the slices of one rank are a subtree. Then the bias is added, and the total is rounded once. On a CPU column-parallel
layers are computed in slices as well, since in bfloat16 bits of a column may depend on the number of columns: every
product has the shape that it has on S ranks. The kernels of GPUs give a column the same bits beside any others; there
the slices of experts, and of linear layers that need no gradient, are computed by one kernel. Gradients are torch's.
Knows modules of the library; knows no checkpoints. Used by `start/open_model.py`, and by trainers
(`fdasync_trainer/numerics/trainer.py`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync_transformers.model.moe_layers import experts_taking
from fdasync_transformers.model.not_copied import NotCopied
from fdasync_transformers.parallel.collectives import joined
from fdasync_transformers.parallel.shard import Sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.parallel.cuts import Cut

#: numbers of slices that there are
COUNTS = (1, 2, 4)


class Slices:
    """How a model's sums are cut.

    Args:
        model: whole, on the meta device; it is used up.
        count: of slices, S: a power of two.
        latent: whether the latents of MLA layers are paged.
    """

    def __init__(self, model: PreTrainedModel, count: int, *, latent: bool) -> None:
        """Raises UnsupportedModel for a family that S ranks could not serve, ConfigError for sizes that S does not
        divide."""
        self._kind = str(model.config.model_type)
        self._count = count
        try:
            self._plan = Sharded(model, 0, count, latent=latent, widths=COUNTS).plan
        except ConfigError as error:
            raise ConfigError("sum_slices", f"cut as for {count} ranks, {error.problem}", hint=error.hint) from error

    def attach(self, model: PreTrainedModel, collectives: Collectives | None, *, kernels: bool = False) -> None:
        """Compute in slices in every forward pass from now on; arguments and errors as of `forwards`."""
        for module, forward in self.forwards(model, collectives, kernels=kernels):
            module.forward = forward

    def forwards(
        self, model: PreTrainedModel, collectives: Collectives | None = None, *, kernels: bool = False
    ) -> Iterator[tuple[Any, Callable[..., torch.Tensor]]]:
        """Modules, and what their `forward` becomes.

        Args:
            model: whole, or one rank's parts of it.
            collectives: of the ranks, whose number divides S; None: one process.
            kernels: whether `fdasync_kernels` computes the products.

        Raises UnsupportedModel for a model whose modules are not the library's own there (adapters).
        """
        plan, ranks = self._plan, 1 if collectives is None else collectives.ranks
        held = self._count // ranks
        for full, cut in plan.cuts.items():
            name, _, last = full.rpartition(".")
            module: Any = model.get_submodule(name)
            if last == "weight" and not cut.dim and isinstance(module, torch.nn.Linear) and cut.count > ranks:
                self._check_linear(name, module)
                if cut.pieces > 1:
                    raise UnsupportedModel(self._kind, f"sum_slices: {name} packs several matrices")
                # fewer KV heads than slices: several ranks compute the same columns
                if not kernels:
                    yield module, _Columns(module, cut.count // ranks)
        for name in plan.rows:
            module = model.get_submodule(name)
            self._check_linear(name, module)
            yield module, _Rows(module, held, _Sum(name, collectives), kernels=kernels)
        for name in plan.summed:
            module = model.get_submodule(name)
            tensors = []
            for full, cut in plan.cuts.items():
                owner, _, last = full.rpartition(".")
                if f"{owner}.".startswith(f"{name}."):
                    holder: Any = model.get_submodule(owner)
                    if last not in holder._parameters:
                        raise UnsupportedModel(self._kind, f"sum_slices: {full} is no parameter of its own")
                    tensors.append((holder, last, cut))
            yield module, _Summed(module, tensors, held, _Sum(name, collectives))
        for name in plan.divided:
            module = model.get_submodule(name)
            yield module, _Divided(module.forward, self._count)

    def _check_linear(self, name: str, module: torch.nn.Module) -> None:
        if type(module).forward is not torch.nn.Linear.forward or "weight" not in module._parameters:
            raise UnsupportedModel(self._kind, f"sum_slices: {name} ({type(module).__name__}) is no plain linear")


class _Sum:
    """Joins this rank's slices, and then all ranks' sums."""

    def __init__(self, label: str, collectives: Collectives | None) -> None:
        self._label = label
        self._collectives = collectives

    def __call__(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum over all ranks of this rank's slices, or of what they were joined to; rounded to `dtype`."""
        total = joined(parts)
        if self._collectives is not None:
            # a slice by itself has that dtype, and its sum without a bias is rounded to it once
            total = self._collectives.all_reduce(total if bias is None else total.float(), self._label)
        return (total if bias is None else total + bias.float()).to(dtype)


class _Columns(NotCopied):
    """The forward of a column-parallel linear layer."""

    def __init__(self, module: torch.nn.Linear, held: int) -> None:
        self._module = module
        self._held = held

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = self._module.bias
        weights = self._module.weight.chunk(self._held)
        biases = [None] * self._held if bias is None else bias.chunk(self._held)
        return torch.cat([linear(hidden, weight, one) for weight, one in zip(weights, biases, strict=True)], -1)


class _Rows(NotCopied):
    """The forward of a row-parallel linear layer."""

    def __init__(self, module: torch.nn.Linear, held: int, total: _Sum, *, kernels: bool) -> None:
        self._module = module
        self._held = held
        self._total = total
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._kernels and self._held > 1 and not torch.is_grad_enabled():
            from fdasync_kernels.linear.slices import linear_slices

            rows = linear_slices(hidden.reshape(-1, hidden.shape[-1]), self._module.weight, self._held)
            part = rows.view(*hidden.shape[:-1], rows.shape[-1])
            return self._total([part], hidden.dtype, self._module.bias)
        # slices of the weight are views: measured with MKL and oneDNN, strides change no bit of a product
        pairs = zip(hidden.chunk(self._held, -1), self._module.weight.chunk(self._held, 1), strict=True)
        return self._total([linear(part, weight) for part, weight in pairs], hidden.dtype, self._module.bias)


class _Summed(NotCopied):
    """The forward of a module whose output is summed, such as experts: its own, once for each slice of its tensors.
    Experts whose implementation takes slices compute them at once."""

    def __init__(
        self,
        module: Any,
        tensors: list[tuple[torch.nn.Module, str, Cut]],
        held: int,
        total: _Sum,
    ) -> None:
        self._module = module
        self._own: Callable[..., torch.Tensor] = module.forward
        self._tensors = tensors
        self._held = held
        self._total = total

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        function = _taking_slices(self._module)
        if function is not None:
            part = function(self._module, *args, **kwargs, slices=self._held)
            return self._total([part], args[0].dtype)
        slices = [
            (module, name, _sliced(getattr(module, name), cut, self._held)) for module, name, cut in self._tensors
        ]
        parts = []
        for number in range(self._held):
            with ExitStack() as stack:
                for module, name, tensors in slices:
                    stack.enter_context(_shadowed(module, name, tensors[number]))
                parts.append(self._own(*args, **kwargs))
        return self._total(parts, parts[0].dtype)


class _Divided(NotCopied):
    """The forward of a module, inside of a summed module, that is whole in every slice."""

    def __init__(self, own: Callable[..., torch.Tensor], count: int) -> None:
        self._own = own
        self._count = count

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._own(hidden / self._count)


def _taking_slices(module: Any) -> Callable[..., torch.Tensor] | None:
    """What computes these experts in slices; None: their implementation does not, or they are no experts."""
    return None if getattr(module, "fd_experts", None) is None else experts_taking(module, "slices")


def _sliced(tensor: torch.Tensor, cut: Cut, held: int) -> Sequence[torch.Tensor]:
    """Slices of a tensor: views of it, or copies if it packs several matrices."""
    if held == 1 or cut.pieces == 1:
        return tensor.chunk(held, cut.dim)
    before, size, behind = tensor.shape[: cut.dim], tensor.shape[cut.dim], tensor.shape[cut.dim + 1 :]
    split = tensor.reshape(*before, cut.pieces, held, size // (cut.pieces * held), *behind)
    return [part.flatten(cut.dim, cut.dim + 1) for part in split.unbind(cut.dim + 1)]


@contextmanager
def _shadowed(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Iterator[None]:
    """Within the context, the module's own code finds this tensor in the place of its parameter."""
    attributes = vars(module)
    attributes[name] = tensor
    try:
        yield
    finally:
        del attributes[name]
