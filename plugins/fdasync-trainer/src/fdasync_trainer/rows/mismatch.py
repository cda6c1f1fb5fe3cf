"""How far a trainer's pass over a rollout is from the rollout: the figures that RL teams watch, and a table of them.

The figures come from log-probs of the same sampled tokens, and from expert rows of the same positions. The mean of a
batch is of an unrounded sum; the order of merging batches may change the last bits. Plain numpy; knows no engine and no
trainer. Called by users, and by benchmarks of replay.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fdasync.errors import BadInput
from fdasync.result import Routing
from fdasync_trainer.rows.checks import RoutingLayout, check_layout, check_routing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

# a log-softmax in low precision may end a little above 0
_MOST_LOGPROB = 1e-3
# below this difference the closed form loses digits, above it the series does
_SERIES_BELOW = 0.05
_PART_CELLS = 1 << 20


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and means of one or more batches; the figures are properties. Made by `mismatch`.

    Figures of rows are None where no rows were given.

    Attributes:
        tokens: tokens whose log-probs were compared.
        k3_mean: over all tokens, of the K3 terms that are finite.
        k3_infinite: terms that no float64 holds (a log-prob of -inf, or a difference above 709), not in the mean.
        extreme_tokens: tokens whose probabilities differ by a ratio above `tau`, either way.
        tau: the ratio of `extreme_tokens`.
        rows: positions whose rows were compared.
        row_layers: routers of these positions: (position, MoE layer) pairs.
        row_picks: picks of these routers.
        differing_rows: positions with another set of experts in at least one layer.
        differing_layers: routers with another set of experts.
        differing_picks: picks of the rollout that the trainer did not make.
    """

    tokens: int
    k3_mean: float
    k3_infinite: int
    extreme_tokens: int
    tau: float
    rows: int = 0
    row_layers: int = 0
    row_picks: int = 0
    differing_rows: int = 0
    differing_layers: int = 0
    differing_picks: int = 0

    @property
    def k3(self) -> float:
        """K3 estimate of KL(rollout || trainer), in nats: mean of exp(d) - d - 1, d = trainer - rollout log-prob.

        Schulman's third estimator (joschu.net/blog/kl-approx.html), which arXiv 2510.11370 reports: never below 0,
        unbiased for tokens that the rollout drew. Nothing is clipped; inf if any term is inf.
        """
        return math.inf if self.k3_infinite else self.k3_mean

    @property
    def extreme_share(self) -> float:
        """Share of tokens with a probability ratio above tau."""
        return self.extreme_tokens / self.tokens

    @property
    def differing_picks_share(self) -> float | None:
        """Share of the rollout's picks that the trainer did not make."""
        return self.differing_picks / self.row_picks if self.row_picks else None

    @property
    def differing_layers_share(self) -> float | None:
        """Share of routers, (token, layer) pairs, that chose another set of experts."""
        return self.differing_layers / self.row_layers if self.row_layers else None

    @property
    def differing_tokens_share(self) -> float | None:
        """Share of positions with another set of experts in at least one layer."""
        return self.differing_rows / self.rows if self.rows else None

    @property
    def differing_layers_per_token(self) -> float | None:
        """Mean number of layers with another set of experts."""
        return self.differing_layers / self.rows if self.rows else None

    def merge(self, other: Mismatch) -> Mismatch:
        """The figures of both batches together. Raises BadInput for another tau."""
        if self.tau != other.tau:
            raise BadInput("tau", f"{other.tau} cannot be merged with {self.tau}")
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        summed = {name: value + theirs[name] for name, value in mine.items() if isinstance(value, int)}
        # weighted means: a sum of large terms may overflow a float64
        tokens = self.tokens + other.tokens
        mean = self.k3_mean * (self.tokens / tokens) + other.k3_mean * (other.tokens / tokens)
        return Mismatch(**{**mine, **summed, "tau": self.tau, "k3_mean": mean})


