"""Checks at start-up that a model computes right on flattened, paged batches.

Flattened batches are silently wrong for models that carry state or depend on their batch, and no config field says so.
So a few sequences run first through the plain model, one by one, and then through the runner's own step, mixed, in
chunks and over scattered blocks; logits and routing must agree. Knows no requests. Called by `open_model.py`; the steps
are run by `same_bits.py` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fdasync.cache.aux import ROUTING
from fdasync.errors import UnsupportedModel
from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.input_batch import InputBatch
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.capture.aux_producer import AuxSource
from fdasync_transformers.capture.routing import RoutingCapture
from fdasync_transformers.model.kv import KVPool

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers

# tokens of each sequence by step: prefill beside single tokens, one sequence joining late
_CHUNKS = ((4, 1, 0, 1), (9, 11, 1, 1), (0, 23, 16, 1))
# tokens of the further steps of the last sequence, where it must be longer
_CHUNK_TOKENS = 32

# relative error of a position's logits, and the share of positions that may exceed it: in half precision a
# near tie in a router may fall either way and change a position for good
_TOLERANCE = {
    torch.float64: (2e-3, 0.02),
    torch.float32: (2e-3, 0.02),
    torch.bfloat16: (0.2, 0.25),
    torch.float16: (0.1, 0.25),
}
# least share of (position, layer) whose set of experts is the same
_AGREEMENT = {torch.float64: 0.99, torch.float32: 0.99, torch.bfloat16: 0.85, torch.float16: 0.85}

# why the figure of routing is below 100 %, for people
_OTHER_EXPERTS = (
    "elsewhere other experts were as good up to rounding, which depends on the batch; a result has those that its own"
    " step took"
)
_GREEDY = SamplerSpec(prompt_len=0)


@dataclass(frozen=True)
class Reference:
    """The plain model's answers.

    Attributes:
        chunks: tokens of each sequence by step.
        tokens: int32 token ids of each sequence.
        logits: float32 [length, V] of each sequence.
        routing: [length, layers, k] of each sequence; empty for a dense model.
    """

    chunks: tuple[tuple[int, ...], ...]
    tokens: tuple[NDArray[np.int32], ...]
    logits: tuple[torch.Tensor, ...]
    routing: tuple[NDArray[np.generic], ...]


def plain_passes(
    model: PreTrainedModel, layers: MoELayers | None, max_context_tokens: int, longest_tokens: int = 0
) -> Reference:
    """Run each sequence alone through the model as the library made it: call it before mends and paged attention.

    One sequence has at least `longest_tokens`, if the context allows it. Raises UnsupportedModel for logits that are
    not finite, with which nothing can be compared.
    """
    vocab = int(model.config.vocab_size)
    random = np.random.default_rng(20250)
    chunks = _chunks(longest_tokens)
    lengths = [min(sum(counts), max_context_tokens) for counts in chunks]
    tokens = tuple(random.integers(0, vocab, length).astype(np.int32) for length in lengths)
    capture = None if layers is None else RoutingCapture(ROUTING, AuxSource(model, layers))
    if capture is not None:
        capture.attach(max(lengths))
    logits, routing = [], []
    try:
        for ids in tokens:
            if capture is not None:
                capture.begin()
            with torch.inference_mode():
                out = model(input_ids=torch.from_numpy(ids.astype(np.int64)).to(model.device)[None], use_cache=False)
            logits.append(out.logits[0].float())
            if not logits[-1].isfinite().all():
                raise UnsupportedModel(
                    str(model.config.model_type),
                    f"its logits are not finite in {str(model.dtype).removeprefix('torch.')}, also without paging: its"
                    " weights are infinite or NaN, or too large for this dtype",
                )
            if capture is not None:
                routing.append(capture.rows(len(ids)).copy())
    finally:
        if capture is not None:
            capture.close()
    return Reference(chunks, tokens, tuple(logits), tuple(routing))


def check(
    step_model: StepModel,
    layers: MoELayers | None,
    routers: FusedRouters | None,
    reference: Reference,
    block_tokens: int,
) -> str:
    """Run the same sequences through paged steps and compare. Returns the figures, for people.

    `layers`: those whose routing is compared; `routers`: of the model, where they are fused.

    Raises UnsupportedModel with the figures if they disagree by more than the dtype explains.
    """
    model = step_model.model
    most_tokens = max(map(sum, zip(*reference.chunks, strict=True)))
    capture = None if layers is None else RoutingCapture(ROUTING, AuxSource(model, layers, routers))
    step_model.aux = AuxData(() if capture is None else (capture,))
    step_model.aux.attach(most_tokens)
    try:
        logits, routing = paged_passes(step_model, capture, reference, block_tokens)
    finally:
        step_model.aux.close()
        step_model.aux = AuxData()
    tolerance, share = _TOLERANCE[model.dtype]
    errors = torch.cat([_relative_error(a, b) for a, b in zip(logits, reference.logits, strict=True)])
    wrong = float((~(errors <= tolerance)).float().mean())
    figures = f"self-check: relative logit error {float(errors.median()):.1e} median, {float(errors.max()):.1e} worst"
    agreement = 1.0
    if reference.routing:
        same = [_same_sets(a, b) for a, b in zip(routing, reference.routing, strict=True)]
        agreement = float(np.concatenate(same).mean())
        figures += f", routing equal at {agreement:.2%}"
    if wrong > share or agreement < _AGREEMENT[model.dtype]:
        raise UnsupportedModel(
            str(model.config.model_type),
            f"a mixed paged batch differs from separate sequences at {wrong:.0%} of positions ({figures})",
        )
    return explained(figures, agreement)


def explained(figures: str, agreement: float) -> str:
    """The figures of a model that will serve, with the reason where its routing was not equal everywhere."""
    return figures if agreement == 1 else f"{figures}; {_OTHER_EXPERTS}"


def _chunks(longest_tokens: int) -> tuple[tuple[int, ...], ...]:
    """`_CHUNKS`, with further chunks before the last token of the last sequence."""
    *others, last = _CHUNKS
    more = -(-max(0, longest_tokens - sum(last)) // _CHUNK_TOKENS)
    return (*((*counts, *(0,) * more) for counts in others), (*last[:-1], *(_CHUNK_TOKENS,) * more, last[-1]))


def paged_passes(
    step_model: StepModel, capture: RoutingCapture | None, reference: Reference, block_tokens: int
) -> tuple[list[torch.Tensor], list[NDArray[np.generic]]]:
    """Run the sequences in chunks, over scattered blocks: float32 logits and routing of each; no routing without
    `capture`."""
    needed = [-(-len(ids) // block_tokens) for ids in reference.tokens]
    order = np.random.default_rng(7).permutation(sum(needed) + 2)
    pool = KVPool(step_model.layout, len(order), block_tokens, step_model.model.device)
    # no step may read what an earlier owner of a block left in it
    pool.blocks.fill_(float("nan"))
    table = InputBatch(len(needed), max(needed) * block_tokens, block_tokens, len(order))
    step_model.states = step_model.make_states(len(needed))
    logits: list[list[torch.Tensor]] = [[] for _ in needed]
    routing: list[list[NDArray[np.generic]]] = [[] for _ in needed]
    done = [0] * len(needed)
    decoding: list[int] = []
    used = 0
    all_chunks = reference.chunks
    for number in range(len(all_chunks[0])):
        counts = [min(all_chunks[key][number], len(ids) - done[key]) for key, ids in enumerate(reference.tokens)]
        decodes = [key for key in decoding if counts[key] > 0]
        starts: list[SeqStart] = []
        chunks: list[Chunk] = []
        for key, ids in enumerate(reference.tokens):
            if counts[key] <= 0 or key in decoding:
                continue
            if done[key] == 0:
                blocks = tuple(order[used : used + needed[key]].tolist())
                used += needed[key]
                starts.append(
                    SeqStart(
                        key=key,
                        tokens=ids.astype("<i4").tobytes(),
                        num_cached=0,
                        blocks=blocks,
                        slots=(),
                        generations=(),
                        sampler=_GREEDY,
                    )
                )
            # the tokens after this chunk come one by one, as decodes
            chunks.append(Chunk(key, counts[key], max(all_chunks[key][number + 1 :], default=0) <= 1))
        rows_of = [*decodes, *[chunk.key for chunk in chunks]]
        if not rows_of:
            continue
        skips = tuple(key for key in decoding if key not in decodes)
        batch = table.plan(RunStep(number, starts=tuple(starts), skips=skips, chunks=tuple(chunks)))
        decoding += [chunk.key for chunk in chunks if chunk.last]
        total = sum(counts[key] for key in rows_of)
        out = step_model.run(batch, table, pool, np.arange(total)).float()
        rows = None if capture is None else capture.rows(total).copy()
        first = 0
        for key in rows_of:
            logits[key].append(out[first : first + counts[key]])
            if rows is not None:
                routing[key].append(rows[first : first + counts[key]])
            first += counts[key]
            done[key] += counts[key]
    return [torch.cat(parts) for parts in logits], [np.concatenate(parts) for parts in routing if parts]


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Per position, the distance over the spread, which does not change with a constant added to all logits."""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    error: torch.Tensor = (got - wanted).norm(dim=-1) / spread.clamp_min(1e-6)
    return error


def _same_sets(got: NDArray[np.generic], wanted: NDArray[np.generic]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (np.sort(got, axis=-1) == np.sort(wanted, axis=-1)).all(axis=-1)
    return same.ravel()
