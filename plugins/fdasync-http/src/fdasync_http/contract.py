"""What each path answers with: statuses, media types, parameters of the query, and a body that is right.

`paths.py` says which paths there are, the types of bodies say which fields they have; this module has the rest of the
description. A path that is not named here has what its group has. Pure. Called by `openapi.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync_http.failures import JSON
from fdasync_http.refused import REASONS
from fdasync_http.rollout.generate import MANY, ONE

if TYPE_CHECKING:
    from fdasync_http.paths import Path

HTML, TEXT = "text/html", "text/plain"
EVENTS = "text/event-stream"

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
_CONTROL = (403,)
_BODY = (413,)
_ENGINE = (503,)

_UPDATES = (
    "/update_weights_from_disk", "/update_weight_version", "/update_weights", "/init_weights_update_group",
    "/destroy_weights_update_group", "/update_weights_from_distributed", "/begin_weight_update", "/end_weight_update",
    "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/weights_checker",
)  # fmt: skip
_PULLS = ("/pull_weights", "/fetch_weights")
_PAUSES = ("/pause", "/resume", "/pause_generation", "/continue_generation")
_SLEEPS = ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")
# refused where the memory cannot be released; calls of workers but SkyRL's two; `reset_tensors`; vLLM's own groups
_IN_PART = (
    "/sleep", "/release_memory_occupation", "/collective_rpc", "/weights_checker", "/init_weight_transfer_engine",
)  # fmt: skip
_WAKES = ("/wake_up", "/resume_memory_occupation")
_GENERATES = (
    "/generate", "/v1/rollout", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/inference/v1/generate", "/skyrl/v1/generate",
)  # fmt: skip
_NAMES_A_MODEL = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/inference/v1/generate", "/skyrl/v1/generate", "/v1/models/{model:path}",
)  # fmt: skip
_NEEDS_NO_ENGINE = (
    "/ping", "/liveness", "/version", "/metrics", "/start_profile", "/stop_profile", "/openapi.json", "/docs", "/",
    "/collective_rpc", "/finish_session",
)  # fmt: skip

# of the answer 200; (): it has no body
_MEDIA: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_GENERATES, (JSON, EVENTS)),
    "/v1/rollout": (ONE, MANY),
    "/flush_cache": (TEXT,),
    "/metrics": (TEXT,),
    "/docs": (HTML,),
    "/": (HTML,),
    "/ping": (),
    "/liveness": (),
    "/abort_request": (),
}


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


# values of a flag, in any case
_FLAG = {"type": "string", "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|0|1|)$"}
_QUERIES = {
    "/v1/sight": (
        Query(
            "window_s", "seconds that rates and latencies are of",
            {"type": "number", "minimum": 5, "maximum": 600, "default": 60},
        ),
        Query("history", "with the moments of the last ten minutes", {"type": "boolean", "default": True}),
        Query("experts", "with tables of the experts that were chosen", {"type": "boolean", "default": True}),
    ),
    "/pause": (
        Query(
            "mode", "what becomes of requests that run",
            {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
        ),
        Query("clear_cache", "cached blocks are forgotten", {**_FLAG, "default": "true"}),
    ),
    "/sleep": (
        Query("level", "how deep: 2 drops the weights", {"type": "string", "enum": ["0", "1", "2"], "default": "1"}),
        Query(
            "mode", "what becomes of requests that run",
            {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
        ),
    ),
    "/wake_up": (
        Query(
            "tags", "the parts to take back, repeated; left out: all",
            {"type": "array", "items": {"type": "string", "enum": ["weights", "kv_cache", "cuda_graph", "scheduling"]}},
        ),
    ),
    "/finish_session": (
        Query("session_id", "name of the conversation; it may not be left out", {"type": "string", "minLength": 1}),
    ),
    "/flush_cache": (
        Query("timeout", "not looked at: it never waits, and is asked again", {"type": "string"}),
    ),
    "/reset_prefix_cache": (
        Query(
            "reset_running_requests", "requests that run go back to the queue first, so that theirs are forgotten too",
            {**_FLAG, "default": "false"},
        ),
    ),
}  # fmt: skip

#: one line for paths whose docstrings have none
SUMMARIES = {
    "/generate": "SGLang's: tokens or text in; text, ids, log-probs and expert rows out, whole or as events.",
    "/inference/v1/generate": "vLLM's: tokens in; tokens, log-probs and expert rows out, whole or as events.",
    "/skyrl/v1/generate": "SkyRL's: as /inference/v1/generate, with rows in the form that SkyRL reads.",
    "/v1/rollout": "A prompt in; a safetensors file of token ids, log-probs and expert rows out for each sample.",
    "/v1/completions": "OpenAI's completions, whole or as events.",
    "/v1/chat/completions": "OpenAI's chats, whole or as events.",
    "/v1/chat/completions/render": "vLLM's: a chat as the body of /inference/v1/generate that would answer it.",
    "/v1/responses": "OpenAI's Responses, whole or as events.",
    "/v1/messages": "Anthropic's Messages, whole or as events.",
    "/v1/messages/count_tokens": "How many tokens a conversation of Anthropic's has.",
    "/v1/models": "The model that is served.",
    "/v1/models/{model:path}": "The same, by its name.",
    "/tokenize": "Tokens of a text or of a chat.",
    "/detokenize": "Text of tokens.",
    "/model_info": "What the model is.",
    "/get_model_info": "What the model is.",
    "/get_weight_version": "The version of the weights in use.",
    "/weight_info": "The version of the weights in use.",
    "/is_sleeping": "Whether the engine sleeps.",
    "/release_memory_occupation": "The device's memory is released; weights are kept in host memory.",
    "/resume_memory_occupation": "The device's memory is taken back, and the engine goes on.",
    "/sleep": "The device's memory is released.",
    "/wake_up": "The device's memory is taken back, and the engine goes on.",
    "/is_paused": "Whether the engine is paused.",
    "/version": "The version of this server.",
    "/metrics": "Figures for Prometheus.",
    "/continue_generation": "The engine goes on after a pause; also where it was not paused.",
    "/pause": "The engine pauses.",
    "/resume": "The engine goes on after a pause; also where it was not paused.",
    "/abort_requests": "Requests end with what they have; without names all do.",
    "/reset_prefix_cache": "Cached blocks are forgotten.",
}

_CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": 0}},
    "/skyrl/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
    "/v1/rollout": {"token_ids": [1, 2, 3], "sampling": {"max_tokens": 4, "logprobs": "raw"}, "start": 0},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {**_CHAT, "max_tokens": 4},
    "/v1/chat/completions/render": {**_CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {**_CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": _CHAT,
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/pause_generation": {"mode": "retract"},
    "/continue_generation": {},
    "/abort_request": {"abort_all": True},
    "/update_weights_from_disk": {"model_path": "/weights/step_1"},
    "/update_weight_version": {"new_version": "1"},
    "/abort_requests": {"request_ids": ["a"]},
    "/release_memory_occupation": {"tags": ["kv_cache", "weights"]},
    "/resume_memory_occupation": {"tags": ["weights"]},
    "/sleep": {},
    "/wake_up": {},
    "/reset_prefix_cache": {},
    "/update_weights": {"weight_dir": "/weights/step_1"},
}


def query_of(path: Path) -> tuple[str, ...] | None:
    """The only keys that the query of a path may have; None: other keys are ignored. Paths of weights, memory, pauses
    and SGLang's flush allow no other: a misspelt key would mean all that is there."""
    strict = path.path in (*_UPDATES, *_SLEEPS, *_PULLS, *_PAUSES, "/flush_cache")
    return tuple([query.name for query in _QUERIES.get(path.path, ())]) if strict else None


