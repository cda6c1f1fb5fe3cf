"""The configuration of the `transformers` runner, its checks, and the choices that follow from it.

Knows the library's names of things; knows no steps. Used by `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from fdasync.errors import ConfigError
from fdasync.registry.mapping import check
from fdasync_transformers.execution.graphs import decode_rows
from fdasync_transformers.execution.mixed_graphs import token_ladder
from fdasync_transformers.fixed.refusals import FIXED_DTYPES, refuse_settings
from fdasync_transformers.model.moe_layers import GROUPED_NBYTES, fits_grouped_product
from fdasync_transformers.parallel.device_group import Way

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.model.moe_layers import MoELayers

# most bytes of expert weights that one product may gather on a GPU, in dtypes without a grouped product there
_MAX_GATHERED_NBYTES = 16 << 30
# most gathered bytes in a step with a graph, which keeps their memory
_MOST_KEPT_NBYTES = 1 << 30


class TransformersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the `transformers` runner.

    Attributes:
        dtype: of weights and KV; "auto" is the checkpoint's own. "float64" is for tests of toy models on CPUs: sums in
            another order give the same tokens.
        weights: "random" draws weights on the device and reads none: the folder then needs only a config. For
            benchmarks.
        device: "auto" is a GPU, else the CPU; or any torch device name.
        instance, instances: this runner's number, of so many runners that start on this machine together. With "auto"
            they take the GPUs in turn; runners on one device share its free memory evenly. A rank of a group takes
            the first GPU that its process sees: the engine chose it.
        logits_dtype: the dtype that sampling and log-probs work in.
        num_threads: of torch in the runner's process. None: on a CPU device one fewer than there are cores (the
            engine's loop needs one, and torch's threads wait for the slowest of them), on a GPU torch's own number.
        experts: their implementation. "fused": kernels of our own, where a family's experts are proven to be what
            they compute. "auto": these on GPUs; elsewhere, and for other families, the library's default, but
            "batched_mm" on GPUs in other dtypes than bfloat16, where the default waits for the device. Widths that are
            no multiples of 16 bytes, and float64, which the default does not take: "batched_mm" on GPUs, "eager" on
            CPUs.
        quantised_weights: of a quantised checkpoint. "dequantised": weights become plain ones while they are read.
            "stored": the experts' weights stay on the GPU as they are, FP8 in blocks of 128 x 128 or MXFP4, and the
            fused experts read them so and compute in bfloat16. "stored_linears": and so do the linear layers of FP8
            checkpoints, except layers that a rank would cut within a block: less memory, and steps of more than 16 rows
            take longer. Where that cannot be the start is refused.
        kv_cache_nbytes: memory for KV when `num_blocks` is None; None takes a share of the free memory.
        latent_mla: page the latents of MLA layers instead of the expanded keys and values.
        self_check: compare a mixed paged batch with the plain model at start-up, and refuse if they differ.
        kernels: of attention: "triton" on GPUs, "torch" on CPUs; "auto" chooses. Triton on a CPU (its interpreter, for
            tests) is very slow.
        fused_router: where kernels run, route by two of them, the product and the choice, if a router is proven to do
            what they do.
        fused_layers: compute norms, rotary embeddings, activations and known decoder layers by single kernels, each
            proven at start-up; None: on GPUs.
        cuda_graphs: replay decode steps from CUDA graphs.
        graph_sizes: rows of decode steps to capture, rising: a sequence has one, and one for each draft; None: a ladder
            up to the most that can run.
        graph_tokens: tokens of steps with prompts to capture, rising; None: powers of two from 16, where decodes are
            fewer, multiples of 256 up to 2,048 and of 1,024 up to 8,192, at most `max_step_tokens`; (): none.
        collectives: how ranks on GPUs sum. "peers": in each other's memory; "nccl": by NCCL, which needs no access to
            it, at more launches a sum; "auto": by NCCL where one GPU has no access to another's memory. The bits are
            the same. On CPUs ranks sum in shared memory, and the others are refused.
        ranks_share_gpu: several ranks may have one GPU, which then gives each a while at a time: for tests.
        mtp: load the checkpoint's multi-token prediction layers, and keep their KV. They draft tokens for sequences
            without drafts of the host, as many as `RunnerLimits.speculation`. Sums must be whole (`sum_slices=1`).
        sleep: weights and blocks lie where a GPU's memory can be released (`Engine.sleep`). CPUs need no such choice.
        aux: data that each step records for every token beside the routing, and that lives with its KV block as the
            routing does (`Sample.aux`): names of plugins under `fdasync.aux`. Three come along. "routing_weights": the
            router's weights of the chosen experts, float16, slot for slot beside the ids. "layer_norms": the norm of
            each decoder layer's output, float32. "final_hidden": what the head gets of each token, its bytes: log-probs
            of prompts then cost the head alone over a prefix hit. A result has it only where the request names it.
        processors: names of logits processors that requests may ask for (`SamplingParams.processors`), of plugins under
            `fdasync.processors`. With fixed numerics they are refused: nothing holds a plugin's bits to its row.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    weights: Literal["checkpoint", "random"] = "checkpoint"
    device: str = "auto"
    instance: Annotated[int, Meta(ge=0)] = 0
    instances: int = 1
    logits_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    experts: Literal["auto", "fused", "eager", "grouped_mm", "batched_mm"] = "auto"
    quantised_weights: Literal["dequantised", "stored", "stored_linears"] = "dequantised"
    kv_cache_nbytes: int | None = None
    latent_mla: bool = True
    collectives: Way = "auto"
    ranks_share_gpu: bool = False
    mtp: bool = False
    sleep: bool = False
    self_check: bool = True
    kernels: Literal["auto", "triton", "torch"] = "auto"
    fused_router: bool = True
    fused_layers: bool | None = None
    cuda_graphs: bool = True
    graph_sizes: tuple[int, ...] | None = None
    graph_tokens: tuple[int, ...] | None = None
    aux: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()


def check_config(config: TransformersConfig, limits: RunnerLimits) -> None:
    """Raise ConfigError naming the first key that makes no sense."""
    check(config, error=ConfigError, root="runner_config")
    if len(set(config.processors)) < len(config.processors):
        raise ConfigError("runner_config.processors", f"{list(config.processors)} names one twice")
    if config.processors and limits.numerics == "fixed":
        problem = "are refused with fixed numerics: nothing holds a plugin's bits to its row"
        raise ConfigError("runner_config.processors", problem, hint='leave them out, or use numerics="default"')
    sizes = config.graph_sizes
    if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1):
        raise ConfigError(
            "runner_config.graph_sizes", f"{list(sizes)} are not rising batch sizes", hint="such as 1, 8, 64"
        )
    if sizes is not None and sizes[-1] > decode_rows(limits):
        raise ConfigError("runner_config.graph_sizes", f"{sizes[-1]} never run at once", limit=decode_rows(limits))
    tokens = config.graph_tokens
    if tokens and (list(tokens) != sorted(set(tokens)) or tokens[0] < 2 or tokens[-1] > limits.max_step_tokens):
        raise ConfigError(
            "runner_config.graph_tokens",
            f"{list(tokens)} are not rising numbers of tokens",
            limit=limits.max_step_tokens,
        )
    if config.instance >= config.instances:
        raise ConfigError(
            "runner_config.instance", f"{config.instance} is none of {config.instances}", hint="they count from 0"
        )
    if config.mtp and limits.sum_slices > 1:
        problem = f"multi-token prediction layers have no sums of {limits.sum_slices} slices yet"
        raise ConfigError("runner_config.mtp", problem, hint="leave it out, or use sum_slices=1")


def device_of(config: TransformersConfig, limits: RunnerLimits) -> torch.device:
    """The configured device. Raises ConfigError where it cannot be used."""
    name = config.device
    if name == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = config.instance if limits.tensor_parallel == 1 else 0
        return torch.device("cuda", number % count) if count else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("runner_config.device", f"{name!r} cannot be used: {error}") from error
    if device.type == "meta":
        raise ConfigError("runner_config.device", "'meta' holds no data")
    return device


def memory_share(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> float:
    """This process's share of the device's memory, among the runners that start together and their ranks."""
    if device.type == "cuda" and limits.tensor_parallel > 1:
        # a group has its GPUs for itself
        return 1.0
    if device.type == "cuda" and config.device == "auto":
        return 1 / len(range(device.index, config.instances, torch.cuda.device_count()))
    return 1 / (config.instances * limits.tensor_parallel)


def check_device(config: TransformersConfig, device: torch.device) -> None:
    """Raise ConfigError naming the first key that asks for what this device cannot do."""
    if config.collectives != "auto" and device.type != "cuda":
        problem = f"{config.collectives!r} sums on GPUs, and ranks on {device} sum in shared memory"
        raise ConfigError("runner_config.collectives", problem, hint="leave it out")
    fuses_experts(config, device)
    fuses_layers(config, device)
    if config.dtype == "float64" and uses_kernels(config, device):
        raise ConfigError("runner_config.dtype", "float64 has no kernels", hint='use "float32", or the CPU')


def check_numerics(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> None:
    """Raise ConfigError where fixed numerics are asked for, and a setting (of torch too) does not have them."""
    if limits.numerics != "fixed":
        return
    refuse_settings(device, ConfigError)
    if limits.sum_slices % limits.tensor_parallel:
        problem = f"fixed numerics over {limits.tensor_parallel} ranks, and sums of {limits.sum_slices} slices"
        raise ConfigError("sum_slices", problem, hint="a multiple of the ranks: 2 or 4")
    if not config.self_check:
        raise ConfigError(
            "runner_config.self_check", "fixed numerics are proven by it at each start", hint="leave it on"
        )
    if config.dtype == "float64":
        raise ConfigError("runner_config.dtype", "float64 has no fixed numerics", limit=", ".join(FIXED_DTYPES))
    on_cpu = device.type == "cpu"
    if on_cpu and uses_kernels(config, device):
        problem = "has no fixed numerics on a CPU: the interpreter's products change with their shape"
        raise ConfigError("runner_config.kernels", f"{config.kernels!r} {problem}", hint='use "auto"')
    if not on_cpu:
        for name, value in (("fused_layers", config.fused_layers), ("fused_router", config.fused_router)):
            if value is False:
                raise ConfigError(
                    f"runner_config.{name}", "False gives other bits than a trainer's", hint="leave it out"
                )
    allowed = ("auto", "eager") if on_cpu else ("auto", "fused")
    if config.experts not in allowed:
        raise ConfigError(
            "runner_config.experts", f"{config.experts!r} has no fixed numerics on {device}", limit=", ".join(allowed)
        )


def uses_kernels(config: TransformersConfig, device: torch.device) -> bool:
    """Whether steps run by kernels: on GPUs, or where the configuration says so."""
    return device.type == "cuda" if config.kernels == "auto" else config.kernels == "triton"


def fuses_experts(config: TransformersConfig, device: torch.device) -> bool:
    """Whether the fused experts are to be tried. Raises ConfigError where they are asked for and cannot run."""
    if config.experts == "fused" and not uses_kernels(config, device):
        raise ConfigError("runner_config.experts", f'"fused" needs kernels, which {device} has not', hint='use "auto"')
    stored = config.quantised_weights != "dequantised"
    return stored or config.experts == "fused" or (config.experts == "auto" and device.type == "cuda")


def fuses_layers(config: TransformersConfig, device: torch.device) -> bool:
    """Whether norms, rotary embeddings, activations and layers are to be fused. Raises ConfigError as above."""
    if config.fused_layers and not uses_kernels(config, device):
        raise ConfigError("runner_config.fused_layers", f"needs kernels, which {device} has not", hint="leave it out")
    return device.type == "cuda" if config.fused_layers is None else config.fused_layers


def set_experts(model: PreTrainedModel, experts: str, layers: MoELayers | None, max_step_tokens: int) -> None:
    """Choose the library's implementation of the experts in `layers`. Raises ConfigError."""
    if experts == "grouped_mm" and model.dtype == torch.float64:
        raise ConfigError("runner_config.experts", "'grouped_mm' has no float64", hint='use "eager"')
    fits = fits_grouped(model, layers) and model.dtype != torch.float64
    if experts == "grouped_mm" and not fits:
        raise ConfigError(
            "runner_config.experts",
            f"'grouped_mm' takes widths that are multiples of {GROUPED_NBYTES} bytes, as this model's are not",
            hint='use "eager"',
        )
    if experts == "auto":
        # torch's grouped product of other dtypes reads the group sizes back
        if fits and (model.device.type != "cuda" or model.dtype == torch.bfloat16):
            return
        experts = "batched_mm" if model.device.type == "cuda" else "eager"
        gathered = _gathered_nbytes(model, layers, max_step_tokens)
        if experts == "batched_mm" and gathered > _MAX_GATHERED_NBYTES:
            raise ConfigError(
                "runner_config.dtype",
                f"{model.dtype} on a GPU gathers the weights of each token's experts: {gathered / 1e9:.0f} GB a step",
                limit=f"{_MAX_GATHERED_NBYTES / 1e9:.0f} GB",
                hint=f"use {'bfloat16, or ' if fits else ''}a smaller max_step_tokens",
            )
    try:
        model.set_experts_implementation(experts)
    except ValueError as error:
        raise ConfigError("runner_config.experts", str(error), hint='use "auto"') from error


