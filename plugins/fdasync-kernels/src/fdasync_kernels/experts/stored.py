"""Experts' weights that stay as they were stored: FP8 with a scale for each block, MXFP4 with exponents of groups.

Kernels read them so, and make of each weight what `dequantised` makes of it, in registers: results have the bits of
plain bfloat16 weights, from half or a quarter of the bytes. Knows no files and no models. Made by plugins; read by
`chain.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from fdasync.errors import BadInput

#: rows and inner places that share a scale of FP8
BLOCK: Final = 128
#: inner places that share an exponent of MXFP4
GROUP: Final = 32
# of an exponent, as it is stored
_BIAS = 127
# inner places; the first half of them are the lower halves of bytes
_PAIR = 2 * GROUP
#: no model's weights have a larger one, and the kernels' powers of two end there
MOST_EXPONENT: Final = 128
# values of four bits, by their number
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def check_exponents(exponents: torch.Tensor) -> None:
    """Raise BadInput if a stored exponent is above the most: it waits for the device."""
    if exponents.numel() and int(exponents.max()) > MOST_EXPONENT:
        raise BadInput("exponents", f"{int(exponents.max())} is too large", limit=MOST_EXPONENT)


@dataclass(frozen=True)
class StoredWeights:
    """Matrices [E, N, K] of all experts of a layer, the inner dimension last.

    Attributes:
        form: "fp8": a value times the scale of its block of 128 x 128, rounded to bfloat16; "mxfp4": a value of four
            bits times two to the exponent of its 32 inner places, which bfloat16 has exactly.
        values: fp8: float8_e4m3fn [E, N, K]. mxfp4: uint8 [E, N, K / 2], as `of_mxfp4` packs them: of 64 inner places
            byte j has place j in its lower half and place 32 + j in its upper half. So a kernel makes two neighbouring
            groups of a load, each in order and with one exponent. Contiguous.
        scales: fp8: float32 [E, N / 128, K / 128], rounded up. mxfp4: uint8 [E, N, K / 32], the exponents plus 127.
            Contiguous.

    Raises BadInput for shapes and dtypes that do not belong together, and for strides.
    """

    form: Literal["fp8", "mxfp4"]
    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        fp8 = self.form == "fp8"
        kinds = (torch.float8_e4m3fn, torch.float32) if fp8 else (torch.uint8, torch.uint8)
        if self.values.dim() != 3 or not self.values.is_contiguous() or not self.scales.is_contiguous():
            raise BadInput("values", f"shape {tuple(self.values.shape)} where contiguous [experts, N, K] was expected")
        if (self.values.dtype, self.scales.dtype) != kinds:
            raise BadInput("values", f"{self.values.dtype} with {self.scales.dtype} where {kinds} were expected")
        experts, rows, inner = self.shape
        if inner % (16 if fp8 else _PAIR):
            raise BadInput("values", f"rows of {inner}", limit=f"multiples of {16 if fp8 else _PAIR}")
        wanted = (experts, -(-rows // BLOCK), -(-inner // BLOCK)) if fp8 else (experts, rows, inner // GROUP)
        if tuple(self.scales.shape) != wanted:
            raise BadInput("scales", f"shape {tuple(self.scales.shape)} where {wanted} was expected")

    @classmethod
    def of_mxfp4(cls, blocks: torch.Tensor, exponents: torch.Tensor) -> StoredWeights:
        """Weights made of values as checkpoints have them: uint8 [E, N, K / 32, 16], the first of two neighbours in the
        lower half of a byte, and exponents [E, N, K / 32]. Raises BadInput, for an exponent above 128 too: it waits for
        the device."""
        if blocks.dim() != 4 or blocks.dtype is not torch.uint8 or blocks.shape[2] % 2 or blocks.shape[3] != GROUP // 2:
            raise BadInput("blocks", f"{blocks.dtype} {tuple(blocks.shape)}", limit="uint8 [E, N, an even number, 16]")
        check_exponents(exponents)
        experts, rows, groups, _ = blocks.shape
        apart = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(experts, rows, groups // 2, 2, GROUP)
        packed = apart[..., 0, :] | (apart[..., 1, :] << 4)
        return cls("mxfp4", packed.view(experts, rows, groups * GROUP // 2).contiguous(), exponents)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, rows, stored = self.values.shape
        return experts, rows, stored if self.form == "fp8" else 2 * stored

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def fits_bulk(self) -> bool:
        """Whether kernels can have the values by the bulk copy engine, where the device has it."""
        return self.form == "fp8" and self.values.data_ptr() % 16 == 0

    def descriptor(self, halves: int, rows: int, depth: int) -> Any:
        """The values for the bulk copy engine, as [E * halves, N / halves, K], in blocks of so many rows of each half
        and inner places."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        experts, height, inner = self.shape
        parts = self.values.view(experts * halves, height // halves, inner)
        return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [halves, rows, depth])

    def dequantised(self, expert: int) -> torch.Tensor:
        """The matrix [N, K] of one expert, bfloat16, new."""
        values, scales = self.values[expert], self.scales[expert]
        _, rows, inner = self.shape
        if self.form == "fp8":
            grid = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :inner]
            return (values.float() * grid).to(torch.bfloat16)
        table = torch.tensor(_E2M1, dtype=torch.float32, device=values.device)
        pairs = values.view(rows, inner // _PAIR, GROUP).long()
        places = torch.stack((table[pairs & 15], table[pairs >> 4]), dim=2)
        grid = torch.exp2(scales.float() - _BIAS).repeat_interleave(GROUP, 1)
        return (places.reshape(rows, inner) * grid).to(torch.bfloat16)
