"""The picture of the house in ARCHITECTURE.md, drawn from what modules import.

    python -m tests.support.picture

A line for each floor, the lowest last: a room stands above every room that it imports, and as low as it can.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.support.imports import ALL_MODULES, imports_of

_WIDTH = 96
# rooms within a distribution that stand on floors of their own
_APART = ("cli", "testing")
# the command's module, and paths that say where something went
_LEFT_OUT = ("fdasync.__main__", "fdasync.pd", "fdasync.routing", "fdasync.gpu.kernels")
# rooms of the core that are drawn by their own name, and not as a part of their folder
_CORE = ("fdasync.cache.store", "fdasync.telemetry.sight", "fdasync.telemetry.sight.recording")


def room_of(module: str) -> str:
    """What a module is drawn as."""
    first, _, rest = module.partition(".")
    if first != "fdasync":
        room = rest.partition(".")[0]
        return f"{first}/{room}" if room in _APART else first
    for room in sorted(_CORE, key=len, reverse=True):
        if module == room or module.startswith(f"{room}."):
            return room.removeprefix("fdasync.").replace(".", "/")
    return rest.partition(".")[0] or "fdasync"


def graph() -> dict[str, set[str]]:
    """The rooms that each room imports, for type checkers too."""
    found: dict[str, set[str]] = {}
    for module, path in ALL_MODULES.items():
        if module in _LEFT_OUT:
            continue
        room = room_of(module)
        others = {room_of(one) for one in imports_of(path.read_text(), types=True) if one in ALL_MODULES}
        found.setdefault(room, set()).update(others - {room})
    return found


def picture() -> str:
    """The lines, from the highest floor to the lowest. Raises graphlib.CycleError where rooms import each other."""
    rooms = graph()
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[one] for one in rooms[room]), default=-1)
    lines = []
    for floor in range(max(floors.values()), -1, -1):
        line = "   "
        for room in sorted(room for room in floors if floors[room] == floor):
            if len(line) + 2 + len(room) > _WIDTH:
                lines.append(line)
                line = "   "
            line += f" {room}" if line == "   " else f"  {room}"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(picture(), end="")