def graph_tokens(
    config: TransformersConfig, limits: RunnerLimits, model: PreTrainedModel, layers: MoELayers | None
) -> tuple[int, ...]:
    """Tokens of steps with prompts to capture. None by default where a step gathers much of the experts' weights, as a
    graph would keep that memory."""
    if config.graph_tokens is not None:
        return config.graph_tokens
    gathers = model.config._experts_implementation == "batched_mm"
    if gathers and _gathered_nbytes(model, layers, limits.max_step_tokens) > _MOST_KEPT_NBYTES:
        return ()
    flat_tokens = config.graph_sizes[-1] if config.graph_sizes else decode_rows(limits)
    return token_ladder(limits.max_step_tokens, flat_tokens)


def fits_grouped(model: PreTrainedModel, layers: MoELayers | None) -> bool:
    """Whether torch's grouped product takes the experts' matrices: their widths are multiples of 16 bytes."""
    return all(fits_grouped_product(model.get_submodule(name)) for name in (() if layers is None else layers.names))


def _gathered_nbytes(model: PreTrainedModel, layers: MoELayers | None, max_step_tokens: int) -> int:
    """Bytes of expert weights that one product of `batched_mm` gathers in the largest step."""
    if layers is None:
        return 0
    largest = max(
        (
            parameter[0].nbytes
            for name in layers.names
            for parameter in model.get_submodule(name).parameters(recurse=False)
            if parameter.dim() == 3
        ),
        default=0,
    )
    return max_step_tokens * max(layers.top_k) * largest
