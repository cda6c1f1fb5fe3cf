"""Types of fields that messages share, with their bounds. Used by `messages.py` and `verbs.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fdasync.request import MAX_VERSION_CHARS

Meta = msgspec.Meta
Name = Annotated[str, Meta(min_length=1, max_length=256)]
WORDS_CHARS = 4096
Words = Annotated[str, Meta(max_length=WORDS_CHARS)]
#: a label of weights
Version = Annotated[str, Meta(min_length=1, max_length=MAX_VERSION_CHARS)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
MOST_S = 1e9
Seconds = Annotated[float, Meta(ge=0, le=MOST_S)]
Small = Annotated[int, Meta(ge=0, lt=1 << 20)]
#: a `traceparent`, or ""; the engine refuses others
Trace = Annotated[str, Meta(max_length=55)]
#: token ids, int32 little-endian
Tokens = Annotated[bytes, Meta(max_length=4 << 20)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=1 << 17)]
Namespace = Annotated[bytes, Meta(max_length=16)]
Floats = Annotated[bytes, Meta(max_length=4 << 20)]
Role = Literal["mixed", "prefill", "decode", "router"]
#: a request's name among instances, and the number of the attempt to find room for it
LeaseName = tuple[Name, Small]
#: names of aux specs
Names = Annotated[tuple[Name, ...], Meta(max_length=64)]
#: no model has more layers with experts
Layers = Annotated[tuple[Small, ...], Meta(max_length=4096)]
