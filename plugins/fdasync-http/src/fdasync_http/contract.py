"""What a path is, and what it answers with: statuses, media types, parameters of the query, and a body that is right.

`paths.py` has the table of all paths, the types of bodies say which fields they have. Pure. Called by `application.py`,
and by `openapi.py`, which describes the paths.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync_http.failures import JSON
from fdasync_http.refused import REASONS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.calls import Call
    from fdasync_http.front import Front

HTML, TEXT = "text/html", "text/plain"
EVENTS = "text/event-stream"
Serve = Callable[["Request", "Front"], Awaitable["Response"]]

#: what a status means
MEANINGS = {
    200: "served", 202: "memory is taken back, and an update has to bring the weights",
    400: "bad input, named", 401: "a key is needed", 403: "the admin key is needed",
    404: "there is no such model", 408: "the request did not arrive in time",
    409: "another request has this name, another update is under way, or memory is released",
    413: "the body is too large",
    429: "too many connections or requests; retry-after says when to try again", 431: "the headers are too long",
    501: "not served here; the message names the path to use instead", 503: "the engine cannot serve now",
}  # fmt: skip

# from the connection and the keys, before any path is looked at
_EVERY = (400, 401, 408, 429, 431)
# a field in a docstring, or some of them
_FIELD = re.compile(r"    (\w[\w, ]*): (.*)")


class Query(NamedTuple):
    """A parameter of a query; each may be left out.

    Attributes:
        name: of it.
        about: what it does.
        schema: of its values.
    """

    name: str
    about: str
    schema: dict[str, Any]


class Path(NamedTuple):
    """One path.

    Attributes:
        path: as clients name it.
        methods: of HTTP.
        serve: makes the answer.
        body: the type of its JSON; None: it takes none.
        call: what is done, of a path that controls the engine; None: `serve` alone knows.
        also: statuses with which it answers beside those that every path has.
        media: types of the body of status 200; (): it has none.
        told: parameters of the query that `call` does not tell.
        example: a body that is right; None: it takes none, or none is known.
        needs_engine: its answer depends on the engine.
    """

    path: str
    methods: tuple[str, ...]
    serve: Serve
    body: type[Any] | None = None
    call: type[Call] | None = None
    also: tuple[int, ...] = ()
    media: tuple[str, ...] = (JSON,)
    told: tuple[Query, ...] = ()
    example: dict[str, Any] | None = None
    needs_engine: bool = True

    @property
    def about(self) -> str:
        """What it does, in words."""
        words = (self.call or self.serve).__doc__ or ""
        return REASONS.get(self.path) or words_of(words)[0]

    @property
    def queries(self) -> tuple[Query, ...]:
        """Parameters of the query."""
        if self.call is None:
            return self.told
        (schema,), _ = msgspec.json.schema_components([self.call], ref_template="{name}")
        schema = msgspec.json.schema(self.call)["$defs"][schema["$ref"]]["properties"]
        words = words_of(self.call.__doc__ or "")[1]
        return tuple([Query(name, words[name], schema[name]) for name in self.call.QUERY])

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The only keys that the query may have; None: other keys are ignored."""
        return self.call.QUERY if self.call is not None and self.call.STRICT else None

    def statuses(self, *, controls: bool) -> tuple[int, ...]:
        """With which it answers. `controls`: it may ask for the admin key."""
        found = {*_EVERY, *self.also, *((403,) if controls else ()), *((413,) if self.body is not None else ())}
        if self.path in REASONS:
            return tuple(sorted(found | {501}))
        return tuple(sorted(found | ({200, 503} if self.needs_engine else {200})))


def words_of(docstring: str) -> tuple[str, dict[str, str]]:
    """The words of a struct's docstring about it, and about each of its fields."""
    about, _, attributes = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        match = _FIELD.fullmatch(line)
        if match is not None:
            names = match[1].split(", ")
            fields |= dict.fromkeys(names, match[2])
        elif line.strip():
            fields |= {name: f"{fields[name]} {line.strip()}" for name in names}
    return about.strip(), fields
