"""Plans a step's sampling on the host, before the logits exist.

Makes a `SamplePlan` of the rows' `SamplerSpec`s and positions: the rows of each stage, and every number that the device
needs, as numpy arrays that can be sent in one copy. Draws the noise. numpy only; knows nothing of torch, logits or the
width of the vocabulary. Called by the executors before they launch a step; pure, no state.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.request import SamplerSpec

#: name of the masks of grammars among the arrays: int32 [rows under a grammar, words]; they follow the plan, since they
#: depend on the tokens of the step before
MASKS = "masks"
_NOISE_KEY = Layout("<QQQ")


class Pick(msgspec.Struct, frozen=True):
    """Some rows of a table, ascending.

    Attributes:
        name: of the index array in `SamplePlan.arrays`; "" where all rows of the table, or none, are picked.
        count: how many rows; a pick of none has no arrays.
    """

    name: str = ""
    count: int = 0


_NO_ROWS = Pick()


class Report(msgspec.Struct, frozen=True):
    """The alternatives that are read from one table of log-probs.

    Attributes:
        tops: rows of the table whose alternatives are wanted.
        ks: name of their array in `SamplePlan.arrays`: int64, how many alternatives of each row.
        top_rows: the same rows by their number in the batch.
    """

    tops: Pick = _NO_ROWS
    ks: str = ""
    top_rows: tuple[int, ...] = ()


class SamplePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step's sampling; made by `plan_samples`.

    Attributes:
        count: rows, N.
        arrays: the numbers for the device; the caller sends them, and gives them to `compute_samples` as tensors of
            the same names, shapes and dtypes (int64, float32 or float64; none is empty). Empty dict: nothing to send.
        longest: known tokens of the longest row with a penalty; 0 where no row has one.
        penalised, biased, stopped, masked, random: rows of the batch with a penalty; with a logit bias; under a stop
            mask; under a grammar, whose masks the caller adds to the arrays (`MASKS`); with a temperature above 0.
        raw: rows of the batch that ask for raw log-probs.
        greedy: rows of the batch without temperature that ask for processed log-probs.
        top_k, top_p: rows of `random` with that filter.
        most: the largest top_k.
        processed: whether a row of `random` asks for processed log-probs.
        drawn_report, greedy_report, raw_report: alternatives, in this order.
        most_tops: most alternatives of a row.
        raw_rows, random_rows, greedy_rows: int64, the rows by number, for reading.
        asked: bool [N], rows that ask for processed log-probs.
    """

    count: int
    arrays: dict[str, np.ndarray[Any, Any]]
    longest: int
    penalised: Pick
    biased: Pick
    stopped: Pick
    masked: Pick
    random: Pick
    raw: Pick
    greedy: Pick
    top_k: Pick
    top_p: Pick
    most: int
    processed: bool
    drawn_report: Report
    greedy_report: Report
    raw_report: Report
    most_tops: int
    raw_rows: np.ndarray[Any, Any]
    random_rows: np.ndarray[Any, Any]
    greedy_rows: np.ndarray[Any, Any]
    asked: np.ndarray[Any, Any]

    @property
    def needs_history(self) -> bool:
        """Whether the known tokens are read: a penalty is in force."""
        return self.longest > 0

    @property
    def plain(self) -> bool:
        """Whether every row only needs its largest logit."""
        picks = (self.penalised, self.biased, self.stopped, self.masked, self.random, self.raw, self.greedy)
        return not any(pick.count for pick in picks)


