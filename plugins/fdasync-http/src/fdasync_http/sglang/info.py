"""SGLang's paths that tell what a server is and whether it works. Called by `application.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync import SamplingParams
from fdasync.errors import FdasyncError
from fdasync_http.calls import reply
from fdasync_http.failures import Refused
from fdasync_http.replies import whole

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Load
    from fdasync_http.front import Front


async def model_info(_request: Request, front: Front) -> Response:
    """`GET /model_info`, `/get_model_info`: what the model is."""
    facts = front.generator.facts()
    return reply(
        {
            "model_path": facts.model_path or front.model,
            "tokenizer_path": facts.model_path if facts.tokenizer else "",
            "is_generation": True,
            "weight_version": facts.weight_version,
            "max_context_length": facts.max_context_tokens,
            "vocab_size": facts.vocab_size,
        }
    )


async def server_info(request: Request, front: Front) -> Response:
    """`GET /server_info`, `/get_server_info`: SGLang's names for what this server knows of itself."""
    host, port = _called(request)
    facts, load = front.generator.facts(), front.generator.load()
    return reply(
        {
            "model_path": facts.model_path or front.model,
            "tokenizer_path": facts.model_path if facts.tokenizer else "",
            "served_model_name": front.model,
            "host": host,
            "port": port,
            "context_length": facts.max_context_tokens,
            "weight_version": facts.weight_version,
            "dtype": facts.dtype or "auto",
            # what a client counts as ranks of its groups: on a router all instances are one to it
            "tp_size": facts.tensor_parallel or 1,
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "moe_dp_size": 1,
            "nnodes": 1,
            "node_rank": 0,
            "base_gpu_id": 0,
            "gpu_id_step": 1,
            "num_gpus": facts.num_instances * (facts.tensor_parallel or 1),
            "disaggregation_mode": "null",
            "disaggregation_bootstrap_port": None,
            "encoder_only": False,
            "enable_metrics": True,
            "load_balance_method": "round_robin",
            "prefill_round_robin_balance": False,
            "enable_memory_saver": facts.can_sleep and front.config.memory_saver == "auto",
            "enable_return_routed_experts": facts.captures_routing,
            # by path: fields that clients sent and that change nothing here, and how often they came
            "ignored_fields": front.ignored,
            "internal_states": [{"num_running_reqs": load.running, "num_waiting_reqs": load.waiting}],
        }
    )


def _called(request: Request) -> tuple[str, int | None]:
    """The host and port that the client calls this server by, with which it compares them: as its Host header has them
    (an address of IPv6 in brackets), or where it found it."""
    host, colon, port = request.headers.get("host", "").rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.endswith("]")):
        return host, int(port)
    found: tuple[str, int | None] = request.scope.get("server") or ("", None)
    named = request.headers.get("host", "")
    return named or found[0], found[1]


async def get_weight_version(_request: Request, front: Front) -> Response:
    """`GET /get_weight_version`, `/weight_info`: the version of the weights in use."""
    return reply({"weight_version": front.generator.facts().weight_version})


# what a request that comes now waits for
_WAITS = {
    "paused": "it is paused",
    "waits_for_weights": "it waits for weights: an update has to bring them",
    "broken": "its weights are broken, and an update has to mend them",
    "updating": "weights are being updated",
    "asleep": "it is asleep until a wake",
    "waking": "it takes its memory back",
}


def _check_health(front: Front) -> Load:
    """Raise what makes requests fail; returns the load."""
    front.update.check()
    # raises where a router has no instance any more
    front.generator.facts()
    load = front.generator.load()
    if load.doing == "broken":
        raise _waiting(load)
    instances = load.instances
    if instances and not any(one.is_up and not one.problem for one in instances):
        problems = [f"{one.name}: {one.problem}" for one in instances if one.problem]
        raise Refused(503, "; ".join(["no instance is up", *problems]), code="unhealthy")
    return load


def _waiting(load: Load) -> Refused:
    """The answer while no steps are planned; its code is the word for what the engine does."""
    up = [one for one in load.instances if one.is_up]
    each = [f"{one.name or one.address}: {', '.join(filter(None, [one.doing, one.problem]))}" for one in up]
    return Refused(503, "; ".join([_WAITS[load.doing], *each]), code=load.doing)


async def health(_request: Request, front: Front) -> Response:
    """`GET /health`: 200 while requests can be made, also where they wait; `doing` says for what."""
    return reply({"status": "ok", "doing": _check_health(front).doing})


async def live(_request: Request, front: Front) -> Response:
    """`GET /live`: 200 unless a restart is the only way out: the loop turns, and the engine or router has not failed.

    A front whose instances are all away is alive: they may come back, and a restart of the front brings none of them.
    """
    try:
        front.generator.load()
    except FdasyncError as error:
        raise Refused(503, str(error), code="failed") from error
    return reply({"status": "ok"})


async def ready(_request: Request, front: Front) -> Response:
    """`GET /ready`: 200 while a request that came now would be computed: instances have joined with their weights, and
    nothing drains, is paused, asleep, or being updated. The code of the error is the word for it."""
    if front.is_draining():
        raise Refused(503, "the server drains, and ends", code="draining")
    load = front.generator.load()
    if load.doing != "running":
        raise _waiting(load)
    _check_health(front)
    return reply({"status": "ok", "doing": load.doing})


async def health_generate(request: Request, front: Front) -> Response:
    """`GET /health_generate`: 200 once a token was generated within `health_s`. An engine that waits for a call to go
    on is healthy: `status` says what it does."""
    load = _check_health(front)
    if load.doing != "running":
        return reply({"status": load.doing})

    async def work() -> Response:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        limit_s = front.config.health_s
        result = await front.generator.complete([0], params, deadline_s=limit_s, routing=False, aux=False)
        if result.finish_reason == "deadline":
            raise Refused(503, f"no token was generated within {limit_s:g} s", code="unhealthy")
        return reply({"status": "ok"})

    return await whole(request, work())
