"""Fixed numerics of a trainer: a plain transformers model computes the very bits of a rollout, and has its gradients.

The library's code runs within `mode.FixedNumerics`, which stands below autograd: values are the rollout's, and torch's
own gradients flow. Attention, whose values come from sequences laid out as a rollout has them, brings a backward of its
own (`trainer_attention.py`). Knows no engines. Called by training code.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from fdasync_transformers.fixed.refusals import (
    random_parts,
    refuse_dtypes,
    refuse_model,
    refuse_pass,
    refuse_rounded,
    served_dtypes,
)
from fdasync_transformers.model.families import mended
from fdasync_transformers.model.head import decoder_of
from fdasync_transformers.model.probe import attention_layers, latent_rank
from fdasync_transformers.parallel.slices import COUNTS, Slices
from fdasync_transformers.weights.named import served_layout
from transformers import PreTrainedConfig

from fdasync.errors import BadInput, UnsupportedModel
from fdasync_trainer.numerics.segments import HostSegments
from fdasync_trainer.numerics.trainer_attention import PassContext, catch_latents, register
from fdasync_trainer.numerics.trainer_pass import (
    FixedForward,
    FixedPass,
    HeadForward,
    OtherLinears,
    PassMode,
    Within,
    plain_linears,
)
from fdasync_trainer.replay.forward_pass import CHECKPOINTING, Checkpointing
from fdasync_trainer.replay.layout import derived
from fdasync_trainer.replay.packing import FIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from fdasync_trainer.numerics.device_forms import DeviceForms
    from fdasync_trainer.numerics.segments import Segments
    from fdasync_trainer.replay.layout import Spans

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_LAYOUT = "give a 2-D attention_mask, or position_ids that begin at 0 in each sequence"


def fixed_numerics(
    model: PreTrainedModel, *, kernels: Literal["auto", "triton"] = "auto", sum_slices: int = 1
) -> TrainerNumerics:
    """Within the context, forward passes of `model` have the bits of a rollout under `numerics="fixed"`.

    `with fixed_numerics(model): logits = model(input_ids=..., attention_mask=...).logits`; or for good, with
    `fixed_numerics(model).apply()`. The logits of every real token have the rollout's bits, whatever the batch beside
    it, in train and eval mode. Batches are padded on either side (`attention_mask` [B, T]), or packed in one row
    (`position_ids` [1, T] that begin at 0 in each sequence, or `cu_seq_lens_q`); without either, each row is a whole
    sequence. Positions are counted in each sequence; no KV cache is filled. The decoder may be called alone too
    (`model.model`), and so may the output head (`model.lm_head`). `replay_routing` may be entered inside or outside.

    The forward pass must run in the rollout's dtype: for a rollout in bfloat16, parameters in bfloat16, or masters in
    float32 that FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` rounds. Parameters and buffers that the
    rollout keeps in float32 must be so here too: `model.to(torch.bfloat16)` rounds rotary frequencies, which
    `from_pretrained(dtype=...)` does not. FSDP2 over full parameters (`fully_shard` of layers and model) works, where
    modules with parameters of float32 (routers of some families) are sharded alone, by a policy that rounds nothing;
    of DDP, give the model that it wraps.

    While they are fixed, the model has a copy of its config, so that models with the same one stay as they are; what is
    changed in it meanwhile is lost in the end.

    Gradients are torch's own. Attention recomputes each sequence in the backward pass by
    `scaled_dot_product_attention`. Backward may run after the context; with gradient checkpointing (the library's, or
    `context_fn=checkpoint_contexts(model)`) it must run within, as its recomputation has these numerics too.

    Latent attention (MLA) is absorbed, as in a rollout: each pair of query and key costs (2 * rank + rotary dims)
    products per head instead of (key dims + value dims), about 3.4 times as many in DeepSeek's shape, and again in the
    backward pass.

    The first opening of what this function returns runs one token through the model, without gradients: keep it and
    open it again rather than making a new one for each step. Under FSDP2 all ranks open it.

    On a GPU the kernels of a rollout give the values of norms, routers, experts and attention, each where it is proven
    as at a rollout's start; the gradients are the library's: the backward pass runs its routers, and its experts by
    grouped products. Norms have the gradients of torch's own norm, where a trial at the opening shows that they agree.

    Args:
        model: of transformers, on a CPU or a CUDA device.
        kernels: "triton" takes the kernels on a CPU too, in Triton's interpreter (tests); "auto": on GPUs.
        sum_slices: the rollout's `EngineConfig.sum_slices`, at any number of ranks.

    Raises:
        BadInput: dropout or noise in training, with the module's path; autocast; settings of torch under which products
            have other bits; parameters or buffers in other dtypes than a rollout's, by name; a compiled model;
            arguments that do not tell the sequences; a KV cache; sequences longer than the family can have;
            checkpointing that would recompute with other numerics; a recomputation after the end of the context;
            numerics that are fixed already; slices of sums that are none of the numbers there are;
            kernels of another name; an attention layer that is called without its decoder (other parts that are called
            alone have the library's own numerics, but for the output head); copies within the context.
        UnsupportedModel: a model that an engine would not serve either; a GPU without Triton; LoRA and the like on the
            up-projection of latent attention, or in slices on what is sliced; a family whose sums have no slices.
        ConfigError: sizes that the slices do not divide.
        RunnerError: an operation without fixed form: a random one, a convolution, or attention that does not go through
            the library's interface. Each of these may come at the opening or in a pass.
    """
    return TrainerNumerics(model, kernels, sum_slices)


class TrainerNumerics:
    """See `fixed_numerics`, which makes it. A context that may be opened again; of one thread at a time."""

    def __init__(
        self, model: PreTrainedModel, kernels: Literal["auto", "triton"] = "auto", sum_slices: int = 1
    ) -> None:
        self._kind = refuse_model(model)
        if kernels not in ("auto", "triton"):
            raise BadInput("kernels", f"{kernels!r} is no way to compute", limit="auto, triton")
        if type(sum_slices) is not int or sum_slices not in COUNTS:
            raise BadInput("sum_slices", f"{sum_slices!r} is no number of slices", limit=", ".join(map(str, COUNTS)))
        self._sum_slices = sum_slices
        self._slices: Slices | None = None
        self._model = model
        self._with_kernels = kernels == "triton"
        self._layers: Any = None
        self._forms: DeviceForms | None = None
        self._dtype: torch.dtype | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._kept: tuple[str, ...] = ()
        self._most_tokens: int | None = None
        self._random = random_parts(model)
        self._linears = True
        self._known: dict[Any, Any] = {}
        self._undo: ExitStack | None = None

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, *_: object) -> None:
        self.undo()

    @property
    def is_open(self) -> bool:
        """Whether the model's numerics are fixed by this object."""
        return self._undo is not None

    def apply(self) -> Self:
        """Fix the model's numerics until `undo`."""
        model = self._model
        refuse_pass(self._kind, model.device, ())
        if any(isinstance(vars(part).get("forward"), FixedForward) for part in model.modules()):
            raise BadInput("model", "has fixed numerics already")
        if self._dtype != model.dtype:
            self._dtypes, self._kept = served_dtypes(model)
            self._dtype = model.dtype
        refuse_dtypes(chain(model.named_parameters(), model.named_buffers()), self._dtypes, self._dtype)
        if self._sum_slices > 1:
            self._find_slices()
        register()
        with ExitStack() as stack:
            mends = stack.enter_context(mended(model))
            self._most_tokens = mends.max_context_tokens
            for undo in _own_configs(model):
                stack.callback(undo)
            kernels = self._with_kernels or model.device.type == "cuda"
            for module, forward in () if self._slices is None else self._slices.forwards(model, kernels=kernels):
                stack.callback(_put(module, "forward", forward))
            for module, forward in plain_linears(model):
                stack.callback(_put(module, "forward", forward))
            if self._layers is None:
                # by the experts that take all widths, as the pass of a rollout's start
                model.set_experts_implementation("eager")
                with _evaluating(model), self._finding_forms() as self._forms, OtherLinears() as others:
                    specs = attention_layers(model, latent=True, query_scales=mends.query_scales)
                self._layers = {spec.index: spec for spec in specs}
                self._linears = others.seen
            model.set_attn_implementation(FIXED)
            model.set_experts_implementation("eager" if self._forms is None else self._forms.experts)
            for module, name, value in () if self._forms is None else self._forms.attributes:
                stack.callback(_put(module, name, value))
            for module in model.modules():
                if latent_rank(module):
                    stack.callback(module.register_forward_pre_hook(catch_latents, with_kwargs=True).remove)
            for name in self._kept:
                owner, _, own = name.rpartition(".")
                check = partial(refuse_rounded, name, own)
                stack.callback(model.get_submodule(owner).register_forward_pre_hook(check).remove)
            decoder = decoder_of(model)
            for part in (model,) if decoder is None else (model, decoder):
                stack.callback(_put(part, "forward", FixedForward(self._run_pass, part.forward)))
            head: Any = model.get_output_embeddings()
            if head is not None:
                stack.callback(_put(head, "forward", HeadForward(self._run_head, head.forward)))
            self._undo = stack.pop_all()
        return self

    def _find_slices(self) -> None:
        if self._slices is None:
            self._slices = Slices(served_layout(self._model, self._model.dtype), self._sum_slices, latent=True)

    def _finding_forms(self) -> AbstractContextManager[DeviceForms | None]:
        if not self._with_kernels and self._model.device.type != "cuda":
            return nullcontext()
        try:
            from fdasync_trainer.numerics.device_forms import finding_forms
        except ModuleNotFoundError as error:
            problem = f"fixed numerics on {self._model.device} need kernels: no module {error.name}"
            raise UnsupportedModel(self._kind, problem) from error
        return finding_forms(self._model)

    def undo(self) -> None:
        """Give the model its own numerics back; nothing if it has them."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def _run_pass(self, forward: FixedForward, own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """One forward pass."""
        work = self._begun()
        given = self._given(arguments, work)
        within = Within(work)
        with ExitStack() as stack:
            for module in self._model.modules():
                function = vars(module).get(CHECKPOINTING)
                if function is not None:
                    stack.callback(_put(module, CHECKPOINTING, Checkpointing(function, work, within, within)))
            stack.callback(forward.end)
            forward.work = work
            stack.enter_context(self._computing(work))
            return own(**given)

    def _run_head(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output head alone."""
        work = self._begun()
        work.watch()
        with self._computing(work):
            return own(*args, **kwargs)

    def _begun(self) -> FixedPass:
        refuse_pass(self._kind, self._model.device, self._random)
        # FSDP may hold rounded parameters by now
        refuse_dtypes(self._model.named_buffers(), self._dtypes, self._dtype)
        return FixedPass(lambda: self.is_open, linears=self._linears, known=self._known)

    @contextmanager
    def _computing(self, work: FixedPass) -> Iterator[None]:
        # kernels are launched on the current device
        on_gpu = self._model.device.type == "cuda"
        with torch.cuda.device(self._model.device) if on_gpu else nullcontext(), PassMode(work):
            yield

    def _given(self, arguments: dict[str, Any], work: FixedPass) -> dict[str, Any]:
        """The arguments of the library's forward."""
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        if tokens is None or tokens.ndim < 2:
            raise BadInput("model", "was called without input_ids [B, T] or inputs_embeds [B, T, H]")
        if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
            raise BadInput("past_key_values", "a trainer with fixed numerics takes whole sequences and fills no cache")
        mask = arguments.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise BadInput("attention_mask", "is not [B, T] and tells no sequences", hint=_LAYOUT)
        batch, width = int(tokens.shape[0]), int(tokens.shape[1])
        spans = derived(arguments, batch, width, hint=_LAYOUT)
        longest = int(spans.lengths.max(initial=0))
        if self._most_tokens is not None and longest > self._most_tokens:
            raise BadInput("input_ids", f"a sequence of {longest} tokens", limit=f"{self._most_tokens} of {self._kind}")
        segments = self._segments(spans, tokens.device)
        given = {name: value for name, value in arguments.items() if name not in _BOUNDS}
        given["position_ids"] = segments.positions.view(batch, width)
        given["use_cache"] = False
        given["fd_ctx"] = PassContext(self._layers, segments, work.watch)
        return given

    def _segments(self, spans: Spans, device: torch.device) -> Segments:
        if self._forms is None:
            return HostSegments(spans, device)
        from fdasync_trainer.numerics.device_segments import DeviceSegments

        return DeviceSegments(spans, device)


def _put(module: torch.nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module, past its class; returns what undoes it."""
    attributes = vars(module)
    if name in attributes:
        return partial(attributes.__setitem__, name, _swapped(attributes, name, value))
    attributes[name] = value
    return partial(attributes.pop, name)


def _swapped(attributes: dict[str, Any], name: str, value: Any) -> Any:
    before, attributes[name] = attributes[name], value
    return before


def _own_configs(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Give the modules copies of their configs, the same one where they have one in common; yields what undoes each.

    Implementations of attention and experts are written there, and other models may share the config.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            yield _put(module, "config", copy.deepcopy(config, copies))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode for a while; each module keeps its own mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
