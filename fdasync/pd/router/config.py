"""How a router behaves. Pure data, made by whoever makes a `Router`."""

from __future__ import annotations

from typing import Literal

import msgspec

Require = Literal["serving", "all"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    retries: how often a request is sent again.
    direct_below_tokens: prompts that lack fewer tokens on a decode instance are not prefilled elsewhere.
    request_deadline_s: of requests that name none.
    require: whom `start` waits for: "serving": until one is there, which can serve, while the others are called on; or
        "all".
    connect_s: how long `start` waits at most.
    settle_s: how long it waits for the others then: those that are there all answer within that.
    absent_s: how long a request waits while no instance is there that takes it, of those that its caller names if so;
        it may wait for a busy one to its deadline.
    handoff_s: how long a weight update waits for requests that are being handed over, before it starts them again.
    command_s: how long an instance may take for a weight update, a pause or a resume.
    """

    require: Require = "serving"
    retries: int = 3
    direct_below_tokens: int = 0
    request_deadline_s: float = 3600.0
    connect_s: float = 60.0
    settle_s: float = 1.0
    absent_s: float = 30.0
    handoff_s: float = 10.0
    command_s: float = 900.0
