"""The description of the app (OpenAPI): what it serves, from its own table of paths and the types of its bodies.

The description says which statuses and media types a path answers with; fuzzers hold the app to it. Called by
`application.py`; `docs_page.py` shows it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.anthropic.envelope import MessagesError
from fdasync_http.anthropic.serve import PATHS as MESSAGES
from fdasync_http.calls import UpdateCall, Updated
from fdasync_http.contract import EVENTS, HTML, MEANINGS, TEXT, words_of
from fdasync_http.failures import JSON, ErrorBody
from fdasync_http.refused import REASONS
from fdasync_http.sglang.checker import CheckWeights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync_http.contract import Path

_RETRY = {"retry-after": {"description": "seconds until the next try", "schema": {"type": "string"}}}


def description(use: Iterable[Path], control: Iterable[Path] = ()) -> dict[str, Any]:
    """The OpenAPI 3.1 object of these paths.

    Args:
        use: paths of clients.
        control: paths that may ask for the admin key.
    """
    listed = [*((path, False) for path in use), *((path, True) for path in control)]
    schemas, components = _schemas({path.body for path, _ in listed if path.body is not None})
    described: dict[str, dict[str, Any]] = {}
    for path, controls in listed:
        operation = _operation(path, path.statuses(controls=controls), schemas)
        for method in path.methods:
            described.setdefault(path.path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fdasync",
            "version": version("fdasync-http"),
            "description": "Paths of SGLang, vLLM, SkyRL, OpenAI, Anthropic and our own, over one engine or a router.",
        },
        "paths": described,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _schemas(kinds: set[type[Any]]) -> tuple[dict[type[Any], Any], dict[str, Any]]:
    """Schemas of types, and the components that they refer to; with the words of the types' docstrings."""
    ordered: list[type[Any]] = [
        *sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"),
        ErrorBody,
        MessagesError,
        Updated,
    ]
    made, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for component in components.values():
        about, fields = words_of(component.get("description", ""))
        component["description"] = about
        for name, words in fields.items():
            if name in component.get("properties", {}):
                # beside a reference too, which OpenAPI 3.1 allows
                component["properties"][name]["description"] = words
    return dict(zip(ordered, made, strict=True)), components


def _operation(path: Path, statuses: tuple[int, ...], schemas: dict[type[Any], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": _summary(path),
        "description": path.about,
        "responses": {str(status): _response(path, status, schemas) for status in statuses},
    }
    if path.body is not None:
        schema = schemas[path.body]
        content = {"schema": schema} if path.example is None else {"schema": schema, "example": path.example}
        # an empty body counts as {}
        needed = any(field.required for field in msgspec.structs.fields(path.body))
        operation["requestBody"] = {"required": needed, "content": {JSON: content}}
    parameters: list[dict[str, Any]] = [
        {"name": one.name, "in": "query", "description": one.about, "schema": one.schema} for one in path.queries
    ]
    if "{" in path.path:
        name = path.path.partition("{")[2].partition(":")[0]
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _summary(path: Path) -> str:
    """The first sentence, without the path that it begins with."""
    if path.path in REASONS:
        return "Refused, with the path to use instead."
    line = " ".join(path.about.partition("\n\n")[0].split())
    told = line.partition(": ")[2] if line.startswith("`") and ": " in line else line
    first = told.partition(". ")[0].rstrip(".")
    return f"{first[:1].upper()}{first[1:]}."


def _response(path: Path, status: int, schemas: dict[type[Any], Any]) -> dict[str, Any]:
    if status in (200, 202):
        content = {media: {"schema": _body_of(media, path)} for media in path.media}
        return {"description": MEANINGS[status], **({"content": content} if content else {})}
    schema = schemas[MessagesError if path.path in MESSAGES else ErrorBody]
    # trainers read these fields where an update is refused
    if path.call is not None and issubclass(path.call, UpdateCall | CheckWeights):
        schema = {"anyOf": [schema, schemas[Updated]]}
    answer: dict[str, Any] = {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
    if status == 429:
        answer["headers"] = _RETRY
    return answer


def _body_of(media: str, path: Path) -> dict[str, Any]:
    """The schema of a body that is served."""
    if media == JSON:
        # SGLang's older path for loads is a list, and so is the answer to a list of prompts
        kinds = {"/get_load": "array", "/generate": ["object", "array"]}
        return {"type": kinds.get(path.path, "object")}
    if media == EVENTS:
        # each is JSON, but for the last one, "[DONE]"
        return {}
    if media in (HTML, TEXT):
        return {"type": "string"}
    return {"type": "string", "contentMediaType": media}