def uniform(seed: int, index: int, position: int) -> float:
    """The noise of one token: in [0, 1), 53 bits of BLAKE2b over the three numbers."""
    digest = blake2b(_NOISE_KEY.pack(seed, index, position), digest_size=8, person=b"fdasync noise").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def plan_samples(
    specs: Sequence[SamplerSpec],
    positions: Sequence[int] | np.ndarray[Any, Any],
    lanes: Sequence[int] | np.ndarray[Any, Any],
    lengths: Sequence[int] | None = None,
) -> SamplePlan:
    """Plan the sampling of one token per row.

    Args:
        specs: N of them.
        positions: absolute position of each token to sample; `positions[i] - prompt_len` tokens of the row were
            sampled before it.
        lanes: of each row in the table of known tokens that `compute_samples` gets; read for penalties only.
        lengths: how many tokens of its lane belong to each row; None: `positions`.

    Raises:
        InvariantBroken: lengths disagree.
    """
    count = len(specs)
    at = np.asarray(positions, np.int64).tolist()
    ends = at if lengths is None else lengths
    if not count == len(at) == len(lanes) == len(ends):
        raise InvariantBroken(f"plan_samples: {count} specs, {len(at)} positions, {len(lanes)} lanes")
    penalised: list[int] = []
    biased: list[int] = []
    stopped: list[int] = []
    masked: list[int] = []
    random: list[int] = []
    raw: list[int] = []
    greedy: list[int] = []
    for row, spec in enumerate(specs):
        if _has_penalty(spec) and ends[row] > 0:
            penalised.append(row)
        if spec.bias_ids:
            biased.append(row)
        if spec.stop_ids and at[row] - spec.prompt_len < spec.min_tokens:
            stopped.append(row)
        if spec.grammar:
            masked.append(row)
        if spec.temperature > 0.0:
            random.append(row)
        elif spec.processed:
            greedy.append(row)
        if spec.raw:
            raw.append(row)

    arrays = _Arrays()
    drawn = [specs[row] for row in random]
    ks = [(i, spec.top_k) for i, spec in enumerate(drawn) if spec.top_k > 0]
    ps = [(i, spec.top_p) for i, spec in enumerate(drawn) if spec.top_p < 1.0]
    if random:
        arrays.add("noise", [uniform(s.seed, s.index, at[row]) for s, row in zip(drawn, random, strict=True)])
        temperatures = [spec.temperature for spec in drawn]
        if any(value != 1.0 for value in temperatures):
            arrays.add("temperature", temperatures)
        if ks:
            arrays.add("top_k", [k for _, k in ks], np.int64)
        if ps:
            arrays.add("top_p", [p for _, p in ps])
        if any(spec.min_p > 0.0 for spec in drawn):
            arrays.add("min_p", [spec.min_p for spec in drawn])
    _plan_penalties(arrays, [specs[row] for row in penalised], [ends[row] for row in penalised])
    if penalised:
        arrays.add("lanes", np.asarray(lanes, np.int64)[penalised], np.int64)
    shows_raw = [specs[row].top if specs[row].raw else 0 for row in raw]
    # a row that asks for both gets the alternatives by raw log-probs
    shows_drawn = [spec.top if spec.processed and not spec.raw else 0 for spec in drawn]
    shows_greedy = [0 if specs[row].raw else specs[row].top for row in greedy]
    return SamplePlan(
        count=count,
        longest=max((ends[row] for row in penalised), default=0),
        penalised=arrays.pick("penalised_rows", penalised, count),
        biased=_plan_bias(arrays, specs, biased),
        stopped=_plan_stops(arrays, specs, stopped),
        masked=arrays.pick("masked_rows", masked, count),
        random=arrays.pick("random_rows", random, count),
        raw=arrays.pick("raw_rows", raw, count),
        greedy=arrays.pick("greedy_rows", greedy, count),
        top_k=arrays.pick("top_k_rows", [i for i, _ in ks], len(random)),
        top_p=arrays.pick("top_p_rows", [i for i, _ in ps], len(random)),
        most=max((k for _, k in ks), default=0),
        processed=any(spec.processed for spec in drawn),
        drawn_report=arrays.report("drawn", random, shows_drawn),
        greedy_report=arrays.report("greedy", greedy, shows_greedy),
        raw_report=arrays.report("raw", raw, shows_raw),
        most_tops=max((*shows_drawn, *shows_greedy, *shows_raw), default=0),
        raw_rows=np.array(raw, np.int64),
        random_rows=np.array(random, np.int64),
        greedy_rows=np.array(greedy, np.int64),
        asked=np.array([spec.processed for spec in specs], np.bool_),
        arrays=arrays.of,
    )


class _Arrays:
    """The arrays of a plan while it is made."""

    def __init__(self) -> None:
        self.of: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, name: str, values: Any, dtype: Any = np.float64) -> None:
        self.of[name] = np.array(values, dtype)

    def pick(self, name: str, rows: Sequence[int], count: int) -> Pick:
        """`rows` of a table of `count` rows."""
        if len(rows) in (0, count):
            return Pick("", len(rows))
        self.add(name, rows, np.int64)
        return Pick(name, len(rows))

    def report(self, kind: str, rows: Sequence[int], ks: Sequence[int]) -> Report:
        """Alternatives: `ks` of each of `rows`, 0 for none."""
        where = [i for i, k in enumerate(ks) if k > 0]
        if not where:
            return Report()
        self.add(f"{kind}_top", [ks[i] for i in where], np.int64)
        tops = self.pick(f"{kind}_top_rows", where, len(rows))
        return Report(tops, f"{kind}_top", tuple(rows[i] for i in where))


def _has_penalty(spec: SamplerSpec) -> bool:
    return spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0


def _plan_penalties(arrays: _Arrays, specs: Sequence[SamplerSpec], ends: Sequence[int]) -> None:
    """Add the numbers of each penalised row; float32, as the logits are."""
    if not specs:
        return
    arrays.add("ends", ends, np.int64)
    if any(spec.repetition_penalty != 1.0 for spec in specs):
        arrays.add("repetition", [spec.repetition_penalty for spec in specs], np.float32)
    if any(spec.presence_penalty or spec.frequency_penalty for spec in specs):
        arrays.add("prompt_lens", [spec.prompt_len for spec in specs], np.int64)
        arrays.add("presence", [spec.presence_penalty for spec in specs], np.float32)
        arrays.add("frequency", [spec.frequency_penalty for spec in specs], np.float32)


def _plan_bias(arrays: _Arrays, specs: Sequence[SamplerSpec], biased: Sequence[int]) -> Pick:
    """Add the biased cells: number of the row among those with a bias (`bias_at`), the id, and what is added."""
    if not biased:
        return _NO_ROWS
    ids = [np.frombuffer(specs[row].bias_ids, "<i4") for row in biased]
    arrays.add("bias_at", np.repeat(np.arange(len(biased)), [len(part) for part in ids]), np.int64)
    arrays.add("bias_ids", np.concatenate(ids), np.int64)
    arrays.add("bias", np.frombuffer(b"".join([specs[row].bias_values for row in biased]), "<f4"), np.float32)
    return arrays.pick("biased_rows", biased, len(specs))


def _plan_stops(arrays: _Arrays, specs: Sequence[SamplerSpec], stopped: Sequence[int]) -> Pick:
    """Add the masked cells: number of the row among those under a mask (`stop_at`), and the id (`stop_ids`)."""
    cells = [(row, stop) for row in stopped for stop in specs[row].stop_ids if stop >= 0]
    rows = sorted({row for row, _ in cells})
    if not rows:
        return _NO_ROWS
    number = {row: i for i, row in enumerate(rows)}
    arrays.add("stop_at", [number[row] for row, _ in cells], np.int64)
    arrays.add("stop_ids", [stop for _, stop in cells], np.int64)
    return arrays.pick("stopped_rows", rows, len(specs))
