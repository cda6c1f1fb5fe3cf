"""Where a library's dense products have the bits of ours: found by trying, shape by shape, and used there alone.

A library picks a kernel by the number of rows, the shape, the dtype and the alignment of its tensors, never by their
values; some of its kernels split the inner dimension. So each number of rows is tried by itself, on random tensors that
give another order of sums away, and a product is the library's only at a number of rows that was tried and on tensors
aligned as those were. What holds is true of one device and of torch's settings as they were (TF32, reduced precision of
reductions, the chosen library of products); these must not change afterwards, nor may several streams multiply at once.

Knows no models and no kernels: both ways to a product are handed in. Made by a runner when it starts; waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

# y = x W^T + b of x [T, K], W [N, K] and b [N] or None
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# the coarsest that a library asks for; torch's allocator gives at least as much
_ALIGNMENT = 256
# powers of 2 that the sizes of factors spread over: products stay within float16, and most are cut off by a sum
_SPREAD = 10.0


class Shape(NamedTuple):
    """What a library picks its kernels by, beside the number of rows."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    biased: bool


class Agreements:
    """What was found so far; keep one for a device.

    Args:
        library, ours: both ways to a product; neither writes to its arguments.
        device: where both run.
        rounds: of draws for each number of rows.
        seed: of the draws.
    """

    def __init__(
        self, library: Product, ours: Product, device: torch.device, *, rounds: int = 2, seed: int = 0
    ) -> None:
        self._library = library
        self._ours = ours
        self._device = device
        self._rounds = rounds
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._tried: dict[Shape, dict[int, bool]] = {}

    def counts(self, shape: Shape, counts: Iterable[int]) -> frozenset[int]:
        """Of numbers of rows, from 1, those at which the library has our bits in every draw.

        A count that was tried before is not tried again. Waits for the device; needs memory for a weight of the shape
        and for the rows of the largest count, a few times over in float32.
        """
        tried = self._tried.setdefault(shape, {})
        asked = sorted(set(counts))
        left = [count for count in asked if count not in tried]
        if left:
            tried.update(dict.fromkeys(left, True))
            for number in range(2 * self._rounds):
                x, weight, bias = draw(shape, left[-1], self._generator, cancelling=number % 2 == 1)
                for count in left:
                    tried[count] = tried[count] and self._same(x[:count], weight, bias)
        return frozenset(count for count in asked if tried[count])

    def _same(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        theirs, ours = self._library(x, weight, bias), self._ours(x, weight, bias)
        # bits, so that signs of zeros count; and an overflow would hide what it was before
        return bool(torch.equal(_bits(theirs), _bits(ours)) and ours.isfinite().all())


class FixedLinear:
    """y = x W^T + b with our bits at every number of rows, by the library where it was found to have them.

    Args:
        counts: numbers of rows at which it has them, for the shape of the weights that will be handed in.
        library, ours: both ways to a product.
    """

    def __init__(self, counts: frozenset[int], library: Product, ours: Product) -> None:
        self.counts = counts
        self._library = library
        self._ours = ours

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]. Raises what the two ways raise."""
        rows = x.numel() // weight.shape[1]
        if rows in self.counts and all(_aligned(each) for each in (x, weight, bias)):
            # a library may take another way for leading dimensions
            found = self._library(x.view(rows, -1), weight, bias)
            return found.view(*x.shape[:-1], len(weight))
        return self._ours(x, weight, bias)


def _aligned(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def draw(
    shape: Shape, rows: int, generator: torch.Generator, *, cancelling: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows, a weight and a bias whose sums tell their order.

    Sizes spread over many powers of 2, so that what a sum cuts off depends on what it held. `cancelling`: the exact
    products cancel, each with one at a random place of the inner dimension, so a result is nothing but what was cut
    off; else a narrow result would hide it, all but one in thousands.
    """
    x = _spread(rows, shape.inputs, generator)
    weight = _spread(shape.outputs, shape.inputs, generator)
    bias = _spread(1, shape.outputs, generator)[0].to(shape.dtype) if shape.biased else None
    x, weight = x.to(shape.dtype), weight.to(shape.dtype)
    if cancelling:
        half = shape.inputs // 2
        order = torch.randperm(shape.inputs, generator=generator, device=generator.device)
        first, second = order[:half], order[half : 2 * half]
        x[:, second] = x[:, first]
        weight[:, second] = -weight[:, first]
        weight[:, order[2 * half :]] = 0.0
        if bias is not None:
            # as small as what was cut off
            bias *= torch.finfo(torch.float32).eps
    return x, weight, bias


def _spread(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    size = (rows, columns)
    powers = torch.rand(size, generator=generator, device=generator.device) * -_SPREAD
    return torch.randn(size, generator=generator, device=generator.device) * powers.exp2_()
