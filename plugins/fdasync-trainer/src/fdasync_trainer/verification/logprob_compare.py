"""Compares two tables of log-probs bit by bit, and says where they part first.

Pure arithmetic on arrays; knows no model and no file. Called by `fdasync verify-trainer` and by users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import BadInput
from fdasync_trainer.verification.logprob_table import checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync_trainer.verification.logprob_table import LogprobTable, ScoredSequence


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The first token whose log-probs differ.

    Attributes:
        request_id, sample: its sequence.
        position: of the token, from 0; its log-prob comes from the position before.
        token_id: at that position.
        rollout, trainer: the two log-probs; the rollout's may be NaN; None: the trainer tells no number.
        ulps: float32 numbers from one to the other; None where a side has no number.
        version: label of the rollout's weights; "": not told.
        layer: first decoder layer whose output differs at any position before; -1: none does; None: a side tells no
            digests.
        layer_position: first position at which that layer's output differs.
    """

    request_id: str
    sample: int
    position: int
    token_id: int
    rollout: float
    trainer: float | None
    ulps: int | None
    version: str
    layer: int | None = None
    layer_position: int | None = None


class LogprobComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two tables agree in.

    Attributes:
        sequences, tokens: of the rollout; tokens that have a log-prob.
        differing: tokens that both sides have, with other bits.
        missing: tokens that the trainer has no number for.
        not_numbers: tokens whose log-prob is NaN at the rollout, which no finite logits give: never equal, whatever the
            trainer has.
        other_weights: tokens that both sides have, by weights of different fingerprints.
        largest_ulps: largest difference, in float32 numbers from one to the other.
        largest_difference: largest difference of the values.
        first: where they part first, in the rollout's order; None: nowhere.
    """

    sequences: int
    tokens: int
    differing: int
    missing: int
    not_numbers: int
    other_weights: int
    largest_ulps: int
    largest_difference: float
    first: Parting | None = None

    @property
    def ok(self) -> bool:
        """All log-probs have equal bits, by equal weights; never of no tokens."""
        bad = self.differing + self.missing + self.not_numbers + self.other_weights
        return self.tokens > 0 and not bad

    def as_dict(self) -> dict[str, Any]:
        """Plain types, `ok` included."""
        return {"ok": self.ok, **msgspec.to_builtins(self)}


def ulps_between(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.int64]:
    """How many float32 numbers lie from one to the other, entry by entry; 0 and -0 are one number."""

    def place(values: NDArray[np.float32]) -> NDArray[np.int64]:
        bits = values.astype(np.float32, copy=False).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    apart: NDArray[np.int64] = np.abs(place(one) - place(other))
    return apart


def compare_logprobs(rollout: LogprobTable, trainer: LogprobTable) -> LogprobComparison:
    """Compare the log-probs that the rollout tells; sequences of the trainer alone do not count.

    Raises BadInput where the sides have other tokens or temperatures for a sequence of one name.
    """
    checked(rollout, "rollout")
    theirs = {one.name: one for one in checked(trainer, "trainer").sequences}
    counts = dict.fromkeys(("tokens", "differing", "missing", "not_numbers", "other_weights", "largest_ulps"), 0)
    largest, first = 0.0, None
    for ours in rollout.sequences:
        other = theirs.get(ours.name)
        if other is not None:
            _check_same(ours, other)
        told = ours.told
        nan = told & np.isnan(ours.logprobs)
        counts["tokens"] += int(told.sum())
        counts["not_numbers"] += int(nan.sum())
        values = np.full(len(told), np.nan, np.float32) if other is None else other.logprobs
        both = told & ~np.isnan(values)
        wrong = both & ~nan & (ours.logprobs.view(np.uint32) != np.ascontiguousarray(values).view(np.uint32))
        counts["differing"] += int(wrong.sum())
        counts["missing"] += int((told & ~both).sum())
        if other is not None:
            counts["other_weights"] += int((both & _other_weights(rollout, ours, trainer, other)).sum())
        if wrong.any():
            ulps = ulps_between(ours.logprobs[wrong], values[wrong])
            counts["largest_ulps"] = max(counts["largest_ulps"], int(ulps.max()))
            apart = np.abs(ours.logprobs[wrong].astype(np.float64) - values[wrong])
            largest = max(largest, float(apart.max()))
        bad = wrong | nan | (told & ~both)
        if first is None and bad.any():
            first = _parting(rollout, ours, values, other, int(np.argmax(bad)))
    return LogprobComparison(sequences=len(rollout.sequences), **counts, largest_difference=largest, first=first)


def _check_same(ours: ScoredSequence, other: ScoredSequence) -> None:
    where = f"trainer: request {ours.request_id} sample {ours.sample}"
    if len(ours.token_ids) != len(other.token_ids):
        raise BadInput(where, f"has {len(other.token_ids)} tokens, the rollout has {len(ours.token_ids)}")
    wrong = np.flatnonzero(ours.token_ids != other.token_ids)
    if wrong.size:
        at = int(wrong[0])
        raise BadInput(where, f"has token {other.token_ids[at]} at {at}, the rollout has {ours.token_ids[at]}")
    if ours.temperature != other.temperature:
        raise BadInput(where, f"is at temperature {other.temperature}, the rollout's at {ours.temperature}")


def _other_weights(
    rollout: LogprobTable, ours: ScoredSequence, trainer: LogprobTable, other: ScoredSequence
) -> NDArray[np.bool_]:
    """Tokens that both sides name weights for, of different fingerprints."""

    def ids(table: LogprobTable, one: ScoredSequence) -> NDArray[Any]:
        # the last entry is that of -1
        return np.array([*(name.weights_id for name in table.weights), ""], dtype=object)[one.weights]

    mine, its = ids(rollout, ours), ids(trainer, other)
    different: NDArray[np.bool_] = (mine != "") & (its != "") & (mine != its)
    return different


def _parting(
    rollout: LogprobTable, ours: ScoredSequence, values: NDArray[np.float32], other: ScoredSequence | None, at: int
) -> Parting:
    there = not np.isnan(values[at])
    numbers = there and not np.isnan(ours.logprobs[at])
    number = int(ours.weights[at])
    layer = place = None
    if other is not None and ours.digests is not None and other.digests is not None:
        layer, place = _first_layer(ours.digests[:at], other.digests[:at])
    return Parting(
        request_id=ours.request_id,
        sample=ours.sample,
        position=at,
        token_id=int(ours.token_ids[at]),
        rollout=float(ours.logprobs[at]),
        trainer=float(values[at]) if there else None,
        ulps=int(ulps_between(ours.logprobs[at : at + 1], values[at : at + 1])[0]) if numbers else None,
        version="" if number < 0 else rollout.weights[number].version,
        layer=layer,
        layer_position=place,
    )


def _first_layer(ours: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> tuple[int, int | None]:
    if ours.shape != theirs.shape:
        raise BadInput("trainer", f"has digests of {theirs.shape[1]} layers, the rollout has {ours.shape[1]}")
    wrong = ours != theirs
    layers = np.flatnonzero(wrong.any(axis=0))
    if not layers.size:
        return -1, None
    return int(layers[0]), int(np.argmax(wrong[:, layers[0]]))
