"""Puts the fused experts in the place of the library's, through its experts interface.

What a module's experts are is read from the module (gate, bias, layout); what stands between the two products is found
by trying the kernels' activations on rows against the module's own. The whole is compared with the module's own forward
on random rows, in the tiles of every regime. If one layer of a model differs, the model keeps the library's experts.
Knows no steps. Called at start-up by `start/fuse.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.limits import MOST_EXPERTS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fdasync_transformers.fused.experts_interface import NAME, Description, fused_experts, run_experts
from fdasync_transformers.fused.modules import check_size
from fdasync_transformers.fused.replacement import (
    Differs,
    Place,
    Replaced,
    Replacement,
    alone,
    replace,
)
from fdasync_transformers.model.kept.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync_kernels.experts.activation import Activation
    from fdasync_kernels.experts.tiles import Tiles
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.replacement import Agree, Case
    from fdasync_transformers.model.moe_layers import MoELayers

    Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# rows of the comparisons: few, whose pairs are not grouped, and many
_CHECK_ROWS = (3, 40)
# most distance of all results from the module's own, over their size: both round, at the same places but for one
_TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# rows of the activation's proof, and their spread: most are of common size, some far beyond every limit
_ACTIVATION_ROWS, _ACTIVATION_WIDTH = 96, 64


class Experts(Replacement[Description]):
    """The experts of MoE layers.

    Attributes:
        remarks: for people: what falls short of the promise.

    Args:
        live: says in each pass which rows count.
        layers: of the model.
        further: experts of layers behind the model's own, which are as these are.
    """

    what = which = "experts"
    together = True

    def __init__(
        self, live: LiveRows, layers: MoELayers | None = None, further: Sequence[torch.nn.Module] = ()
    ) -> None:
        self.remarks: list[str] = []
        self._live = live
        self._layers = layers
        self._further = further
        self._tried: set[type] = set()

    def finds(self, model: Any) -> Iterator[Place]:
        layers = self._layers
        if layers is None:
            return
        for name, number, k in zip(layers.names, layers.ids, layers.top_k, strict=True):
            yield self.place(model.get_submodule(name), k, name, number)
        for number, module in enumerate(self._further, layers.ids[-1] + 1):
            yield self.place(module, max(layers.top_k), f"further {number}", number)

    @staticmethod
    def place(module: Any, k: int, name: str = "", number: int = 0) -> Place:
        """The place of one layer's experts; `k`: of a token."""
        return Place(name, module, "", f"layer {number} ({type(module).__name__})", _refusal(module), given=k)

    def candidates(self, place: Place) -> Iterator[Description]:
        """One description; the module has it from then on."""
        module = place.module
        gated, up = module.has_gate, _up_of(module)
        activation = _activation_of(module, gated, up)
        if activation is None:
            raise Differs("has an activation that the kernels do not know")
        interleaved = gated and not module.is_concatenated
        transposed = module.is_transposed and not isinstance(up, Kept)
        module.fd_experts = Description(activation, gated, module.has_bias, transposed, interleaved, self._live)
        yield module.fd_experts

    def cases(self, place: Place) -> list[Case[Description]]:
        module = place.module
        cases: list[Case[Description]] = [partial(_compare, module, place.given, count) for count in _CHECK_ROWS]
        # one module of a class for all
        if type(module) not in self._tried:
            self._tried.add(type(module))
            cases.append(partial(self._regimes, module, place.given))
        return cases

    def put(self, place: Place, candidate: Description) -> None:
        place.module.fd_experts = candidate

    def _regimes(self, module: Any, k: int, _: Description) -> None:
        """Tries the tiles of every regime, and whether all give the same bits.

        In Triton's interpreter a product is numpy's, whose order of sums goes by its shape: there bits say nothing.
        """
        down: torch.Tensor | Kept = module.down_proj
        rows = _random_rows(module, k, _CHECK_ROWS[-1])
        wanted = fused_experts(module, *rows)
        same = True
        for tiles in _tiles_of(module):
            ours = run_experts(module, *rows, tiles=tiles)
            check_size(ours, wanted, _TOLERANCE[down.dtype], f", with {tiles}")
            same = same and torch.equal(ours, wanted)
        if not same and down.device.type != "cpu":
            kind = type(module).__name__
            self.remarks.append(f"experts ({kind}): a row's bits depend on how many run beside it on this device")


def fuse_experts(
    model: PreTrainedModel,
    layers: MoELayers,
    live: LiveRows,
    agree: Agree = alone,
    further: Sequence[torch.nn.Module] = (),
) -> Replaced:
    """Make the fused experts the implementation of a model's experts, if they compute what every layer does.

    See `replace`, and `Experts` for the arguments. Leaves the model as it was where experts differ.
    """
    replacement = Experts(live, layers, further)
    ALL_EXPERTS_FUNCTIONS.register(NAME, fused_experts)
    slots, live.slots = live.slots, None
    done = None
    try:
        done = replace(replacement, model, agree)
    finally:
        live.slots = slots
        if done is None or not done.names:
            for place in replacement.finds(model):
                vars(place.module).pop("fd_experts", None)
    if done.names:
        model.set_experts_implementation(NAME)
        done.remarks = replacement.remarks
    return done


