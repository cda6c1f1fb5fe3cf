"""Options of the command line as its parser gives them."""

from __future__ import annotations

from typing import Any


def options(**values: Any) -> dict[str, Any]:
    return {"tp" if name == "tensor_parallel" else name: value for name, value in values.items()}
