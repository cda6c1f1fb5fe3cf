"""Paths of other servers that are refused here: the answer names the reason and the safe path.

Pickled tensors run code of their sender (CVE-2025-10164 and its bypass). Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

_DISK = "send a checkpoint folder to /update_weights_from_disk (SGLang) or /update_weights with weight_dir (vLLM)"
_PICKLE = f"tensors in a pickle run their sender's code and are never read here; {_DISK}"
_BROADCASTER = (
    "prime-rl's broadcaster sends the names of tensors as a pickle, which runs its sender's code; join a group of"
    f" torch.distributed by /init_weights_update_group, or {_DISK}"
)
_LOOK = (
    "weights are not read out: no runner gives tensors back by name; /weights_checker tells the fingerprint of all of"
    " them, and expected_weights_id of an update compares it"
)
_CHECK = "ask /weights_checker (SGLang), which tells the fingerprint of all weights and compares it"
_LORA = "LoRA adapters are not served; merge the adapter into a checkpoint and update from disk"

#: why a path is not served, and what is
REASONS = {
    "/update_weights_from_tensor": _PICKLE,
    "/update_weights_from_ipc": _PICKLE,
    "/load_lora_adapter_from_tensors": _PICKLE,
    "/init_broadcaster": _BROADCASTER,
    "/start_draft_weight_update": "draft models are not served; the model's own prediction layers are updated with it",
    "/weight_checker": _CHECK,
    "/get_weights_by_name": _LOOK,
    "/load_lora_adapter": _LORA,
    "/unload_lora_adapter": _LORA,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
}


def methods_of(path: str) -> tuple[str, ...]:
    """The HTTP methods with which the server meant takes the path."""
    return ("GET", "POST") if path == "/get_weights_by_name" else ("POST",)


async def not_served(request: Request, _front: Front) -> Response:
    """The answer of every such path: 501, and the header by which OpenAI's client does not repeat it."""
    # mounted apps see the path behind their mount point
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    raise Refused(501, REASONS[path], code="not_served")
