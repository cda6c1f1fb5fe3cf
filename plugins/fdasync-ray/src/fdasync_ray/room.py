"""What is said where a cluster has no room: what an instance needs, what the nodes have, and the way out.

Reads Ray's books of resources. Called by `fleet.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import ray

from fdasync.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MOST_KINDS = 8


class NoRoom(TransientError):
    """A cluster has had no place for instances for too long. They stay wanted, and are started when there is room.

    Attributes:
        names: of the instances, as "d3".
        asked: Ray's resources of one instance, which must be free on one node.
        nodes: of each node that lives, the same resources as it has them, whoever uses them.
        free: of all nodes together, the same resources as nobody uses them.
        fits: whether a node is large enough, so that there is room when others give theirs back.
        limit_s: how long was waited, in seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        asked: Mapping[str, float],
        nodes: Sequence[Mapping[str, float]],
        free: Mapping[str, float],
        limit_s: float,
    ) -> None:
        self.names, self.asked, self.limit_s = tuple(names), dict(asked), limit_s
        self.nodes, self.free = tuple(map(dict, nodes)), dict(free)
        self.fits = any(all(node[name] >= amount for name, amount in asked.items()) for node in self.nodes)
        counted = sorted(Counter(tuple(node.items()) for node in self.nodes).items(), reverse=True)
        shown = [f"{count} with {_words(dict(node))}" for node, count in counted[:_MOST_KINDS]]
        if len(counted) > _MOST_KINDS:
            shown.append("and others")
        out = (
            "ask for fewer instances, add nodes, or wait until others give resources back"
            if self.fits
            else "add a node that is large enough, or let an instance have less (--cpus, --ray-gpus, --tp)"
        )
        super().__init__(
            f"no node has had room for {', '.join(names)} for {limit_s:g} s: an instance needs {_words(asked)} on one"
            f" node; there are {len(self.nodes)} nodes ({', '.join(shown)}), and {_words(free)} are free in all; {out}"
        )


def no_room(names: Iterable[str], asked: Mapping[str, float], limit_s: float) -> NoRoom:
    """The error for instances that wait for room. Blocks for a call to Ray's control store."""
    nodes = [_of(node["Resources"], asked) for node in ray.nodes() if node["Alive"]]
    return NoRoom(tuple(names), asked, nodes, _of(ray.available_resources(), asked), limit_s)


def _of(resources: Mapping[str, Any], asked: Mapping[str, float]) -> dict[str, float]:
    return {name: float(resources.get(name, 0.0)) for name in asked}


def _words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
