"""What a caller asked for, as it goes from the front to the scheduler. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from fdasync.request import SamplingParams


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """A request that another instance shall decode.

    Attributes:
        name: of the request among instances.
        caller: incarnation of the router that is to have the answer.
        decoders: addresses of instances, in order of preference.
    """

    name: str
    caller: bytes
    decoders: tuple[str, ...]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked for; see `Engine.generate`.

    Attributes:
        streams: deltas are wanted, not the end only.
        errand: another instance shall decode it.
    """

    prompt: Any
    params: SamplingParams
    streams: bool
    request_id: str | None
    priority: int
    deadline_s: float | None
    routing: bool | None
    aux: bool | Sequence[str] | None = None
    start: int
    cache_salt: str
    errand: Errand | None = None


class Given(NamedTuple):
    """What a prompt's blocks are called: identities of the full ones under a namespace."""

    namespace: bytes
    block_keys: tuple[bytes, ...]
