"""What the modules of this room share. Made by `weights.py`; knows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.changes import Changes
    from fdasync.engine.weights.control import Control
    from fdasync.engine.weights.loaders import Loaders
    from fdasync.engine.weights.pausing import Pausing
    from fdasync.engine.weights.state import WeightsState


class Room(NamedTuple):
    """See the module.

    Attributes:
        fail: ends the engine.
        check: raises unless the engine is running.
    """

    runtime: Runtime
    state: WeightsState
    control: Control
    pausing: Pausing
    changes: Changes
    loaders: Loaders
    fail: Callable[[BaseException], None]
    check: Callable[[], None]
