"""A trainer's norms and routers with the values of a rollout's kernels, and with the library's gradients.

A rollout on a GPU replaces norms, routers and experts by kernels of other bits than the library's, each where a proof
allows it. Here the same proofs run on the trainer's model, module by module, while a pass of one token runs: sharded
parameters are whole then, in the dtype of the forward pass. The kernel of a replaced module gives the value; the
backward pass runs the library's code for the gradient (`gradients/recomputed.py`), or of torch's own norm where it has
the same gradients (`gradients/norms.py`). Rotary embeddings, their angles and gates of dense layers are proven to have
the library's bits, so here they are the library's. Knows no batches. Called by `trainer.py`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.chip import runs_on
from fdasync_kernels.limits import FLOATS
from fdasync_transformers.fused.experts import Experts
from fdasync_transformers.fused.known import kind_of
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.fused.modules import past_modes, signature_of, text_modules
from fdasync_transformers.fused.norms import Norms, epsilon
from fdasync_transformers.fused.replacement import Differs, prove, replace
from fdasync_transformers.fused.routers import Record, fused_router
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.model.not_copied import NotCopied

from fdasync.errors import UnsupportedModel
from fdasync_trainer.numerics.device_experts import NAME, register
from fdasync_trainer.numerics.gradients.norms import norm_gradient
from fdasync_trainer.numerics.gradients.recomputed import recomputed, with_parameters
from fdasync_trainer.replay.force import choosing, find_routers, forced_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from transformers import PreTrainedModel

    from fdasync_trainer.numerics.gradients.norms import Form
    from fdasync_trainer.replay.force import RouterSite

# experts that no kernel computes: by products that the mode takes, as a rollout would
_PLAIN_EXPERTS = "batched_mm"


@dataclass
class DeviceForms:
    """What `finding_forms` found.

    Attributes:
        attributes: module, name and value: what the modules get while numerics are fixed.
        experts: the implementation of the experts.
    """

    attributes: list[tuple[torch.nn.Module, str, Any]] = field(default_factory=list)
    experts: str = _PLAIN_EXPERTS


class NormForward(NotCopied):
    """The forward of a norm: the kernel's value, the library's gradient. With a `form` the graph is torch's own norm's,
    and its value is replaced: one kernel more, and no Python in the backward pass. Rows of another dtype than `dtype`,
    which no kernel takes, go the library's way."""

    def __init__(
        self,
        module: torch.nn.Module,
        kernel: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        form: Form | None = None,
    ) -> None:
        self._module = module
        self._kernel = kernel
        self._dtype = dtype
        self._form = form

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        module = self._module
        if rows.dtype is not self._dtype:
            return type(module).forward(module, rows)  # type: ignore[no-any-return]  # torch has no types here
        with past_modes(), torch.no_grad():
            value = self._kernel(rows)
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        inputs = (rows, *parameters.values())
        if self._form is not None:
            if not torch.is_grad_enabled() or not any(one.requires_grad for one in inputs):
                return value
            with past_modes():
                out = self._form(rows, parameters.get("weight"), epsilon(module) or 0.0)
                # a norm's gradient reads its inputs alone
                out.data.copy_(value)
            return out

        def again(leaves: list[torch.Tensor], _kept: Any) -> list[torch.Tensor]:
            twin = with_parameters(module, dict(zip(parameters, leaves[1:], strict=True)))
            return [type(module).forward(twin, leaves[0])]

        return recomputed((value,), again, inputs)[0]


