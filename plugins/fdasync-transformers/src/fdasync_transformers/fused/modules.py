"""What the files of this room share: modules and copies of them, made-up rows, comparisons, the way past modes.

Knows no kernels. Used by all that is fused, and by the trainer's numerics.
"""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fdasync.errors import RunnerError
from fdasync_transformers.fused.replacement import Differs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    RowsLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

NO_GRADIENT = "what is fused has no gradient: train a model of its own, not the one that a runner has opened"

OWN_FORWARD = "it has a forward of its own already"

# halves of multimodal models that no step runs
_NOT_TEXT = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*)(?:\.|$)")
_INTS = {2: torch.int16, 4: torch.int32}


def text_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Names and modules of a model, without modules for images and sounds."""
    return ((name, module) for name, module in model.named_modules() if not _NOT_TEXT.search(name))


def takes_one(module: torch.nn.Module) -> bool:
    """Whether the class's forward takes one argument and no more."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def refuse_gradient(*tensors: torch.Tensor | None) -> None:
    """Raise RunnerError if autograd would follow these tensors: the kernels have no gradient."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RunnerError(NO_GRADIENT)


@contextmanager
def past_modes() -> Iterator[None]:
    """Within the context no mode sees an operation: for code that needs none of what modes do."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def linear_of_mode() -> RowsLinear | None:
    """The product that the dispatch mode of this thread makes of `linear`, to be called past it with rows [R, K], a
    weight [N, K] and a bias: its `linear_past_modes`. None: there is no mode, or it has none. Fixed numerics have."""
    found: RowsLinear | None = getattr(_get_current_dispatch_mode(), "linear_past_modes", None)
    return found


def signature_of(module: torch.nn.Module) -> Hashable:
    """Equal for modules that compute alike but for the values of their parameters: class, plain attributes, shapes and
    dtypes, of submodules too."""
    plain = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and isinstance(value, int | float | str | bool | type(None))
    )
    parameters = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters(recurse=False))
    children = tuple((name, signature_of(child)) for name, child in module.named_children())
    return type(module), plain, parameters, children


def twin_of(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter] | None = None,
    submodules: Mapping[str, torch.nn.Module] | None = None,
) -> torch.nn.Module:
    """A copy of a module that shares all but the parameters and submodules given; the module stays as it is."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {**module._parameters, **(parameters or {})}
    twin.__dict__["_modules"] = {**module._modules, **(submodules or {})}
    return twin


class Noise:
    """Random tensors of a generator of its own, which leaves torch's random state alone; the same in every run."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = device

    def normal(self, *shape: int, dtype: torch.dtype, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Numbers of a normal distribution, times `scale`."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self._device, dtype)


def check_kind(ours: Any, library: Any) -> None:
    """Raise Differs unless the results of two forwards are tensors of one shape and dtype."""
    if not isinstance(library, torch.Tensor):
        raise Differs(f"returns {type(library).__name__}, not a tensor")
    if ours.shape != library.shape or ours.dtype is not library.dtype:
        raise Differs(f"returns {library.dtype} {tuple(library.shape)}, not {ours.dtype} {tuple(ours.shape)}")


def check_size(ours: torch.Tensor, library: torch.Tensor, most: float, where: str = "") -> None:
    """Raise Differs unless the distance of all results is `most` of their size; `where`: the end of the reason."""
    distance = float((ours.float() - library.float()).norm() / library.float().norm())
    if not distance <= most:
        raise Differs(f"gives other results ({distance:.1e} of their size{where})")


def steps_apart(ours: torch.Tensor, library: torch.Tensor) -> torch.Tensor:
    """By how many values of their dtype two tensors differ, element by element: int64. Two NaN are alike."""
    one, other = _ordered(ours), _ordered(library)
    return torch.where(ours.isnan() & library.isnan(), 0, (one - other).abs())


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values; both zeros are 0."""
    bits = values.contiguous().view(_INTS[values.element_size()]).to(torch.int64)
    lowest = -(1 << (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
