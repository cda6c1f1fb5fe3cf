"""Formats that clients hold answers to, in the words of OpenAI, SGLang and vLLM, as grammars of the engine. Pure.

Only the form is read here; the engine says whether it can keep a grammar. Called by the modules that read bodies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import Grammar
from fdasync_http.failures import unserved, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ANY_OBJECT = '{"type":"object"}'
# vLLM's, that say how its own libraries work
_IGNORED = ("disable_fallback", "backend", "_backend", "_backend_was_auto")


#: the fields of bodies and of sampling parameters that name a format: OpenAI's, vLLM's and its former ones, SGLang's
FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "regex", "ebnf",
)  # fmt: skip


def grammar_of(asked: msgspec.Struct, where: str = "") -> Grammar | None:
    """The one grammar that is asked for; None: none is. Raises Refused (400), which names the field.

    Args:
        asked: has some of `FIELDS`, each None where it is left out.
        where: what the fields stand in, with a dot; "": the body.
    """
    named = {name: value for name in FIELDS if (value := getattr(asked, name, None)) is not None}
    found = [(name, grammar) for name, value in named.items() if (grammar := _of(name, value, where)) is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise wrong(where + found[0][0], f"{names} name a format each; give one")
    return found[0][1] if found else None


def field_of(asked: msgspec.Struct, where: str = "") -> str:
    """The field that names the format; "": none does. As `grammar_of`, which was called before."""
    for name in FIELDS:
        value = getattr(asked, name, None)
        if value is not None and _of(name, value, where) is not None:
            inner = f".{_given_outputs(value)[0][0]}" if name == "structured_outputs" else ""
            return where + name + inner
    return ""


def _of(name: str, value: Any, where: str) -> Grammar | None:
    field = where + name
    if name == "response_format":
        return _response_format(value, field)
    if name == "structured_outputs":
        return _structured_outputs(value, field)
    if name in ("guided_json", "json_schema"):
        return _schema(value, field)
    if name in ("guided_regex", "regex"):
        return Grammar("regex", value)
    if name == "guided_choice":
        return _choice(value, field)
    return Grammar("gbnf", value)


def _response_format(value: Mapping[str, Any], field: str) -> Grammar | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", _ANY_OBJECT)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is not None:
            return _schema(schema, f"{field}.json_schema.schema")
        # beside `type`, as SGLang reads it
        if value.get("schema") is not None:
            return _schema(value["schema"], f"{field}.schema")
        raise wrong(field, "has no json_schema.schema")
    raise unserved(field, f"type {kind!r:.100}; there are text, json_object and json_schema")


def _structured_outputs(value: Mapping[str, Any], field: str) -> Grammar | None:
    given = _given_outputs(value)
    if not given:
        return None
    if len(given) > 1:
        raise wrong(field, f"{' and '.join(name for name, _ in given)} are more than one format; give one")
    ((name, part),) = given
    inner = f"{field}.{name}"
    if name == "json_object":
        return Grammar("json_schema", _ANY_OBJECT)
    if name == "json":
        return _schema(part, inner)
    if name == "choice":
        return _choice(part, inner)
    if name in ("regex", "grammar"):
        if not isinstance(part, str):
            raise wrong(inner, "is no text")
        return Grammar("regex" if name == "regex" else "gbnf", part)
    raise unserved(inner)


def _given_outputs(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The formats that vLLM's field names."""
    given = {name: part for name, part in value.items() if part is not None and name not in _IGNORED}
    if given.get("json_object") is False:
        del given["json_object"]
    return list(given.items())


def _schema(value: Any, field: str) -> Grammar:
    """A schema as an object of JSON, as text, or as true or false."""
    if isinstance(value, str):
        # SGLang's word for any JSON
        return Grammar("json_schema", "{}" if value == "$$ANY$$" else value)
    if not isinstance(value, dict | bool):
        raise wrong(field, "is no JSON schema")
    return Grammar("json_schema", msgspec.json.encode(value).decode())


def _choice(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise wrong(field, "is no list of texts")
    return Grammar("lark", f"start: {' | '.join(map(_literal, value))}")


def _literal(text: str) -> str:
    """As Lark writes it, which is as JSON does."""
    return msgspec.json.encode(text).decode()


def calls_of(tools: Sequence[Mapping[str, Any]], *, tags: tuple[str, str], special: bool, several: bool) -> Grammar:
    """Calls of these functions and nothing else, as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Args:
        tools: OpenAI's, checked.
        tags: what stands around a call.
        special: they are special tokens.
        several: more than one call may follow another.
    """
    begin, end = (tag if special else _literal(tag) for tag in tags)
    rules = [
        f"start: call{' (BREAK call)*' if several else ''}",
        f"call: {begin} BREAK ({' | '.join(f'call_{at}' for at in range(len(tools)))}) BREAK {end}",
        r"BREAK: /\n/",
    ]
    for at, tool in enumerate(tools):
        function = tool["function"]
        # each schema is a document of its own: its references begin at its root
        schema = msgspec.json.encode(function.get("parameters") or {"type": "object"}).decode()
        name = msgspec.json.encode(function["name"]).decode()
        before = _literal('{"name": ' + name + ', "arguments": ')
        rules += [f'call_{at}: {before} arguments_{at} "}}"', f"arguments_{at}: %json {schema}"]
    return Grammar("lark", "\n".join(rules))
