"""The table of `fdasync up`: one row for each instance, from the statistics of a router.

Starts and changes nothing. Called by `up.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync_fleet.cli.local.child import Child
    from fdasync_fleet.cli.local.restarts import Restarts
    from fdasync_fleet.router.stats import InstanceStats, RouterStats

_COLORS = {
    "running": "green", "ready": "green", "behind": "magenta", "ended": "red", "given up": "red", "away": "red",
    "refused": "red",
}  # fmt: skip
# an instance sends its status twice a second
_STALE_S = 3.0
# two statuses that are closer together give no rate
_MIN_S = 0.1


class Rates:
    """Tokens and prompt tokens per second of each instance, between its last two statuses."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int, int]] = {}
        self._rates: dict[str, tuple[float, float]] = {}

    def take(self, stats: RouterStats) -> None:
        for one in stats.instances:
            if one.status is None:
                continue
            told = one.status.stats
            now = (one.status_at, told.tokens, told.scheduler.prompt_tokens)
            then = self._last.get(one.address)
            if then is not None and now[0] - then[0] < _MIN_S:
                continue
            self._last[one.address] = now
            if then is not None:
                seconds = now[0] - then[0]
                self._rates[one.address] = (
                    max(now[1] - then[1], 0) / seconds,
                    max(now[2] - then[2], 0) / seconds,
                )

    def of(self, one: InstanceStats) -> tuple[float, float]:
        """Tokens and prompt tokens a second."""
        return self._rates.get(one.address, (0.0, 0.0)) if one.is_up else (0.0, 0.0)


def fleet_table(
    children: Sequence[Child], stats: RouterStats, rates: Rates, restarts: Mapping[str, Restarts], now: float
) -> Table:
    """A row for each child; `restarts` are by its name, `now` is the loop's time."""
    known = {one.address: one for one in stats.instances}
    caption = f"addresses: {children[0].address.removesuffix(children[0].name)}NAME"
    # without lines between columns 80 characters are enough; a cell that is too long breaks between words
    table = Table(title="fdasync up", caption=caption, box=SIMPLE_HEAD, padding=0)
    for column in ("name", "role"):
        table.add_column(column, no_wrap=True)
    # of the longest word of a state, and of a number of blocks
    table.add_column("state", min_width=8)
    for column in ("run", "wait", "free blocks", "tok/s", "prompt/s", "received blocks", "restarts"):
        table.add_column(column, justify="right", no_wrap=" " not in column, min_width=8 if " " in column else None)
    for child in children:
        table.add_row(*_row(child, known.get(child.address), rates, restarts[child.name], now))
    return table


def _row(child: Child, one: InstanceStats | None, rates: Rates, restarts: Restarts, now: float) -> tuple[str, ...]:
    state: str = child.state
    count = f"{restarts.count}"
    if state == "ready" and one is not None:
        # an instance that is up with a problem lacks the others' weights, and gets no requests
        state = "behind" if one.is_up and one.problem and one.state == "running" else one.state
    elif state == "ended" and restarts.due is not None:
        state = f"again in {max(restarts.due - now, 0.0):.0f} s"
    elif state == "ended" and restarts.given_up:
        state = "given up"
    shown = f"[{_COLORS.get(state, 'yellow')}]{state.replace('_', ' ')}[/]"
    head = (child.name, child.role, shown)
    if child.state == "ended" or one is None or one.status is None or one.age_s > _STALE_S:
        return (*head, *["-"] * 6, count)
    told, free = one.status.stats.scheduler, one.status.free_blocks
    tokens, prompt_tokens = rates.of(one)
    return (
        *head,
        f"{told.running}",
        f"{told.waiting}",
        f"{free} of {told.num_blocks}",
        f"{tokens:.0f}",
        f"{prompt_tokens:.0f}",
        f"{told.received_blocks}",
        count,
    )