def mismatch(
    rollout_logprobs: ArrayLike | Sequence[ArrayLike],
    trainer_logprobs: ArrayLike | Sequence[ArrayLike],
    *,
    mask: ArrayLike | Sequence[ArrayLike] | None = None,
    rollout_routing: Routing | Sequence[Routing | None] | None = None,
    trainer_routing: Routing | Sequence[Routing | None] | None = None,
    tau: float = 2.0,
) -> Mismatch:
    """Compare a batch.

    Args:
        rollout_logprobs, trainer_logprobs: log-probs (natural) of the sampled tokens: one sample [n], a padded batch
            [samples, n], or a sequence of samples [n_i] of any lengths, 0 among them; both of the same shapes. Arrays,
            lists, or CPU tensors that numpy can view: detached, and no bfloat16 (give `tensor.detach().float()`).
            Compared as float64.
        mask: of the same shapes, bools or 0 and 1: which tokens count; None for all. The log-probs of other tokens may
            be anything.
        rollout_routing, trainer_routing: rows, one Routing or one per sample; both or neither. Compared at the
            positions that both have, prompt included, whatever the mask. A sample of 0 tokens, aborted early, may have
            None or rows without a common position, and then adds nothing.
        tau: probability ratio above which a token is extreme; a number above 1.

    Raises:
        BadInput: shapes that differ, no token to compare, a log-prob that is NaN, above 0, or -inf on both sides; a
            mask of other values; rows as in `check_routing`, of other layers, experts or top_k, or with no position in
            common; tau not above 1.
    """
    number = isinstance(tau, int | float | np.integer | np.floating)
    if not number or not tau > 1 or not _is_finite(tau):
        raise BadInput("tau", f"{tau!r} is out of range", limit="a number above 1")
    rollout = _samples(rollout_logprobs, "rollout_logprobs")
    trainer = _samples(trainer_logprobs, "trainer_logprobs")
    _check_shapes(rollout, trainer, "trainer_logprobs")
    empty = {at for at, one in enumerate(rollout) if not one.size}
    masks = None if mask is None else _samples(mask, "mask")
    if masks is not None:
        _check_shapes(rollout, masks, "mask")
        chosen = [_bools(one) for one in masks]
        rollout = [sample[keep] for sample, keep in zip(rollout, chosen, strict=True)]
        trainer = [sample[keep] for sample, keep in zip(trainer, chosen, strict=True)]
    terms, far = _k3_terms(_joined(rollout), _joined(trainer), math.log(tau))
    finite = np.isfinite(terms)
    if (rollout_routing is None) != (trainer_routing is None):
        raise BadInput("trainer_routing" if trainer_routing is None else "rollout_routing", "is missing")
    rows = {} if rollout_routing is None or trainer_routing is None else _rows(rollout_routing, trainer_routing, empty)
    return Mismatch(
        tokens=terms.size,
        k3_mean=math.fsum(terms[finite] / terms.size),
        k3_infinite=int(terms.size - finite.sum()),
        extreme_tokens=far,
        tau=float(tau),
        **rows,
    )


def table(figures: Mapping[str, Mismatch], *, title: str = "rollout and trainer") -> str:
    """A text table with a row for each: `table({"replay off": ..., "replay on": ...})`; "-": rows not given.

    Raises BadInput for no rows.
    """
    if not figures:
        raise BadInput("figures", "is empty")
    taus = sorted({one.tau for one in figures.values()})
    # names and title are text, not markup
    drawn = Table(title=Text(title))
    drawn.add_column("")
    ratio = f"ratio > {', '.join(f'{tau:g}' for tau in taus)}"
    for column in ("tokens", "K3 KL", ratio, "picks differ", "routers differ", "tokens differ", "layers/token"):
        drawn.add_column(column, justify="right")
    for name, one in figures.items():
        drawn.add_row(
            Text(name),
            f"{one.tokens:,}",
            f"{one.k3:.3e}",
            _percent(one.extreme_share),
            _percent(one.differing_picks_share),
            _percent(one.differing_layers_share),
            _percent(one.differing_tokens_share),
            "-" if one.differing_layers_per_token is None else f"{one.differing_layers_per_token:.3f}",
        )
    # wide enough for any name: a figure must not be cut
    width = 120 + max(len(name) for name in figures)
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3f}%"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _samples(given: Any, field: str) -> list[NDArray[np.float64]]:
    """One float64 array [n] for each sample."""
    ragged = isinstance(given, list | tuple) and any(np.ndim(one) for one in given)
    try:
        arrays = [np.asarray(one, np.float64) for one in given] if ragged else [np.asarray(given, np.float64)]
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "of a tensor, give tensor.detach().float().cpu()" if _has_tensor(given) else ""
        raise BadInput(field, f"cannot be read as numbers: {error}", hint=hint) from None
    if not ragged and arrays[0].ndim == 2:
        arrays = list(arrays[0])
    wrong = next((at for at, one in enumerate(arrays) if one.ndim != 1), None)
    if wrong is not None:
        problem = f"sample {wrong} has {arrays[wrong].ndim} axes"
        raise BadInput(field, problem, limit="[n], [samples, n], or a list of [n]")
    return arrays


def _has_tensor(given: Any) -> bool:
    # by a method of tensors: this module does not import torch
    return any(hasattr(one, "detach") for one in (given, *(given if isinstance(given, list | tuple) else ())))


