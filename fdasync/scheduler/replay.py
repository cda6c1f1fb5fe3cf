"""Replays a recorded trace: the same events must give the same actions.

Knows no engine. Called by the simulation and by tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.drafting import make_drafter as installed_drafter
from fdasync.errors import InvariantBroken
from fdasync.events.trace import FORMAT, TraceHeader, Turn
from fdasync.scheduler.drafts import drafter_limits
from fdasync.scheduler.make import make_scheduler
from fdasync.scheduler.state.config import SchedulerConfig
from fdasync.scheduler.state.policy import own_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fdasync.drafting import Drafter, DrafterLimits
    from fdasync.events.actions import Action
    from fdasync.scheduler.state.policy import Policy


def replay(
    trace: bytes,
    make_policy: Callable[[str, Mapping[str, Any]], Policy] = own_policy,
    make_drafter: Callable[[str, Mapping[str, Any], DrafterLimits], Drafter] = installed_drafter,
) -> int:
    """Feed a recorded trace to a fresh scheduler; returns how many turns gave the same actions.

    Args:
        make_policy: makes the policy that the trace's header names, from its name and its settings. The default knows
            the package's own policies; `fdasync.engine.config.make_policy` knows plugins' policies, too.
        make_drafter: likewise the drafter, from its name, its settings and its limits. The default knows all that are
            installed; an engine that was given a drafter object needs one like it here, which knows nothing yet.

    Raises InvariantBroken at the first turn that differs, ValueError for bytes that are no complete trace and for a
    policy that is not known, and the errors of `make_policy` and `make_drafter`.
    """
    lines = trace.splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=TraceHeader)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a trace: its header: {error}") from None
    if header.format != FORMAT or not header.complete:
        raise ValueError(f"cannot replay a trace of format {header.format}, complete={header.complete}")
    config = msgspec.convert(header.scheduler, SchedulerConfig)
    drafter = None
    if config.drafter:
        drafter = make_drafter(config.drafter, config.drafter_config, drafter_limits(config))
    scheduler = make_scheduler(config, make_policy(config.policy, config.policy_config), drafter)
    decoder = msgspec.json.Decoder(Turn)
    encoder = msgspec.json.Encoder()
    for number, line in enumerate(lines[1:]):
        try:
            turn = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number + 2} is not a turn: {error}") from None
        actions = scheduler.handle(list(turn.events))
        if encoder.encode(actions) != encoder.encode(turn.actions):
            raise InvariantBroken(f"turn {number} replays to other actions", _both(turn, actions))
    return len(lines) - 1


def _both(turn: Turn, actions: list[Action]) -> list[str]:
    """The actions of a turn as recorded, and as replayed."""
    return [f"recorded: {action!r}"[:400] for action in turn.actions] + [f"now: {action!r}"[:400] for action in actions]
