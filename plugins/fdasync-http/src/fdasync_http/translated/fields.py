"""Fields that the dialects share which are translated into chats, and their names in errors.

Called by `responses` and `anthropic`.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import FdasyncError
from fdasync_http.failures import Refused, refused_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Extras(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of `/v1/chat/completions` that a translated dialect takes under the same names; see there.

    Attributes:
        return_token_ids, return_meta_info, return_routed_experts, routed_experts_start_len,
            routed_experts_prompt_start: what they ask for stands beside the fields of the answer, in a stream in its
            last event that tells how the answer ended.
    """

    seed: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int | None] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    chat_template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""
    extra_key: str = ""
    priority: int = 0
    request_id: str | None = None
    rid: str | None = None
    return_token_ids: bool = False
    return_meta_info: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    routed_experts_prompt_start: int | None = None


def extras_of(body: Extras) -> dict[str, Any]:
    """They, as the fields of a chat's body."""
    return {name: getattr(body, name) for name in Extras.__struct_fields__}


def unserved(field: str, reason: str = "", *, code: str = "not_served") -> Refused:
    """The answer to a field that asks for something not served."""
    return Refused(400, f"{field} is not served{reason and ': '}{reason}", param=field, code=code)


def wrong(field: str, words: str) -> Refused:
    """The answer to a field that has not its form."""
    return Refused(400, f"{field} {words}", param=field, code="bad_input")


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
        name, rest = re.split(r"(?=[.\[]|$)", refused.param, maxsplit=1)
        if name not in names:
            raise
        raise Refused(
            refused.status,
            re.sub(rf"\b{name}\b", names[name], refused.message),
            param=names[name] + rest,
            code=refused.code,
            retry_after_s=refused.retry_after_s,
        ) from error
