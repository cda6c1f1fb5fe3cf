"""Products of Triton's interpreter that walk the inner dimension in order, as a GPU's do.

The interpreter leaves products to NumPy, whose libraries choose the order of sums by the shape of both sides: a row's
last bits depend on the tile that it is in, and roundings to bfloat16 show it now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

# a GPU takes as many at a time
_DEPTH = 16


def walk_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test, interpreted products of float32 add 16 exact products at a time, and round then."""
    from triton.runtime import interpreter

    honest = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, left: Any, right: Any, sums: Any, *how: Any) -> Any:
        if not left.data.dtype == right.data.dtype == sums.data.dtype == np.float32:
            return honest(self, left, right, sums, *how)
        found = sums.data
        wide, other = left.data.astype(np.float64), right.data.astype(np.float64)
        for start in range(0, wide.shape[-1], _DEPTH):
            part = slice(start, start + _DEPTH)
            found = (found + np.matmul(wide[..., part], other[..., part, :])).astype(np.float32)
        return interpreter.TensorHandle(found, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
