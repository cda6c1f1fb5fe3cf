"""Numbers of the command line: a range that "nan" does not slip through.

Knows no command. Called by the commands that have such options, also by plugins' commands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click import Context, Parameter


class NumberRange(click.FloatRange):
    """As its base, which lets "nan" pass since that is neither below nor above anything."""

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        """Raises click's BadParameter if it is no number, or outside of the range."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found
