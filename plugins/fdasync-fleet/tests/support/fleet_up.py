"""`fdasync up` as a process of its own."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.commands import children, command, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.commands import Running


@contextmanager
def up(
    folder: Path, config: Path, *arguments: str, **options: Any
) -> Iterator[tuple[Running, list[str], dict[str, int]]]:
    """`fdasync up`, its addresses and its processes; the test fails if anything of it is left."""
    with command(folder, "up", "--config", str(config), *arguments, **options) as running:
        addresses = json.loads(running.until(r"fdasync\.connect\((\[.*\])\)")[1])
        running.until("note: no model: tokens follow")
        pids = children(running.process.pid)
        assert len(pids) == len(addresses)
        yield running, addresses, pids
    wait_for(lambda: not any(map(is_running, pids.values())), "the end of its processes")
    assert not list(folder.glob("fdasync-*"))
