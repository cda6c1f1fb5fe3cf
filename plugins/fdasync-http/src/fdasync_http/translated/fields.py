"""Fields that the dialects share which are translated into chats, and their names in errors.

Called by `responses` and `anthropic`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fdasync.errors import FdasyncError
from fdasync_http.failures import Refused, refused_of
from fdasync_http.openai.types import Extras

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def extras_of(body: Extras) -> dict[str, Any]:
    """They, as the fields of a chat's body."""
    return {name: getattr(body, name) for name in Extras.__struct_fields__}


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of a chat name the dialect's.

    Args:
        names: by the chat's name.
    """
    try:
        yield
    except (Refused, FdasyncError) as error:
        refused = refused_of(error)
        # a field, and what is meant within it
        name = refused.param.partition("[")[0].partition(".")[0]
        refused.param = names.get(name, name) + refused.param[len(name) :]
        raise refused from error
