"""Describes the experts of a module, and compares what the kernels make of them with the module's own code.

What stands between the two products is found by trying the kernels' activations on rows against the module's own; the
whole is compared with the module's own forward on random rows, in the tiles of every regime. Called by `experts.py`, at
start-up.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.limits import MOST_EXPERTS

from fdasync_transformers.fused.experts_interface import Description, fused_experts, run_experts
from fdasync_transformers.model.kept.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_kernels.experts.activation import Activation
    from fdasync_kernels.experts.tiles import Tiles

    from fdasync_transformers.fused.live_rows import LiveRows

# rows of the comparisons: few, whose pairs are not grouped, and many
_CHECK_ROWS = (3, 40)
# most distance of all results from the module's own, over their size: both round, at the same places but for one
_TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# rows of the activation's proof, and their spread: most are of common size, some far beyond every limit
_ACTIVATION_ROWS, _ACTIVATION_WIDTH = 96, 64


def compare(module: Any, k: int, live: LiveRows, notes: list[str] | None) -> str:
    """Describe a module and compare it; returns why it keeps the library's experts, or "". `notes`: try the tiles of
    every regime too, and add what people should know; None: another module of the class was tried."""
    problem = _describe(module, live) or _difference(module, k)
    if problem or notes is None:
        return problem
    problem, same = _regimes(module, k)
    if not same:
        notes.append(f"experts ({type(module).__name__}): a row's bits depend on how many run beside it on this device")
    return problem


def _describe(module: Any, live: LiveRows) -> str:
    """Set the module's description; returns why it has none, or ""."""
    gated = getattr(module, "has_gate", None)
    if gated is None:
        return "does not take the library's experts interface"
    if getattr(module, "has_post_expert_norm", False):
        return "has a norm behind each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "is spread over devices"
    up = getattr(module, "gate_up_proj" if gated else "up_proj", None)
    if not isinstance(up, torch.Tensor | Kept) or up.dim() != 3 or up.dtype not in _TOLERANCE:
        return "has no experts' weights in three dimensions"
    if len(up) > MOST_EXPERTS:
        return f"has {len(up)} experts, more than the kernels take"
    activation = _activation_of(module, gated, up)
    if activation is None:
        return "has an activation that the kernels do not know"
    interleaved = gated and not module.is_concatenated
    transposed = module.is_transposed and not isinstance(up, Kept)
    module.fd_experts = Description(activation, gated, module.has_bias, transposed, interleaved, live)
    return ""


def _candidates(module: Any, gated: bool) -> list[Activation]:
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


@torch.inference_mode()
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
    for activation in _candidates(module, gated):
        ours = activation_of(rows, activation, gated=gated, interleaved=gated and not module.is_concatenated)
        if bool(((ours.float() - wanted.float()).abs() <= room + (3 * eps + 1e-5) * wanted.float().abs()).all()):
            same = float((ours == wanted).float().mean())
            if best is None or same > best[0]:
                best = same, activation
    return None if best is None else best[1]


@torch.inference_mode()
def _difference(module: Any, k: int) -> str:
    """How the described experts differ from the module's own forward on random rows; "" if they do not. Of weights that
    are kept as stored, the module's own code takes the dequantised ones, expert by expert."""
    dtype = module.down_proj.dtype
    for count in _CHECK_ROWS:
        rows = _random_rows(module, k, count)
        with _implementation(module, "eager"):
            wanted = module.forward(*rows).float()
        ours = fused_experts(module, *rows).float()
        distance = float((ours - wanted).norm() / wanted.norm())
        if not distance <= _TOLERANCE[dtype]:
            return f"gives other results ({distance:.1e} of their size, at {count} rows)"
    return ""


@torch.inference_mode()
def _regimes(module: Any, k: int) -> tuple[str, bool]:
    """Why the tiles of some regime cannot be used, or ""; and whether all give the same bits.

    In Triton's interpreter a product is numpy's, whose order of sums goes by its shape: there bits say nothing.
    """
    down: torch.Tensor | Kept = module.down_proj
    rows = _random_rows(module, k, _CHECK_ROWS[-1])
    wanted = fused_experts(module, *rows)
    same = True
    for tiles in _tiles_of(module):
        ours = run_experts(module, *rows, tiles=tiles)
        distance = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
        if not distance <= _TOLERANCE[down.dtype]:
            return f"gives other results with {tiles} ({distance:.1e} of their size)", False
        same = same and torch.equal(ours, wanted)
    return "", same or down.device.type == "cpu"


def _tiles_of(module: Any) -> tuple[Tiles, ...]:
    from fdasync_kernels.chip import chip_of
    from fdasync_kernels.experts.chain import fits_bulk
    from fdasync_kernels.experts.tiles import all_stored_tiles, all_tiles

    described: Description = module.fd_experts
    up, down = module.gate_up_proj if described.gated else module.up_proj, module.down_proj
    large = chip_of(down.device).large
    if isinstance(down, Kept):
        bulk = large and not described.interleaved and up.stored.fits_bulk and down.stored.fits_bulk
        return all_stored_tiles(gated=described.gated, bulk=bulk)
    bulk = fits_bulk(up, down, described.transposed, described.interleaved)
    return all_tiles(down.dtype, large=large, bulk=bulk)


def _random_rows(module: Any, k: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