def _check_shapes(one: list[NDArray[Any]], two: list[NDArray[Any]], field: str) -> None:
    if len(one) != len(two):
        raise BadInput(field, f"{len(two)} samples for {len(one)}")
    for at, (left, right) in enumerate(zip(one, two, strict=True)):
        if left.shape != right.shape:
            raise BadInput(field, f"sample {at} has {right.size} entries for {left.size} tokens")


def _joined(samples: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(samples) if samples else np.zeros(0)


def _bools(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    if not np.isin(values, (0, 1)).all():
        raise BadInput("mask", "holds other values than 0 and 1")
    chosen: NDArray[np.bool_] = values != 0
    return chosen


def _k3_terms(
    rollout: NDArray[np.float64], trainer: NDArray[np.float64], log_tau: float
) -> tuple[NDArray[np.float64], int]:
    """exp(d) - d - 1 of each token, to a few units in the last place, and the number of |d| above `log_tau`."""
    if not rollout.size:
        raise BadInput("rollout_logprobs", "no token counts", hint="an empty batch has no figures; leave it out")
    for values, field in ((rollout, "rollout_logprobs"), (trainer, "trainer_logprobs")):
        if np.isnan(values).any():
            raise BadInput(field, f"token {int(np.argmax(np.isnan(values)))} of those that count is NaN")
        if values.max() > _MOST_LOGPROB:
            raise BadInput(field, f"{float(values.max())!r} is no log-prob", limit="0 or less")
    both = np.isneginf(rollout) & np.isneginf(trainer)
    if both.any():
        raise BadInput("trainer_logprobs", f"token {int(np.argmax(both))} of those that count is -inf on both sides")
    d = trainer - rollout
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.where(np.isinf(d), np.inf, np.expm1(d) - d)
    small = np.abs(d) < _SERIES_BELOW
    x = d[small]
    series = np.ones_like(x)
    for k in range(10, 2, -1):
        series = 1 + x / k * series
    terms[small] = x * x / 2 * series
    return terms, int((np.abs(d) > log_tau).sum())


def _rows(
    rollout: Routing | Sequence[Routing | None], trainer: Routing | Sequence[Routing | None], empty: set[int]
) -> dict[str, int]:
    """The counts of a `Mismatch`; samples of the indices `empty` need no rows."""
    ones = [rollout] if isinstance(rollout, Routing) else list(rollout)
    twos = [trainer] if isinstance(trainer, Routing) else list(trainer)
    if len(ones) != len(twos):
        raise BadInput("trainer_routing", f"rows of {len(twos)} samples for {len(ones)}")
    counts = dict.fromkeys(
        ("rows", "row_layers", "row_picks", "differing_rows", "differing_layers", "differing_picks"), 0
    )
    for at, (one, two) in enumerate(zip(ones, twos, strict=True)):
        if at in empty and (one is None or two is None):
            continue
        layout = check_routing(one, f"rollout_routing[{at}]")  # type: ignore[arg-type]  # refuses None
        theirs = check_routing(two, f"trainer_routing[{at}]")  # type: ignore[arg-type]  # refuses None
        assert one is not None
        assert two is not None
        check_layout(theirs, layout, f"trainer_routing[{at}]", "the rollout")
        start = max(one.start, two.start)
        stop = min(one.start + one.array.shape[0], two.start + two.array.shape[0])
        if stop <= start and at in empty:
            continue
        if stop <= start:
            problem = f"sample {at} has no position in common with the rollout's rows"
            raise BadInput("trainer_routing", problem)
        left = one.array[start - one.start : stop - one.start]
        right = two.array[start - two.start : stop - two.start]
        _compare(left, right, layout, counts)
    return counts


def _compare(left: NDArray[Any], right: NDArray[Any], layout: RoutingLayout, counts: dict[str, int]) -> None:
    layers, top_k = left.shape[1:]
    counted = layout.counted
    picks = layers * top_k if counted is None else int(counted.sum())
    step = max(_PART_CELLS // (layers * top_k), 1)
    for first in range(0, left.shape[0], step):
        ours = np.ascontiguousarray(left[first : first + step].transpose(2, 0, 1))
        theirs = np.ascontiguousarray(right[first : first + step].transpose(2, 0, 1))
        differing = np.zeros(ours.shape[1:], np.int64)
        for one in range(top_k):
            found = np.zeros(ours.shape[1:], np.bool_)
            for two in range(top_k):
                same = ours[one] == theirs[two]
                found |= same if counted is None else same & counted[:, two]
            differing += ~found if counted is None else ~found & counted[:, one]
        wrong = differing > 0
        counts["rows"] += ours.shape[1]
        counts["row_layers"] += ours.shape[1] * layers
        counts["row_picks"] += ours.shape[1] * picks
        counts["differing_rows"] += int(wrong.any(axis=1).sum())
        counts["differing_layers"] += int(wrong.sum())
        counts["differing_picks"] += int(differing.sum())
