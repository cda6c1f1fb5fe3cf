"""What tests of pauses and updates do to a table."""

from __future__ import annotations


def stop_steps(table):
    """Pause, and let the steps in flight end."""
    table.turn(table.pause())
    while table.flying:
        table.turn(table.done())


def update(table, version, *, resume=True):
    """New weights in one turn with the end of the pause, as the engine publishes them."""
    events = [table.weights(version)]
    return table.turn(*events, *([table.resume()] if resume else []))