class RouterForward(NotCopied):
    """The forward of a router: ids, weights and logits of the kernels, gradients of the library's code on these ids.

    Where the routing is replayed, the record's ids win; a row whose ids are not the kernels' own has the library's
    weights. `plain`: the kernels are all there is, and no operation of the library needs its fixed form.
    """

    def __init__(
        self, site: RouterSite, kernels: Callable[..., tuple[torch.Tensor, ...]], *, plain: bool = False
    ) -> None:
        self._site = site
        self._kernels = kernels
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        router: Any = self._site.router
        watched, forced = forced_ids(router)
        with past_modes() if self._plain else nullcontext(), torch.no_grad():
            values = self._kernels(*args, **kwargs)
        ids = next(part for part in values if not part.is_floating_point())
        if watched:
            with torch.no_grad():
                ids, values = self._answered(values, ids, forced, args, kwargs)
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        # a bias of the choice alone may change before the backward pass
        tensors = [
            key for key, one in given.items() if key == 0 or (isinstance(one, torch.Tensor) and one.requires_grad)
        ]
        parameters = dict(router.named_parameters())

        def again(leaves: list[torch.Tensor], kept: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
            twin = with_parameters(router, dict(zip(parameters, leaves[len(tensors) :], strict=True)))
            now = given | dict(zip(tensors, leaves, strict=False))
            inputs = [now.pop(place) for place in range(len(args))]
            with choosing(self._site, kept[0]):
                found = type(router).forward(twin, *inputs, **now)
            return [part for part in found if part.is_floating_point()]

        floats = tuple(part for part in values if part.is_floating_point())
        inputs = [*(given[key] for key in tensors), *parameters.values()]
        found = iter(recomputed(floats, again, inputs, (ids,)))
        return tuple(next(found) if part.is_floating_point() else ids for part in values)

    def _answered(
        self,
        values: tuple[torch.Tensor, ...],
        ids: torch.Tensor,
        forced: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The ids that win, and their values; whoever watches sees the library's own selection."""
        router: Any = self._site.router
        wanted = ids
        # a record of another length goes on as it is: the library's selection raises
        if forced is not None and forced.shape[0] == len(ids) and forced.shape[1] >= ids.shape[1]:
            rows = forced[:, : ids.shape[1]].to(ids.dtype)
            wanted = torch.where((rows < 0).any(-1, keepdim=True), ids, rows)
        with choosing(self._site, wanted):
            own = type(router).forward(router, *args, **kwargs)
        if forced is None:
            return ids, values
        same = (wanted == ids).all(-1, keepdim=True)
        return wanted, tuple(
            torch.where(same, value, part) if value.is_floating_point() else wanted
            for part, value in zip(own, values, strict=True)
        )


@contextmanager
def finding_forms(model: PreTrainedModel) -> Iterator[DeviceForms]:
    """Within the context, a pass of the model fills the yielded forms, for the modules that ran.

    The pass must run without gradients, in eval mode, with attention of its own choice; the context gives it experts
    that run everywhere. Waits for the device. Raises UnsupportedModel where there are no kernels.
    """
    if not runs_on(model.device):
        raise UnsupportedModel(str(model.config.model_type), f"fixed numerics: no kernels run on {model.device}")
    forms = DeviceForms()
    finder = _Finder(forms, model)
    with ExitStack() as stack:
        stack.enter_context(_eager_experts(model))
        embeddings: Any = model.get_input_embeddings()
        stack.callback(embeddings.register_forward_hook(finder.embedded).remove)
        for _, module in text_modules(model):
            if not list(module.children()):
                stack.callback(module.register_forward_pre_hook(finder.norm).remove)
        for site in _routers(model):
            stack.callback(site.router.register_forward_hook(partial(finder.router, site)).remove)
        experts = _experts(model)
        for module in experts:
            stack.callback(module.register_forward_pre_hook(finder.experts).remove)
        yield forms
    if experts and finder.fused_experts == len(experts):
        register()
        forms.experts = NAME
    else:
        forms.attributes = [each for each in forms.attributes if each[1] != "fd_experts"]


class _Finder(NotCopied):
    """Hooks of the pass; each proves the module that it is called for, once, outside of what is dispatched."""

    def __init__(self, forms: DeviceForms, model: Any) -> None:
        self.fused_experts = 0
        self._forms = forms
        self._device = model.device
        self._dtype: torch.dtype | None = None
        self._seen: set[tuple[str, torch.nn.Module]] = set()
        self._experts = Experts(LiveRows())
        self._gradients: dict[Hashable, Form | None] = {}

    def embedded(self, _module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        """The dtype of the forward pass; parameters may be masters of another one."""
        self._dtype = output.dtype

    def norm(self, module: torch.nn.Module, _args: Any) -> None:
        if not self._first("norm", module) or self._dtype not in FLOATS:
            return
        assert self._dtype is not None
        if replace(Norms(self._dtype, self._device), module).names:
            kernel, key = vars(module).pop("forward"), signature_of(module)
            if key not in self._gradients:
                self._gradients[key] = norm_gradient(module, self._dtype, self._device)
            forward = NormForward(module, kernel, self._dtype, self._gradients[key])
            self._forms.attributes.append((module, "forward", forward))

    def router(self, site: RouterSite, module: torch.nn.Module, _args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else ()
        ids = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_floating_point()]
        if not self._first("router", module) or self._dtype is None or len(ids) != 1:
            return
        kernels = fused_router(module, ids[0].shape[-1], self._dtype, Record())
        if not isinstance(kernels, Differs):
            kind = kind_of(module)
            plain = not isinstance(kind, str) and kind.prepare is None and not kind.probabilities
            self._forms.attributes.append((module, "forward", RouterForward(site, kernels, plain=plain)))

    def experts(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not self._first("experts", module) or len(args) < 2:
            return
        described = prove(self._experts, self._experts.place(module, args[1].shape[-1]))
        vars(module).pop("fd_experts", None)
        if not isinstance(described, Differs):
            self.fused_experts += 1
            self._forms.attributes.append((module, "fd_experts", described))

    def _first(self, part: str, module: torch.nn.Module) -> bool:
        before = len(self._seen)
        self._seen.add((part, module))
        return len(self._seen) > before


def _experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    try:
        return [each.module for each in find_experts(model).values()]
    except UnsupportedModel:
        # which a rollout serves without a capture, by the library's code
        return []


def _routers(model: torch.nn.Module) -> list[RouterSite]:
    try:
        return list(find_routers(model).values())
    except UnsupportedModel:
        return []


@contextmanager
def _eager_experts(model: Any) -> Iterator[None]:
    """The library's loop over experts, which takes all widths and dtypes."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    kept = [(config, getattr(config, "_experts_implementation", None)) for config in configs.values()]
    try:
        model.set_experts_implementation("eager")
        yield
    finally:
        for config, value in kept:
            config._experts_implementation = value
