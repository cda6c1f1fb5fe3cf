"""Defines the settings of a router. Pure data; `fdasync.connect` and `Router` take it."""

from __future__ import annotations

from typing import Literal

import msgspec

from fdasync_fleet.fields import Count, Seconds

Require = Literal["serving", "all"]
_CONNECT_S = 60.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a router behaves.

    Attributes:
        retries: how often the router sends a request again.
        direct_below_tokens: a decode instance prefills a prompt itself if it lacks fewer tokens of it than this.
        request_deadline_s: deadline of requests that name none.
        require: the instances for which `start` waits: "serving": the first that is up; "all": all of them.
        connect_s: how long `start` waits at most. "auto": a minute; but if the socket files of ipc addresses are
            missing, and no other instance can serve, it ends after `settle_s`. Name a time for instances that are about
            to start.
        settle_s: with "serving": how long `start` waits for the other instances once the first is up. A running
            instance answers within that time.
        absent_s: how long a request waits while no instance is up that can take it. (If its caller names instances,
            only those count.) For a busy instance a request waits until its deadline.
        handoff_s: how long a weight update waits for hand-offs to finish before it starts those requests again.
        command_s: how long an instance may take for a weight update, a pause, a resume or a reset of its cache. A pause
            that waits for requests may take `request_deadline_s` longer.
    """

    require: Require = "serving"
    retries: Count = 3
    direct_below_tokens: Count = 0
    request_deadline_s: Seconds = 3600.0
    connect_s: Seconds | Literal["auto"] = "auto"
    settle_s: Seconds = 1.0
    absent_s: Seconds = 30.0
    handoff_s: Seconds = 10.0
    command_s: Seconds = 900.0

    @property
    def connect_limit_s(self) -> float:
        """`connect_s` as a number."""
        return _CONNECT_S if self.connect_s == "auto" else self.connect_s
