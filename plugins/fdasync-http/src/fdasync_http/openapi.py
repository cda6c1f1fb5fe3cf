"""The description of the app (OpenAPI): what it serves, from its own table of paths and the types of its bodies.

The description says which statuses a path answers with; clients of fuzzers hold the app to it. Called by
`application.py`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.failures import JSON, ErrorBody

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync_http.paths import Path

# statuses of every path, beside 200
_STATUSES = {
    "400": "bad input, named", "401": "a key is needed", "403": "the admin key is needed", "404": "not there",
    "408": "the request did not arrive in time", "409": "another request or update is in the way",
    "413": "the body is too large", "429": "too many requests are live", "501": "not served here",
    "503": "the engine cannot serve now",
}  # fmt: skip


def description(paths: Iterable[Path]) -> dict[str, Any]:
    """The OpenAPI 3.1 object of these paths."""
    paths = list(paths)
    kinds = {path.body for path in paths if path.body is not None}
    ordered = sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
    schemas, components = msgspec.json.schema_components(
        [*ordered, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    of = dict(zip([*ordered, ErrorBody], schemas, strict=True))
    error = {"content": {JSON: {"schema": of[ErrorBody]}}}
    described: dict[str, dict[str, Any]] = {}
    for path in paths:
        for method in path.methods:
            words = (path.serve.__doc__ or "").strip().partition("\n")[0]
            operation: dict[str, Any] = {
                "summary": words,
                "responses": {
                    "200": {"description": "served"},
                    **{status: {"description": told, **error} for status, told in _STATUSES.items()},
                },
            }
            if path.body is not None:
                operation["requestBody"] = {"content": {JSON: {"schema": of[path.body]}}}
            name = path.path.replace(":path}", "}")
            if "{" in name:
                inner = name.partition("{")[2].partition("}")[0]
                operation["parameters"] = [
                    {"name": inner, "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            described.setdefault(name, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "fdasync", "version": version("fdasync-http")},
        "paths": described,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