class Contract(NamedTuple):
    """The contract of one path.

    Attributes:
        statuses: with which it answers.
        media: types of the body of status 200; (): it has none.
        queries: parameters of the query.
        example: a body that is right; None: it takes none, or none is known.
    """

    statuses: tuple[int, ...]
    media: tuple[str, ...]
    queries: tuple[Query, ...]
    example: dict[str, Any] | None


def contract_of(path: Path, *, controls: bool) -> Contract:
    """What a path answers with.

    Args:
        controls: it may ask for the admin key.
    """
    name = path.path
    refused = name in REASONS
    statuses = {*_EVERY, *((501,) if refused else (200,)), *(_CONTROL if controls else ())}
    if path.body is not None:
        statuses.update(_BODY)
    if not refused and name not in _NEEDS_NO_ENGINE:
        statuses.update(_ENGINE)
    if name in (*_UPDATES, *_GENERATES, *_SLEEPS):
        statuses.add(409)
    if name in _WAKES:
        statuses.add(202)
    if name in _IN_PART:
        statuses.add(501)
    if name in _NAMES_A_MODEL:
        statuses.add(404)
    media, queries = _MEDIA.get(name, (JSON,)), _QUERIES.get(name, ())
    return Contract(tuple(sorted(statuses)), media, queries, _EXAMPLES.get(name))
