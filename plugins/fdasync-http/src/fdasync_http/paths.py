"""The table of all paths. Called by `application.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync_http import profiling, refused
from fdasync_http.anthropic.serve import count_tokens, messages
from fdasync_http.anthropic.types import CountBody, MessagesBody
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
from fdasync_http.rollout.generate import RolloutBody, rollout
from fdasync_http.sglang import asked, checker, control, generate, groups, info
from fdasync_http.sight import page, sight
from fdasync_http.vllm import control as vllm_control
from fdasync_http.vllm import generate as vllm_generate
from fdasync_http.vllm import groups as vllm_groups

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

Serve = Callable[["Request", "Front"], Awaitable["Response"]]


class Path(NamedTuple):
    """One path.

    Attributes:
        path: as clients name it.
        methods: of HTTP.
        serve: makes the answer.
        body: the type of its JSON; None: it takes none.
    """

    path: str
    methods: tuple[str, ...]
    serve: Serve
    body: type[Any] | None = None


_GET, _POST = ("GET",), ("POST",)

#: paths that a client of the model calls
USE: tuple[Path, ...] = (
    Path("/generate", ("POST", "PUT"), generate.generate, asked.GenerateBody),
    Path("/model_info", _GET, info.model_info),
    Path("/get_model_info", _GET, info.model_info),
    Path("/server_info", _GET, info.server_info),
    Path("/get_server_info", _GET, info.server_info),
    Path("/get_weight_version", _GET, info.get_weight_version),
    Path("/health", _GET, info.health),
    Path("/ready", _GET, info.ready),
    Path("/live", _GET, info.live),
    Path("/health_generate", ("GET", "POST"), info.health_generate),
    Path("/v1/loads", _GET, control.v1_loads),
    Path("/get_load", _GET, control.get_load),
    Path("/v1/rollout", _POST, rollout, RolloutBody),
    Path("/v1/completions", _POST, completions, CompletionBody),
    Path("/v1/chat/completions", _POST, chat_completions, ChatBody),
    Path("/v1/chat/completions/render", _POST, render, ChatBody),
    Path("/v1/responses", _POST, responses, ResponsesBody),
    Path("/v1/messages", _POST, messages, MessagesBody),
    Path("/v1/messages/count_tokens", _POST, count_tokens, CountBody),
    Path("/v1/models", _GET, models),
    Path("/v1/models/{model:path}", _GET, model),
    Path("/tokenize", _POST, tokenize, TokenizeBody),
    Path("/detokenize", _POST, detokenize, DetokenizeBody),
    Path("/inference/v1/generate", _POST, vllm_generate.generate, vllm_generate.GenerateBody),
    Path("/skyrl/v1/generate", _POST, vllm_generate.skyrl_generate, vllm_generate.GenerateBody),
    Path("/is_paused", _GET, vllm_control.is_paused),
    Path("/is_sleeping", _GET, vllm_control.is_sleeping),
    Path("/get_world_size", _GET, vllm_control.get_world_size),
    Path("/weight_info", _GET, vllm_control.weight_info),
    Path("/version", _GET, vllm_control.server_version),
    Path("/metrics", _GET, metrics),
    Path("/", _GET, page),
    Path("/v1/sight", _GET, sight),
    Path("/ping", ("GET", "POST"), vllm_control.ping),
    Path("/liveness", _GET, vllm_control.ping),
    Path("/workers", _GET, vllm_control.workers),
    Path("/finish_session", _POST, pulls.finish_session),
)

#: paths that control the engine
CONTROL: tuple[Path, ...] = (
    Path("/pause_generation", _POST, control.pause_generation, control.PauseBody),
    Path("/continue_generation", _POST, control.continue_generation, control.ContinueBody),
    Path("/flush_cache", ("GET", "POST"), control.flush_cache),
    Path("/abort_request", _POST, control.abort_request, control.AbortBody),
    Path("/update_weights_from_disk", _POST, control.update_weights_from_disk, control.UpdateBody),
    Path("/init_weights_update_group", _POST, groups.init_weights_update_group, groups.JoinBody),
    Path("/destroy_weights_update_group", _POST, groups.destroy_weights_update_group, groups.LeaveBody),
    Path("/update_weights_from_distributed", _POST, groups.update_weights_from_distributed, groups.ReceiveBody),
    Path("/begin_weight_update", _POST, groups.begin_weight_update, groups.BeginBody),
    Path("/end_weight_update", _POST, groups.end_weight_update, groups.EndBody),
    Path("/pull_weights", _POST, pulls.pull_weights, pulls.PullBody),
    Path("/fetch_weights", _POST, pulls.fetch_weights, pulls.FetchBody),
    Path("/collective_rpc", _POST, pulls.collective_rpc, pulls.CallBody),
    Path("/update_weight_version", _POST, control.update_weight_version, control.VersionBody),
    Path("/release_memory_occupation", _POST, control.release_memory_occupation, control.MemoryBody),
    Path("/resume_memory_occupation", _POST, control.resume_memory_occupation, control.MemoryBody),
    Path("/start_profile", _POST, profiling.start_profile, profiling.ProfileBody),
    Path("/stop_profile", _POST, profiling.stop_profile),
    Path("/pause", _POST, vllm_control.pause),
    Path("/resume", _POST, vllm_control.resume),
    Path("/sleep", _POST, vllm_control.sleep, vllm_control.SleepBody),
    Path("/wake_up", _POST, vllm_control.wake_up, vllm_control.WakeBody),
    Path("/abort_requests", _POST, vllm_control.abort_requests, vllm_control.AbortBody),
    Path("/reset_prefix_cache", _POST, vllm_control.reset_prefix_cache, vllm_control.ResetBody),
    Path("/init_weight_transfer_engine", _POST, vllm_groups.init_weight_transfer_engine, vllm_groups.InitBody),
    Path("/start_weight_update", _POST, vllm_groups.start_weight_update, vllm_groups.StartBody),
    Path("/finish_weight_update", _POST, vllm_groups.finish_weight_update, vllm_groups.FinishBody),
    Path("/update_weights", _POST, vllm_control.update_weights, vllm_control.UpdateBody),
    Path("/weights_checker", _GET, checker.weights_checker),
    Path("/weights_checker", _POST, checker.weights_checker, checker.CheckBody),
    *[Path(path, refused.methods_of(path), refused.not_served) for path in refused.REASONS],
)
