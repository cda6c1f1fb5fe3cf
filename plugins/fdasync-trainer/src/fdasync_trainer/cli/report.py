"""The figures of `fdasync verify-trainer`, as JSON and as lines. Starts nothing. Called by `run.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync.cli.common.stdout import print_json

if TYPE_CHECKING:
    from rich.console import Console


class Part(NamedTuple):
    """A comparison.

    Attributes:
        name: what was compared.
        compared: a `LogprobComparison`.
    """

    name: str
    compared: Any


@dataclass
class Figures:
    """What was found.

    Attributes:
        model, numerics, dtype: of both sides; "" where two files were compared.
        requests: that were served.
        crossed_tokens: tokens of requests that went on behind an update: their KV is of two sets of weights, and they
            are not compared.
        preemptions, hit_tokens, steps, moved_blocks: what the rollout did meanwhile.
        parts: the comparisons.
        module: the first module that differs, a `ModuleDifference`; None: nothing differs, or no module does.
        note: how the module was looked for.
    """

    model: str = ""
    numerics: str = ""
    dtype: str = ""
    requests: int = 0
    crossed_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    steps: int = 0
    moved_blocks: int = 0
    parts: list[Part] = field(default_factory=list)
    module: Any = None
    note: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.parts) and all(part.compared.ok for part in self.parts)

    @property
    def not_covered(self) -> list[str]:
        """What a rollout can do to bits and this one did not do: too few requests, or an option."""
        if not self.requests:
            return []
        seen = {
            "preemption": self.preemptions,
            "prefix hits": self.hit_tokens,
            "a hand-over": self.moved_blocks,
            "an update": sum("updated" in part.name for part in self.parts),
        }
        return [name for name, count in seen.items() if not count]

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        values = {name: value for name, value in vars(self).items() if name not in ("parts", "module")}
        compared = [{"name": part.name, **part.compared.as_dict()} for part in self.parts]
        return {
            "ok": self.ok,
            **values,
            "not_covered": self.not_covered,
            "tokens": sum(part.compared.tokens for part in self.parts),
            "differing": sum(part.compared.differing for part in self.parts),
            "parts": compared,
            "module": msgspec.to_builtins(self.module),
        }


def show(figures: Figures, as_json: bool, console: Console) -> None:
    """Print the figures: JSON to stdout, or lines."""
    if as_json:
        print_json(figures.as_dict())
        return

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    if figures.requests:
        did = f"{figures.steps} steps, {figures.preemptions} preemptions, {figures.hit_tokens} cached tokens"
        say(f"{figures.requests} requests: {did}, {figures.moved_blocks} blocks handed over")
    if figures.crossed_tokens:
        say(f"{figures.crossed_tokens} tokens behind an update that their request crossed are not compared")
    for part in figures.parts:
        one = part.compared
        line = f"{part.name}: {one.tokens:,} tokens, {one.differing:,} with other bits"
        line += f", {one.missing:,} missing" if one.missing else ""
        line += f", {one.not_numbers:,} that are no numbers in the rollout" if one.not_numbers else ""
        line += f", {one.other_weights:,} by other weights" if one.other_weights else ""
        say(line + (f", at most {one.largest_ulps:,} ulps" if one.differing else ""))
        if one.first is not None:
            say(_first(one.first), "red")
    if figures.module is not None:
        found = figures.module
        where = "behind the layers" if found.layer < 0 else f"layer {found.layer}"
        what = "what it takes differs, and no module gave it" if found.inputs_differ else "what it takes is equal"
        say(f"first module that differs: {found.module} ({where}), position {found.position}: {what}", "red")
    if figures.note:
        say(figures.note)
    if figures.not_covered:
        say(f"not covered: {', '.join(figures.not_covered)} (more tokens, or fewer options)", "yellow")
    say("all log-probs have equal bits" if figures.ok else "the trainer differs", "green" if figures.ok else "red")


def _first(first: Any) -> str:
    values = f"{first.rollout!r} and {'none' if first.trainer is None else repr(first.trainer)}"
    line = f"  first: request {first.request_id} sample {first.sample} position {first.position}: {values}"
    if first.ulps is not None:
        line += f", {first.ulps:,} ulps"
    if first.layer is not None:
        line += "; no layer differs before" if first.layer < 0 else f"; layer {first.layer} from {first.layer_position}"
    return line
