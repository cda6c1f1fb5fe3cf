"""What fixed numerics refuse, and the ways out: settings of torch on both sides, and models and passes of a trainer.

Knows modules and devices; knows no batches. Called when a runner starts, and by `trainer.py`: for the model when its
numerics become fixed, for the circumstances of each pass when it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fdasync.errors import BadInput, UnsupportedModel
from fdasync_transformers.model.refusals import refuse_indexed, refuse_recurrent, refuse_unservable
from fdasync_transformers.weights.named import dtypes_of, first_other, served_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

# attributes of modules by which values are dropped, or noise is added, in training
_RANDOM = ("dropout", "dropout_prob", "layerdrop", "jitter")
#: by name, the dtypes that there are fixed numerics in
FIXED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# "none": nothing was chosen, which is ieee
_WHOLE = ("ieee", "none")
_AS_HIGHEST = '"ieee", as torch.set_float32_matmul_precision("highest") does'


def refuse_settings(device: torch.device, error: type[BadInput] = BadInput) -> None:
    """Refuse settings of this process under which a device has other bits, or other proofs, than by default.

    On a CPU oneDNN computes products of float32 in bfloat16 or TF32 where it may, and without oneDNN products of
    bfloat16 have another order of sums. On a GPU our kernels heed no setting, but the library's products, which they
    are compared with before they are used, do.

    Args:
        error: the class to raise; its `field` is the setting's name, `limit` the value that it must have.
    """
    for name, found, wanted, hint in _settings(device):
        if found not in wanted:
            problem = f"is {found!r}, under which numerics are not the fixed ones"
            raise error(name, problem, limit=wanted[0], hint=f"set it to {hint or repr(wanted[0])}")


def _settings(device: torch.device) -> Iterator[tuple[str, Any, tuple[Any, ...], str]]:
    """Name, value, values that it may have, and how it is set."""
    if device.type == "cpu":
        library: Any = torch.backends.mkldnn
        yield "torch.backends.mkldnn.enabled", library.enabled, (True,), ""
        # a backend's own value, else its parents': so it also tells what `torch.backends.fp32_precision` is set to
        yield "torch.backends.mkldnn.matmul.fp32_precision", library.matmul.fp32_precision, _WHOLE, _AS_HIGHEST
    elif device.type == "cuda":
        products: Any = torch.backends.cuda.matmul
        # not `allow_tf32`, which raises where the newer setting was used
        yield "torch.backends.cuda.matmul.fp32_precision", products.fp32_precision, _WHOLE, _AS_HIGHEST
        yield "torch.backends.cuda.matmul.allow_fp16_accumulation", products.allow_fp16_accumulation, (False,), ""


def refuse_model(model: torch.nn.Module) -> str:
    """Refuse a model that cannot have fixed numerics in a trainer; returns its type.

    Raises:
        BadInput: a compiled model, or none of the library's.
        UnsupportedModel: the model could not be served either; with the reason.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if any(getattr(part, "_compiled_call_impl", None) or "_orig_mod" in part._modules for part in model.modules()):
        raise compiled()
    if not isinstance(kind, str):
        raise BadInput("model", f"{type(model).__name__} is no transformers model", hint="give the one it wraps")
    refuse_unservable(model)  # type: ignore[arg-type]  # reads modules alone
    refuse_recurrent(model)  # type: ignore[arg-type]  # reads modules alone
    refuse_indexed(model)  # type: ignore[arg-type]  # reads modules alone
    return kind


# the compiler of some versions of torch cannot raise an error of ours
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
def _refuse_compiled() -> NoReturn:
    raise compiled()


def compiled() -> BadInput:
    """The error about torch.compile."""
    return BadInput("model", "is compiled by torch.compile, which has other bits than a rollout", hint="run it eagerly")


def random_parts(model: torch.nn.Module) -> tuple[tuple[str, torch.nn.Module, str], ...]:
    """Path, module and attribute of all that may drop values or add noise in training."""
    return tuple(
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float | int) and _is_random(module, name)
    )


def _is_random(module: torch.nn.Module, name: str) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return name == "p"
    return any(word in name for word in _RANDOM)


def served_dtypes(model: PreTrainedModel) -> tuple[dict[str, torch.dtype], tuple[str, ...]]:
    """Dtypes of a rollout in this model's dtype, by name; and the model's parameters that stay in float32 where others
    are rounded, by FSDP perhaps. Raises BadInput for a dtype without fixed numerics."""
    if model.dtype not in FIXED_DTYPES.values():
        hint = "use model.float(); or masters in float32, which FSDP2's MixedPrecisionPolicy rounds"
        raise BadInput("model", f"is in {model.dtype}, as no rollout is", limit=", ".join(FIXED_DTYPES), hint=hint)
    dtypes = dtypes_of(served_layout(model, model.dtype))
    rounded = dtypes
    if model.dtype == torch.float32:
        rounded = dtypes_of(served_layout(model, torch.bfloat16))
    return dtypes, tuple(name for name, _ in model.named_parameters() if rounded.get(name) == torch.float32)


def refuse_dtypes(
    tensors: Iterable[tuple[str, torch.Tensor]], served: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> None:
    """Refuse parameters and buffers that a rollout of this dtype has in another one. Raises BadInput, naming one."""
    other = first_other(tensors, served)
    if other is not None:
        problem = f"{other.name} is {other.here}, and a rollout in {dtype} has it in {other.served}"
        hint = "load it by from_pretrained(dtype=...): a cast of the whole model rounds what must stay in float32"
        raise BadInput("model", problem, hint=hint)


def refuse_rounded(name: str, own: str, module: torch.nn.Module, _args: Any) -> None:
    """A forward pre-hook of a module with a parameter that a rollout keeps in float32. Raises BadInput."""
    dtype = getattr(module, own).dtype
    if dtype != torch.float32:
        problem = f"{name} is {dtype} in this pass, and a rollout keeps it in torch.float32"
        hint = "fully_shard its module alone, by MixedPrecisionPolicy(cast_forward_inputs=False)"
        raise BadInput("model", problem, hint=hint)


def refuse_pass(kind: str, device: torch.device, parts: tuple[tuple[str, torch.nn.Module, str], ...]) -> None:
    """Refuse a pass whose bits would not be the rollout's.

    Raises:
        BadInput: torch.compile, autocast, settings of torch, or dropout or noise in training, naming the module.
        UnsupportedModel: a device other than a CPU or of CUDA.
    """
    if torch.compiler.is_compiling():
        _refuse_compiled()
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModel(kind, f"fixed numerics of a trainer run on CPUs and CUDA devices, and it is on {device}")
    if torch.is_autocast_enabled(device.type):
        raise BadInput(
            "model",
            "runs under autocast, which computes in other dtypes than the rollout",
            hint="give it parameters of the served dtype, for instance by FSDP2's MixedPrecisionPolicy",
        )
    refuse_settings(device)
    for path, module, name in parts:
        value: Any = getattr(module, name, 0)
        if module.training and value:
            raise BadInput(
                "model", f"{path or type(module).__name__}: {name} is {value} in training", hint="set it to 0"
            )