def _refusal(module: Any) -> str:
    gated = getattr(module, "has_gate", None)
    if gated is None:
        return "does not take the library's experts interface"
    if getattr(module, "has_post_expert_norm", False):
        return "has a norm behind each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "is spread over devices"
    up = _up_of(module)
    if not isinstance(up, torch.Tensor | Kept) or up.dim() != 3 or up.dtype not in _TOLERANCE:
        return "has no experts' weights in three dimensions"
    return f"has {len(up)} experts, more than the kernels take" if len(up) > MOST_EXPERTS else ""


def _up_of(module: Any) -> Any:
    return getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)


def _activations(module: Any, gated: bool) -> list[Activation]:
    from fdasync_kernels.experts.activation import KINDS, Activation

    plain = [Activation(kind) for kind in KINDS]
    if not gated:
        return plain
    limits = {float(value) for name in ("limit", "swiglu_limit") if (value := getattr(module, name, None)) is not None}
    alphas = {float(value) for name in ("alpha", "swiglu_alpha") if (value := getattr(module, name, None)) is not None}
    found = [*plain, *[Activation(kind, "wide") for kind in KINDS]]
    for limit in limits:
        found += [Activation(kind, form, limit=limit) for form in ("clamped", "clamped_after") for kind in KINDS]
        found += [Activation("silu", "swiglu_oai", alpha, limit) for alpha in alphas]
    return found


def _activation_of(module: Any, gated: bool, weight: torch.Tensor | Kept) -> Activation | None:
    """The kernels' activation that equals the module's own on rows of all sizes; None if there is none."""
    from fdasync_kernels.experts.activation import activation_of

    make = torch.Generator().manual_seed(0)
    width = _ACTIVATION_WIDTH * (2 if gated else 1)
    rows = torch.randn((_ACTIVATION_ROWS, width), generator=make)
    rows *= torch.logspace(-2, 1.5, _ACTIVATION_ROWS)[:, None]
    rows = rows.to(weight.device, weight.dtype)
    wanted = module._apply_gate(rows) if gated else module.act_fn(rows)
    if wanted.shape != (_ACTIVATION_ROWS, _ACTIVATION_WIDTH) or wanted.dtype != weight.dtype:
        return None
    eps = torch.finfo(weight.dtype).eps
    # exp and tanh differ in their last places, which may become a whole place in half precision; and 1 + tanh cancels
    room = 2e-7 * (1 + rows.float().abs().amax(dim=-1, keepdim=True)) ** 2
    best: tuple[float, Activation] | None = None
    for activation in _activations(module, gated):
        ours = activation_of(rows, activation, gated=gated, interleaved=gated and not module.is_concatenated)
        if bool(((ours.float() - wanted.float()).abs() <= room + (3 * eps + 1e-5) * wanted.float().abs()).all()):
            same = float((ours == wanted).float().mean())
            if best is None or same > best[0]:
                best = same, activation
    return None if best is None else best[1]


def _compare(module: Any, k: int, count: int, _: Description) -> None:
    """Hold the described experts against the module's own forward on random rows. Of weights that are kept as stored,
    the module's own code takes the dequantised ones, expert by expert."""
    rows = _random_rows(module, k, count)
    with _implementation(module, "eager"):
        wanted = module.forward(*rows)
    check_size(fused_experts(module, *rows), wanted, _TOLERANCE[module.down_proj.dtype], f", at {count} rows")


def _tiles_of(module: Any) -> tuple[Tiles, ...]:
    from fdasync_kernels.chip import chip_of
    from fdasync_kernels.experts.chain import fits_bulk
    from fdasync_kernels.experts.tiles import all_stored_tiles, all_tiles

    described: Description = module.fd_experts
    up, down = _up_of(module), module.down_proj
    large = chip_of(down.device).large
    if isinstance(down, Kept):
        bulk = large and not described.interleaved and up.stored.fits_bulk and down.stored.fits_bulk
        return all_stored_tiles(gated=described.gated, bulk=bulk)
    bulk = fits_bulk(up, down, described.transposed, described.interleaved)
    return all_tiles(down.dtype, large=large, bulk=bulk)


def _random_rows(module: Any, k: int, count: int) -> Rows:
    """Hidden states, ids and weights; by a generator of its own, which leaves the global random state alone."""
    down: torch.Tensor | Kept = module.down_proj
    width = down.shape[2] if module.is_transposed else down.shape[1]
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn((count, width), generator=make).to(down.device, down.dtype)
    ids = torch.rand((count, len(down)), generator=make).topk(k, dim=-1).indices.to(down.device)
    return hidden, ids, torch.rand((count, k), generator=make).to(down.device, down.dtype)


@contextmanager
def _implementation(module: Any, name: str) -> Iterator[None]:
    """The library's own experts of this name, for one module's config, within the context."""
    config = module.config
    before = config._experts_implementation
    config._experts_implementation = name
    try:
        yield
    finally:
        config._experts_implementation = before
