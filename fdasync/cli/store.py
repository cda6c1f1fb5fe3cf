"""The `fdasync store` commands: look into the folder of a file store, check it, clean it up.

Parses, prints and sets exit codes; the work is in `cache/store/file/admin.py`, imported when a command runs. Called by
`main.py`.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fdasync.cli.common.stdout import print_json
from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync.cache.store.file.index import Entry

_EXIT_DAMAGED = 1
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_UNITS["ti"] = 1 << 40
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _parse_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Bytes: a number with or without a unit, e.g. 500MB or 10GiB."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?i?)b?", text.lower())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{text!r} is no size; say for example 500MB or 10GiB", ctx, param)
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_age(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Seconds: a number with a unit, e.g. 90s, 30m, 12h, 7d or 2w."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhdw])", text.lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is no age; say for example 12h or 7d", ctx, param)
    return float(match[1]) * _SECONDS[match[2]]


_PATH = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


@click.group()
def store() -> None:
    """Look into the folder of a file store: ls, stat, verify, gc.

    `ls` and `stat` only read, and may run while an engine uses the folder; `verify` and `gc` need it for themselves.
    """


@store.command()
@_PATH
@click.option("--limit", default=100, show_default=True, type=click.IntRange(0), help="Objects to list; 0 lists all.")
@click.option("--namespace", default="", help="Only those whose namespace starts like this.")
@_JSON
def ls(path: Path, limit: int, namespace: str, as_json: bool) -> None:
    """List objects, the latest first: key, size, age, content.

    Exit code 0; 2 if the folder cannot be read.
    """
    from fdasync.cache.store.file.admin import content_of, survey

    found = [one for one in survey(path).objects if one.namespace.startswith(namespace.lower())]
    shown = found[: limit or None]
    if as_json:
        rows = [
            {
                "key": one.record.key,
                "namespace": one.namespace,
                "nbytes": one.record.nbytes,
                "sequence": one.record.sequence,
                "age_s": round(_age_s(one.record.written_ns), 3),
                "content": content_of(path, one),
                "segment": one.shape.name,
                "slot": one.slot,
            }
            for one in shown
        ]
        print_json({"objects": rows, "total": len(found)})
        return
    table = Table(title=f"{len(shown)} of {len(found)} objects in {path}")
    for column in ("key", "bytes", "age", "put", "content"):
        table.add_column(column, overflow="fold", justify="right" if column in ("bytes", "age", "put") else "left")
    for one in shown:
        record = one.record
        age = _duration(_age_s(record.written_ns))
        table.add_row(record.key, f"{record.nbytes:,}", age, str(record.sequence), content_of(path, one))
    Console().print(table)


@store.command()
@_PATH
@_JSON
def stat(path: Path, as_json: bool) -> None:
    """Count objects, bytes and slots, by namespace and by size of slot; show which process uses the folder, and files
    that are not the store's.

    Exit code 0; 1 if something is damaged; 2 if the folder cannot be read.
    """
    from fdasync.cache.store.file.admin import survey

    seen = survey(path)
    disk_nbytes = sum(shape.nbytes for shape in seen.segments)
    classes: dict[int, Counter[str]] = {}
    for shape in seen.segments:
        classes.setdefault(shape.stride, Counter()).update(segments=1, slots=shape.slots, disk_nbytes=shape.nbytes)
    namespaces: dict[str, Counter[str]] = {}
    for one in seen.objects:
        classes[one.shape.stride].update(used=1, nbytes=one.record.nbytes)
        namespaces.setdefault(one.namespace, Counter()).update(objects=1, nbytes=one.record.nbytes)
    nbytes = sum(one.record.nbytes for one in seen.objects)
    if as_json:
        columns = ("segments", "slots", "used", "nbytes", "disk_nbytes")
        print_json(
            {
                "objects": len(seen.objects),
                "nbytes": nbytes,
                "disk_nbytes": disk_nbytes,
                "cap_nbytes": seen.cap_nbytes or None,
                "held_by": seen.holder or None,
                "namespaces": {name: dict(count) for name, count in namespaces.items()},
                "strides": {str(key): {name: count[name] for name in columns} for key, count in classes.items()},
                "damaged": seen.damaged,
                "unknown_files": seen.unknown,
            }
        )
    else:
        console = Console()
        cap = f"of {_size(seen.cap_nbytes)} allowed" if seen.cap_nbytes else "cap unknown"
        console.print(f"{path}: {len(seen.objects):,} objects, {_size(nbytes)}; {_size(disk_nbytes)} on disk, {cap}")
        console.print(f"in use by process {seen.holder}" if seen.holder else "not in use")
        table = Table("namespace", "objects", "bytes", title="namespaces")
        for name, count in sorted(namespaces.items(), key=lambda pair: -pair[1]["nbytes"]):
            table.add_row(name or "(other keys)", f"{count['objects']:,}", f"{count['nbytes']:,}")
        console.print(table)
        table = Table("slot bytes", "segments", "slots", "used", "free", "on disk", title="slots")
        for stride, count in sorted(classes.items()):
            free = count["slots"] - count["used"]
            cells = (stride, count["segments"], count["slots"], count["used"], free)
            table.add_row(*(f"{cell:,}" for cell in cells), _size(count["disk_nbytes"]))
        console.print(table)
        for name, problem in seen.damaged.items():
            console.print(f"[red]damaged[/] {name}: {problem}", highlight=False)
        for name in seen.unknown:
            console.print(f"[yellow]not the store's, left alone[/] {name}", highlight=False)
    sys.exit(_EXIT_DAMAGED if seen.damaged else 0)


@store.command()
@_PATH
@click.option("--delete", is_flag=True, help="Remove damaged objects, so that good ones can take their places.")
@_JSON
def verify(path: Path, delete: bool, as_json: bool) -> None:
    """Read every object and check it against its checksums.

    Exit code 0: all are right. 1: something is damaged (or was, with --delete). 2: it could not run, for example
    because an engine uses the folder.
    """
    from fdasync.cache.store.file.admin import Folder

    with Folder(path) as folder:
        damaged = dict(folder.damaged)
        bad: list[Entry] = []
        counts: Counter[str] = Counter()
        # refreshed by hand: `auto_refresh` starts a thread
        progress = Progress(console=Console(stderr=True), auto_refresh=False, transient=True)
        with progress:
            task = progress.add_task("checking", total=folder.index.nbytes, visible=not as_json)
            shown_at = 0.0
            for entry, problem in folder.check_objects():
                counts.update(objects=1, nbytes=entry.nbytes, unchecked=problem is None)
                if problem:
                    damaged[entry.key] = problem
                    bad.append(entry)
                if time.monotonic() - shown_at > 0.1:
                    progress.update(task, completed=counts["nbytes"], refresh=True)
                    shown_at = time.monotonic()
        deleted = 0
        if delete:
            deleted = folder.clear_damaged()
            for entry in bad:
                folder.delete(entry)
                deleted += 1
    if as_json:
        names = ("objects", "nbytes", "unchecked")
        print_json({**{name: counts[name] for name in names}, "damaged": damaged, "deleted": deleted})
    else:
        console = Console()
        for name, problem in damaged.items():
            console.print(f"[red]damaged[/] {name}: {problem}", highlight=False, soft_wrap=True)
        console.print(
            f"{counts['objects']:,} objects, {_size(counts['nbytes'])}: {len(damaged)} damaged, {deleted} removed"
            + (f", {counts['unchecked']} of other kinds that carry no checksum" if counts["unchecked"] else "")
        )
    sys.exit(_EXIT_DAMAGED if damaged else 0)


@store.command()
@_PATH
@click.option("--keep-namespace", multiple=True, help="Remove all but these (their beginning will do).")
@click.option(
    "--older-than", metavar="AGE", callback=_parse_age, help="Remove objects that were put longer ago, e.g. 12h or 7d."
)
@click.option(
    "--max-nbytes",
    metavar="SIZE",
    callback=_parse_size,
    help="Remove the objects that were used longest ago until the files are this small.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@_JSON
def gc(
    path: Path,
    keep_namespace: tuple[str, ...],
    older_than: float | None,
    max_nbytes: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove objects, and give the room of empty segments back to the disk.

    Options add up. With --max-nbytes whole segments go, the one used longest ago first. Exit code 0; 2 if it could
    not run, for example because an engine uses the folder.
    """
    from fdasync.cache.store.file.admin import Folder, namespace_of

    keep = tuple(name.lower() for name in keep_namespace)
    for name in keep:
        if not name or set(name) - set("0123456789abcdef"):
            raise BadInput("--keep-namespace", f"{name!r} is no beginning of a namespace", limit="hex digits")

    def unwanted(entry: Entry) -> bool:
        foreign = bool(keep) and not namespace_of(entry.key).startswith(keep)
        return foreign or (older_than is not None and _age_s(entry.written_ns) > older_than)

    with Folder(path) as folder:
        there = {namespace_of(entry.key) for entry in folder.index.entries()}
        for name in keep:
            if not any(namespace.startswith(name) for namespace in there):
                raise BadInput(
                    "--keep-namespace", f"{name!r} is the beginning of none that is there", hint="see `stat`"
                )
        total_nbytes = folder.index.total_nbytes
        waste = folder.find_waste(unwanted, max_nbytes)
        if not dry_run:
            folder.remove(waste)
    left_nbytes = total_nbytes - waste.disk_nbytes
    if as_json:
        figures = {"objects": waste.objects, "nbytes": waste.nbytes, "disk_nbytes": waste.disk_nbytes}
        print_json({**figures, "disk_left_nbytes": left_nbytes, "dry_run": dry_run})
    else:
        verb = "would remove" if dry_run else "removed"
        removed = f"{verb} {waste.objects:,} objects ({_size(waste.nbytes)}), {_size(waste.disk_nbytes)} of disk"
        Console().print(f"{removed}; {_size(left_nbytes)} left")


def _age_s(written_ns: int) -> float:
    return max(0.0, time.time() - written_ns / 1e9)


def _duration(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


def _size(nbytes: int) -> str:
    for unit in ("ti", "gi", "mi", "ki"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit[0].upper()}iB"
    return f"{nbytes} B"
