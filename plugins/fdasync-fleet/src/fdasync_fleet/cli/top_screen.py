"""The screen of `fdasync top`: a `Summary` in as many lines and columns as the terminal has.

Knows no terminal but its size. Engines with problems are shown first where not all have room. Called by `top.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from fdasync.telemetry.sight.summary import Engine, Latency, Summary

_GOOD, _BAD, _ODD, _DIM = "green", "bold red", "yellow", "dim"
_COLORS = {"running": _GOOD, "away": _BAD, "silent": _BAD, "failed": _BAD, "broken": _BAD, "waits_for_weights": _BAD}
_NAME_COLUMNS = 12
_BAR = 10
_COLUMNS = ("name", "role", "state", "run", "wait", "blocks", "tok/s", "prompt/s", "ms/tok", "ttft s", "weights")
# columns of words; the others have numbers
_WORDS = 3
# columns by their worth: in a narrow terminal the last ones are left out first, and so many stay
_WORTH = (0, 2, 6, 3, 4, 5, 8, 9, 7, 1, 10)
_KEPT = 3
# lines above the engines, and the head of their table
_TOP_LINES = 9
_MOST_PROBLEMS = 4


class Screen:
    """A renderable.

    Args:
        problem: why what is shown is not of now; "": it is.
        whole: every engine and problem, whatever the height.
    """

    def __init__(self, summary: Summary, problem: str = "", *, whole: bool = False) -> None:
        self._summary, self._problem, self._whole = summary, problem, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self._summary
        height = 10_000 if self._whole else options.height or console.size.height
        problems = [*([self._problem] if self._problem else []), *summary.problems]
        shown = problems if self._whole else problems[:_MOST_PROBLEMS]
        room = max(height - _TOP_LINES - len(shown) - (len(shown) < len(problems)), 1)
        lines = [*self._head(), *self._engines(options.max_width, room)]
        lines += [Text.assemble(("! ", _BAD), one) for one in shown]
        if len(shown) < len(problems):
            lines.append(Text(f"! and {len(problems) - len(shown)} more", style=_BAD))
        for number, line in enumerate(lines[:height]):
            if number:
                yield Segment.line()
            # names and problems come from elsewhere: none of them moves the cursor
            line.plain = "".join([one if one.isprintable() else "?" for one in line.plain])
            line.truncate(options.max_width, overflow="ellipsis")
            line.end = ""
            yield line
        if self._whole:
            yield Segment.line()

    def _head(self) -> list[Text]:
        summary = self._summary
        stats, rates, told = summary.stats, summary.rates, summary.stats.scheduler
        engines = f"{len(summary.engines)} engine{'s' * (len(summary.engines) != 1)}"
        if summary.state != "running" or len(summary.states) > 1:
            engines += f": {', '.join([f'{count} {_words_of(state)}' for state, count in summary.states.items()])}"
        title = Text.assemble(
            ("fdasync top", "bold"), f"  {summary.model}  weights {summary.weight_version}  {engines}"
        )
        return [
            title,
            _line("requests", f"running {told.running:,}  waiting {told.waiting:,}"
                  f"  for a place {stats.waiting_for_place:,}  leased {told.leased:,}"
                  f"  handed over {told.hand_offs:,}"),
            _line("tokens/s", f"{rates.tokens_per_s:,.0f}  prompt {rates.prompt_tokens_per_s:,.0f}"
                  f"  queued {_count(told.queued_tokens)}  ended/s {rates.finished_per_s:.3g}"
                  f"  (of {rates.seconds:.0f} s)"),
            _line("latency", f"first token {_latency(rates.ttft, 1.0)} s  each {_latency(rates.tpot, 1e3)} ms"
                  f"  (50 90 99 %)"),
            _line("hits", _hits(rates.hit_share)),
            _line("blocks", Text.assemble(
                _bar(told.used_blocks, told.num_blocks, told.idle_blocks),
                f" device {_places(told.used_blocks, told.num_blocks, told.idle_blocks)}"
                f"  host {_places(told.used_host_blocks, told.num_host_blocks)}")),
            _line("slots", f"{_places(told.used_slots, told.num_slots)}  leases granted {told.leases_granted:,}"
                  f" denied {told.leases_denied:,} dropped {told.leases_dropped:,}"),
            _line("experts", self._experts()),
        ]  # fmt: skip

    def _experts(self) -> str:
        if not self._summary.experts or not self._summary.experts[0].rows:
            return "-"
        experts = self._summary.experts[0]
        most = max(experts.imbalance)
        layer = experts.layers[experts.imbalance.index(most)]
        told = f"max/mean {most:.1f} (layer {layer})  never chosen {len(experts.dead)}"
        if experts.dead:
            told += ": " + " ".join([f"{layer}/{expert}" for layer, expert in experts.dead[:4]])
        seen = "" if experts.counted == experts.rows else f"  seen {experts.counted / experts.rows:.0%} of tokens"
        return told + seen

    def _engines(self, columns: int, room: int) -> list[Text]:
        engines = self._summary.engines
        cut = len(engines) > room
        if cut:
            wrong = [one for one in engines if one.problems]
            engines = (*wrong, *[one for one in engines if not one.problems])[: max(room - 1, 1)]
        rows = [[Text(name, style=_DIM) for name in _COLUMNS], *[_row(one) for one in engines]]
        most = columns if self._whole else _NAME_COLUMNS
        for row in rows:
            row[0].truncate(most, overflow="ellipsis")
        widths = [max([len(row[at]) for row in rows]) for at in range(len(_COLUMNS))]
        shown = list(range(len(_COLUMNS)))
        while sum([widths[at] + 1 for at in shown]) - 1 > columns and len(shown) > _KEPT:
            shown.remove(max(shown, key=_WORTH.index))
        lines = [_joined([(row[at], widths[at], at) for at in shown]) for row in rows]
        left = len(self._summary.engines) - len(engines)
        return [*lines, *([Text(f"and {left} more", style=_DIM)] if cut else [])]


def _joined(cells: list[tuple[Text, int, int]]) -> Text:
    """A row: words to the left, numbers to the right."""
    parts: list[Text | str] = []
    for number, (cell, width, column) in enumerate(cells):
        gap = " " * (width - len(cell))
        parts += [" " * bool(number), *((cell, gap) if column < _WORDS else (gap, cell))]
    return Text.assemble(*parts)


def _row(one: Engine) -> list[Text]:
    style = _ODD if one.problems and one.state == "running" else _COLORS.get(one.state, _ODD)
    state = Text("slow" if one.slow and one.state == "running" else _words_of(one.state), style=style)
    head = [Text(_end_of(one.name or one.address)), Text(one.role), state]
    if one.stats is None or one.state in ("away", "silent"):
        return [*head, *[Text("-") for _ in _COLUMNS[_WORDS:]]]
    rates, stats = one.rates, one.stats.scheduler
    told = [
        f"{stats.running:,}",
        f"{stats.waiting + one.stats.waiting_for_place:,}",
        f"{stats.used_blocks / stats.num_blocks:.0%}" if stats.num_blocks else "-",
        f"{rates.tokens_per_s:,.0f}",
        f"{rates.prompt_tokens_per_s:,.0f}",
        "-" if rates.token_s is None else f"{rates.token_s * 1e3:.3g}",
        "-" if rates.ttft.p50 is None else f"{rates.ttft.p50:.2g}",
        stats.weight_version[-_NAME_COLUMNS:],
    ]
    return [*head, *map(Text, told)]


def _words_of(state: str) -> str:
    """A state for people."""
    return state.replace("_", " ")


def _end_of(name: str) -> str:
    """The part of a name that tells one from another: of an address its end."""
    return name.rpartition("/")[2] if "://" in name else name


def _line(name: str, told: str | Text) -> Text:
    return Text.assemble((f"{name:<9}", _DIM), told)


def _latency(latency: Latency, factor: float) -> str:
    values = (latency.p50, latency.p90, latency.p99)
    return " ".join(["-" if value is None else f"{value * factor:.3g}" for value in values])


def _hits(share: tuple[float, float, float] | None) -> str:
    if share is None:
        return "-"
    device, host, store = share
    return f"{sum(share):.0%} of prompt tokens  device {device:.0%}  host {host:.0%}  store {store:.0%}"


def _places(used: int, every: int, idle: int = 0) -> str:
    if not every:
        return "-"
    return f"{used:,}/{every:,}" + (f" idle {idle:,}" if idle else "")


def _bar(used_blocks: int, every: int, idle_blocks: int) -> Text:
    """Used, idle and free, in ten characters."""
    if not every:
        return Text("." * _BAR, style=_DIM)
    used = round(_BAR * used_blocks / every)
    idle = min(round(_BAR * idle_blocks / every), _BAR - used)
    return Text.assemble(
        ("#" * used, _GOOD if used < _BAR else _ODD), ("=" * idle, _DIM), ("." * (_BAR - used - idle), _DIM)
    )


def _count(value: int) -> str:
    return f"{value:,}" if value < 100_000 else f"{value / 1e3:,.0f}k"
