"""`GET /docs`: one page of HTML that shows the description of the app. It names no other host and runs no script.

Called by `application.py`.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

#: of the answer: the page loads nothing
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left;"
    "vertical-align:top}pre{background:#f4f4f4;padding:.6em;overflow-x:auto}h2{margin-top:2em}"
    "section{border-top:1px solid #ddd}"
)


def page(told: dict[str, Any]) -> bytes:
    """The page, in UTF-8.

    Args:
        told: as `openapi.description` makes it.
    """
    schemas = told["components"]["schemas"]
    operations = [
        (name, method.upper(), operation) for name, methods in told["paths"].items()
        for method, operation in methods.items()
    ]  # fmt: skip
    rows = [
        (f'<a href="#{escape(method + name)}">{method} {escape(name)}</a>', escape(operation["summary"]))
        for name, method, operation in operations
    ]
    info = told["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p>Where the server has a key, every path asks for <code>Authorization: Bearer KEY</code> or "
        "<code>x-api-key: KEY</code>. "
        'The same description for programs: <a href="openapi.json">openapi.json</a>.</p>',
        _table(("path", "what it does"), rows),
        *[_section(*one, schemas) for one in operations],
        "<h2>Objects</h2>",
        *[_object(name, schema) for name, schema in schemas.items()],
        "</body></html>\n",
    ]
    return "".join(parts).encode()


def _section(name: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    head = f"{method} {escape(name)}"
    parts = [f'<section id="{escape(method + name)}"><h2>{head}</h2><p>{escape(operation["description"])}</p>']
    parameters = operation.get("parameters", ())
    if parameters:
        given = [
            (f"<code>{escape(one['name'])}</code>", one["in"], _type(one["schema"]), escape(one.get("description", "")))
            for one in parameters
        ]
        parts.append(_table(("parameter", "in", "type", ""), given))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body ({escape(media)}): {_type(content['schema'])}</p>")
        if "example" in content:
            parts.append(f"<pre>{escape(json.dumps(content['example']))}</pre>")
        name_of = content["schema"]["$ref"].rpartition("/")[2]
        parts.append(_fields(schemas[name_of]))
    rows = [
        (status, escape(", ".join(answer.get("content", {})) or "no body"), escape(answer["description"]))
        for status, answer in operation["responses"].items()
    ]
    return "".join([*parts, _table(("status", "media type", ""), rows), "</section>"])


def _object(name: str, schema: dict[str, Any]) -> str:
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema["description"])}</p>{_fields(schema)}'


def _fields(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(name)}</code>", _type(one),
            "needed" if name in needed else escape(json.dumps(one.get("default"))),
            escape(one.get("description", "")),
        )
        for name, one in schema.get("properties", {}).items()
    ]  # fmt: skip
    return _table(("field", "type", "default", ""), rows)


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "enum" in schema:
        return escape(" | ".join(json.dumps(value) for value in schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"])
    kind = escape(str(schema.get("type", "any")))
    if "items" in schema:
        return f"{kind} of ({_type(schema['items'])})"
    return kind


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join([f"<th>{one}</th>" for one in heads])
    body = "".join([f"<tr>{''.join([f'<td>{cell}</td>' for cell in row])}</tr>" for row in rows])
    return f"<table><tr>{head}</tr>{body}</table>"
