"""Errors of the engine in the words of the client: they name the field that it sent, and not the engine's own.

Each dialect has a table: an engine's field, and the fields of the body that ask for it. Where several do, the field
that was sent is named. Knows no endpoint. Called around each call of the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput, GrammarFailed, TooLong
from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

#: by the engine's field: fields of a body in the order of preference, the last one if none of them was sent
Table = Mapping[str, tuple[str, ...]]


class Names(msgspec.Struct, frozen=True):
    """The names of one request's fields.

    Attributes:
        table: of the dialect.
        body: as it came.
        grammar: returns the field that names the format; it is called once there is an error.
        sampling: what stands before fields of sampling parameters, in place of "sampling_params.": one of a list has a
            number.
        within: stands before fields that the table lacks.
    """

    table: Table
    body: msgspec.Struct
    grammar: Callable[[], str] = str
    sampling: str = "sampling_params."
    within: str = ""

    def of(self, field: str) -> str:
        """The client's name for an engine's field; the same for a field that the table lacks."""
        name, bracket, rest = field.partition("[")
        if name == "grammar":
            return self.grammar() or name
        fields = self.table.get(name, (self.within + name,))
        chosen = next((one for one in fields if self._is_sent(one)), fields[-1])
        return chosen.replace("sampling_params.", self.sampling) + bracket + rest

    def _is_sent(self, field: str) -> bool:
        for known in msgspec.structs.fields(self.body):
            if known.name == field:
                default = known.default if known.default_factory is msgspec.NODEFAULT else known.default_factory()
                return bool(getattr(self.body, field) != default)
        return False

    def told(self, error: Exception) -> Exception:
        """The error as the client is told of it."""
        if isinstance(error, GrammarFailed):
            return Refused(400, str(error), param=self.of("grammar"), code="grammar_failed")
        if type(error) not in (BadInput, TooLong):
            return error
        assert isinstance(error, BadInput)
        fields = error.fields()
        renamed = {name: self.of(fields[name]) for name in ("field", "other") if fields.get(name)}
        return type(error)(**{**fields, **renamed})

    @contextmanager
    def told_to_client(self) -> Iterator[None]:
        """Errors of the generator that name a field name the client's."""
        try:
            yield
        except (BadInput, GrammarFailed) as error:
            raise self.told(error) from error
