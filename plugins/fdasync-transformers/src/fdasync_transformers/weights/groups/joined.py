"""The groups that a runner is a rank of, by name, and why earlier groups are gone.

Knows no tensors. Called by `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import WeightsRejected

if TYPE_CHECKING:
    from fdasync.request import WeightsGroup
    from fdasync_transformers.weights.groups.group import JoinedGroup

# names are clients': of so many that were left it is known why
_MOST_LEFT = 16


class JoinedGroups:
    """See the module."""

    def __init__(self) -> None:
        self._groups: dict[str, JoinedGroup] = {}
        # of groups that were left, the latest last
        self._why: dict[str, str] = {}

    def holds(self, group: WeightsGroup) -> bool:
        """Whether this very group is joined."""
        held = self._groups.get(group.name)
        return held is not None and held.spec == group

    def get(self, name: str) -> JoinedGroup:
        """Raises WeightsRejected, which says what is joined and why this one is not."""
        group = self._groups.get(name)
        if group is None:
            joined = ", ".join(repr(other) for other in self._groups) or "none"
            why = self._why.get(name, "nobody has joined it")
            raise WeightsRejected(f"no group {name!r} is joined here: {why}; joined are: {joined}")
        return group

    def add(self, group: JoinedGroup) -> None:
        self._groups[group.spec.name] = group
        self._why.pop(group.spec.name, None)

    def leave(self, name: str, why: str = "it was left, as somebody asked") -> bool:
        """Leave a group; False: there is none of that name."""
        group = self._groups.pop(name, None)
        if group is None:
            return False
        group.close()
        self._why[name] = why
        while len(self._why) > _MOST_LEFT:
            del self._why[next(iter(self._why))]
        return True

    def failed(self, name: str, problem: str) -> str:
        """Leave a group by which an update failed; returns the problem, and that the group was left for it."""
        if not self.leave(name, f"it was left when an update by it failed ({problem})"):
            return problem
        return f"{problem}; group {name!r} was left, since nobody knows what its rank 0 has sent: join it anew"

    def close(self) -> None:
        """Leave all."""
        for name in list(self._groups):
            self.leave(name)
