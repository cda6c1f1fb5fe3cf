"""The table of all paths. Called by `application.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fdasync_http import profiling, refused
from fdasync_http.anthropic.serve import count_tokens, messages
from fdasync_http.anthropic.types import CountBody, MessagesBody
from fdasync_http.calls import served
from fdasync_http.contract import EVENTS, HTML, TEXT, Path, Query
from fdasync_http.failures import JSON
from fdasync_http.metrics import metrics
from fdasync_http.openai.chat import chat_completions
from fdasync_http.openai.completions import completions
from fdasync_http.openai.models import model, models
from fdasync_http.openai.render import render
from fdasync_http.openai.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from fdasync_http.openai.types import ChatBody, CompletionBody
from fdasync_http.pulls import serve as pulls
from fdasync_http.responses.serve import responses
from fdasync_http.responses.types import ResponsesBody
from fdasync_http.rollout.generate import MANY, ONE, RolloutBody, rollout
from fdasync_http.sglang import asked, checker, control, generate, groups, info
from fdasync_http.sight import page, sight
from fdasync_http.vllm import control as vllm
from fdasync_http.vllm import generate as vllm_generate
from fdasync_http.vllm import groups as vllm_groups

if TYPE_CHECKING:
    from fdasync_http.calls import Call
    from fdasync_http.contract import Serve

_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def _get(path: str, serve: Serve, **told: Any) -> Path:
    return Path(path, _GET, serve, **told)


def _made(
    path: str,
    serve: Serve,
    body: type[Any],
    example: dict[str, Any],
    *also: int,
    media: tuple[str, ...] = (JSON, EVENTS),
) -> Path:
    """A path that generates, or makes what generates. `also`: statuses besides; 404 where the model has to be named."""
    return Path(path, _POST, serve, body, also=also, media=media, example=example)


def _call(
    path: str,
    call: type[Call],
    *also: int,
    example: dict[str, Any] | None = None,
    methods: tuple[str, ...] = _POST,
    **told: Any,
) -> Path:
    """A path that controls the engine. `also`: statuses besides."""
    body = call if call.BODY and methods != _GET else None
    return Path(path, methods, partial(served, call), body, call, also, example=example, **told)


_SIGHT = (
    Query(
        "window_s", "seconds that rates and latencies are of",
        {"type": "number", "minimum": 5, "maximum": 600, "default": 60},
    ),
    Query("history", "with the moments of the last ten minutes", {"type": "boolean", "default": True}),
    Query("experts", "with tables of the experts that were chosen", {"type": "boolean", "default": True}),
)  # fmt: skip
_VLLM = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}

#: paths that a client of the model calls
USE: tuple[Path, ...] = (
    _made(
        "/generate", generate.generate, asked.GenerateBody,
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}, 409,
    )._replace(methods=("POST", "PUT")),
    _get("/model_info", info.model_info),
    _get("/get_model_info", info.model_info),
    _get("/server_info", info.server_info),
    _get("/get_server_info", info.server_info),
    _get("/get_weight_version", info.get_weight_version),
    _get("/weight_info", info.get_weight_version),
    _get("/health", info.health),
    _get("/ready", info.ready),
    _get("/live", info.live),
    Path("/health_generate", _BOTH, info.health_generate),
    _get("/v1/loads", control.v1_loads),
    _get("/get_load", control.get_load),
    _made(
        "/v1/rollout", rollout, RolloutBody,
        {"token_ids": [1, 2, 3], "sampling": {"max_tokens": 4, "logprobs": "raw"}, "start": 0}, 409, media=(ONE, MANY),
    ),
    _made("/v1/completions", completions, CompletionBody, {"prompt": "Hello", "max_tokens": 4}, 404, 409),
    _made("/v1/chat/completions", chat_completions, ChatBody, {**_CHAT, "max_tokens": 4}, 404, 409),
    _made("/v1/chat/completions/render", render, ChatBody, {**_CHAT, "max_tokens": 4}, 404, media=(JSON,)),
    _made("/v1/responses", responses, ResponsesBody, {"input": "Hello", "max_output_tokens": 4}, 404, 409),
    _made("/v1/messages", messages, MessagesBody, {**_CHAT, "max_tokens": 4}, 404, 409),
    _made("/v1/messages/count_tokens", count_tokens, CountBody, _CHAT, 404, media=(JSON,)),
    _get("/v1/models", models),
    _get("/v1/models/{model:path}", model, also=(404,)),
    _made("/tokenize", tokenize, TokenizeBody, {"prompt": "Hello"}, media=(JSON,)),
    _made("/detokenize", detokenize, DetokenizeBody, {"tokens": [1, 2, 3]}, media=(JSON,)),
    _made(
        "/inference/v1/generate", vllm_generate.generate, vllm_generate.GenerateBody,
        {**_VLLM, "sampling_params": {"max_tokens": 4, "logprobs": 0}}, 404, 409,
    ),
    _made("/skyrl/v1/generate", vllm_generate.skyrl_generate, vllm_generate.GenerateBody, _VLLM, 404, 409),
    _get("/is_paused", vllm.is_paused),
    _get("/is_sleeping", vllm.is_sleeping),
    _get("/get_world_size", vllm.get_world_size),
    _get("/version", vllm.server_version, needs_engine=False),
    _get("/metrics", metrics, media=(TEXT,), needs_engine=False),
    _get("/", page, media=(HTML,), needs_engine=False),
    _get("/v1/sight", sight, told=_SIGHT),
    Path("/ping", _BOTH, vllm.ping, media=(), needs_engine=False),
    _get("/liveness", vllm.ping, media=(), needs_engine=False),
    _get("/workers", vllm.workers),
    _call("/finish_session", pulls.FinishSession, needs_engine=False),
)  # fmt: skip

_FOLDER = "/weights/step_1"

#: paths that control the engine: of each verb SGLang's, then vLLM's
CONTROL: tuple[Path, ...] = (
    _call("/pause_generation", control.PauseGeneration, example={"mode": "retract"}),
    _call("/pause", vllm.Pause),
    _call("/continue_generation", control.ContinueGeneration, example={}),
    _call("/resume", vllm.Resume),
    _call("/abort_request", control.AbortRequest, example={"abort_all": True}, media=()),
    _call("/abort_requests", vllm.AbortRequests, example={"request_ids": ["a"]}),
    _call("/flush_cache", control.FlushCache, methods=_BOTH, media=(TEXT,)),
    _call("/reset_prefix_cache", vllm.ResetPrefixCache, example={}),
    _call("/release_memory_occupation", control.ReleaseMemory, 409, 501, example={"tags": ["kv_cache", "weights"]}),
    _call("/sleep", vllm.Sleep, 409, 501, example={}),
    _call("/resume_memory_occupation", control.ResumeMemory, 202, 409, example={"tags": ["weights"]}),
    _call("/wake_up", vllm.WakeUp, 202, 409, example={}),
    # an update from a folder, and, of vLLM's, of a group's tensors
    _call("/update_weights_from_disk", control.UpdateFromDisk, 409, example={"model_path": _FOLDER}),
    _call("/update_weights", vllm.UpdateWeights, 409, example={"weight_dir": _FOLDER}),
    _call("/pull_weights", pulls.PullWeights),
    _call("/fetch_weights", pulls.FetchWeights),
    _call("/collective_rpc", pulls.CollectiveRpc, 501, needs_engine=False),
    # a trainer's group, its tensors, an update in parts
    _call("/init_weights_update_group", groups.InitGroup, 409),
    _call("/init_weight_transfer_engine", vllm_groups.InitTransfer, 409, 501),
    _call("/destroy_weights_update_group", groups.DestroyGroup, 409),
    _call("/update_weights_from_distributed", groups.ReceiveWeights, 409),
    _call("/begin_weight_update", groups.BeginUpdate, 409),
    _call("/start_weight_update", vllm_groups.StartUpdate, 409),
    _call("/end_weight_update", groups.EndUpdate, 409),
    _call("/finish_weight_update", vllm_groups.FinishUpdate, 409),
    # what the weights are
    _call("/update_weight_version", control.UpdateVersion, 409, example={"new_version": "1"}),
    _call("/weights_checker", checker.CheckWeights, 409, 501, methods=_GET),
    _call("/weights_checker", checker.CheckWeights, 409, 501),
    _call("/start_profile", profiling.StartProfile, needs_engine=False),
    _call("/stop_profile", profiling.StopProfile, needs_engine=False),
    *[Path(path, refused.methods_of(path), refused.not_served) for path in refused.REASONS],
)
