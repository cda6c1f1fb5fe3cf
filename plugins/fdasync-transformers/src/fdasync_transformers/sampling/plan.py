"""Plans a step's sampling on the host, before the logits exist.

Makes a `SamplePlan` of the rows' `SamplerSpec`s and positions: the jobs of the step, and every number that the device
needs, as numpy arrays that can be sent in one copy. Draws the noise. numpy only; knows nothing of torch, logits or the
width of the vocabulary. Called by the parts of a step before it is launched; pure, no state.

A job is one distribution over the vocabulary. Job i belongs to row i, after all that its request asks for. A row that
wants raw log-probs of logits that its own job changes has a second job behind those, of the logits as given.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.request import SamplerSpec

#: name of the masks of grammars among the arrays: int32 [rows under a grammar, words]; they follow the plan, since they
#: depend on the tokens of the step before
MASKS = "masks"
_NOISE_KEY = Layout("<QQQ")
# a scale that makes 0 of every finite difference of float32 numbers but 0 itself, and overflows with none
_MOST_SCALE = 1e250


class SamplePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step's sampling; made by `plan_samples`.

    Attributes:
        count: rows, N.
        jobs: distributions, J >= N.
        arrays: the numbers for the device; the caller sends them, and gives them to `compute_samples` as tensors of the
            same names, shapes and dtypes (int64, float32 or float64; none is empty). Empty dict: nothing to send.
            `ints` and `floats` are numbers of the jobs (`fdasync_kernels.sampling.tile` has the columns), `edits` and
            `penalties` of the penalised rows, `bias_cells`, `bias` and `stop_cells` of single logits, `top_jobs`,
            `top_counts` and `top_raw` (1: of the logits as given, whatever the job filters) of the alternatives.
        longest: known tokens of the longest row with a penalty; 0 where no row has one.
        edited, stopped, masked: how many rows have a penalty or a bias; are under a stop mask; under a grammar, whose
            masks the caller adds to the arrays (`MASKS`).
        masses: whether a job needs the sum of its probabilities.
        nuclei: whether a job without top-k has a top-p.
        most: the largest top_k; 0: there is none.
        raw, processed: bool [N], rows that ask for those log-probs.
        top_rows: rows that ask for alternatives.
        most_tops: most alternatives of a row.
    """

    count: int
    jobs: int
    arrays: dict[str, np.ndarray[Any, Any]]
    longest: int
    edited: int
    stopped: int
    masked: int
    masses: bool
    nuclei: bool
    most: int
    raw: np.ndarray[Any, Any]
    processed: np.ndarray[Any, Any]
    top_rows: tuple[int, ...]
    most_tops: int

    @property
    def needs_history(self) -> bool:
        """Whether the known tokens are read: a penalty is in force."""
        return self.longest > 0

    @property
    def filtered(self) -> bool:
        """Whether a job has top-k or top-p."""
        return self.nuclei or self.most > 0

    @property
    def plain(self) -> bool:
        """Whether every row only needs its largest logit."""
        return not (self.edited or self.stopped or self.masked or self.masses)


def uniform(seed: int, index: int, position: int) -> float:
    """The noise of one token: in [0, 1), 53 bits of BLAKE2b over the three numbers."""
    digest = blake2b(_NOISE_KEY.pack(seed, index, position), digest_size=8, person=b"fdasync noise").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def uniforms(tokens: Iterable[tuple[int, int, int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`uniform` of many tokens, float64 [n], given as (seed, index, position)."""
    pack = _NOISE_KEY.pack
    digests = [blake2b(pack(*token), digest_size=8, person=b"fdasync noise").digest() for token in tokens]
    numbers = np.frombuffer(b"".join(digests), "<u8") >> np.uint64(11)
    return numbers.astype(np.float64) * 2.0**-53


def scale_of(temperature: float) -> float:
    """What the distance to the largest logit is multiplied by at a temperature above 0."""
    return 1.0 / temperature if temperature > 1.0 / _MOST_SCALE else _MOST_SCALE


def takes_drafts(spec: SamplerSpec) -> bool:
    """Whether several samples of a sequence can be planned at once, before the first is known and its position.

    Not where a sample depends on the tokens before it by more than its logits, or on how many there are.
    """
    stops = spec.min_tokens > 0 and any(stop >= 0 for stop in spec.stop_ids)
    return not (_has_penalty(spec) or spec.grammar or stops)


def plan_samples(
    specs: Sequence[SamplerSpec],
    positions: Sequence[int] | np.ndarray[Any, Any],
    lanes: Sequence[int] | np.ndarray[Any, Any],
    lengths: Sequence[int] | None = None,
    *,
    undrawn: int = 0,
) -> SamplePlan:
    """Plan the sampling of one token per row.

    Args:
        specs: N of them.
        positions: absolute position of each token to sample; `positions[i] - prompt_len` tokens of the row were
            sampled before it.
        lanes: of each row in the table of known tokens that `compute_samples` gets; read for penalties only.
        lengths: how many tokens of its lane belong to each row; None: `positions`.
        undrawn: the first rows, whose noise the caller puts into `floats` (second column) before they are sampled.

    Raises:
        InvariantBroken: lengths disagree.
    """
    count = len(specs)
    at = np.asarray(positions, np.int64).tolist()
    ends = at if lengths is None else list(lengths)
    if not count == len(at) == len(lanes) == len(ends):
        raise InvariantBroken(f"plan_samples: {count} specs, {len(at)} positions, {len(lanes)} lanes")
    changes = _Changes(specs, at, np.asarray(lanes, np.int64).tolist(), ends)
    jobs = _Jobs()
    for row, spec in enumerate(specs):
        jobs.add(row, spec, _noise(spec, at[row]) if row >= undrawn else 0.0, changes)
    for row, spec in enumerate(specs):
        if spec.raw and jobs.changed[row]:
            jobs.add_raw(row)
    tops = [row for row, spec in enumerate(specs) if spec.top > 0 and (spec.raw or spec.processed)]
    plan = SamplePlan(
        count=count,
        jobs=len(jobs.ints),
        arrays={},
        longest=max((end for _, _, _, end, _ in changes.penalised), default=0),
        edited=len(changes.edited),
        stopped=len(changes.stopped),
        masked=len(changes.masked),
        masses=any(job[_MASS] for job in jobs.ints),
        nuclei=any(p < 1.0 and not job[_TOP_K] for job, (_, _, p, _) in zip(jobs.ints, jobs.floats, strict=True)),
        most=max((job[_TOP_K] for job in jobs.ints), default=0),
        raw=np.array([spec.raw for spec in specs], np.bool_),
        processed=np.array([spec.processed for spec in specs], np.bool_),
        top_rows=tuple(tops),
        most_tops=max((specs[row].top for row in tops), default=0),
    )
    if not plan.plain:
        plan.arrays["ints"] = np.array(jobs.ints, np.int64)
        plan.arrays["floats"] = np.array(jobs.floats, np.float64)
        plan.arrays.update(changes.arrays())
    if tops:
        # a row that asks for both gets the alternatives by raw log-probs
        of = [jobs.ints[row][RAW] if specs[row].raw else row for row in tops]
        plan.arrays["top_jobs"] = np.array(of, np.int64)
        plan.arrays["top_counts"] = np.array([specs[row].top for row in tops], np.int64)
        plan.arrays["top_raw"] = np.array([specs[row].raw for row in tops], np.int64)
    return plan


#: columns of a job's integers
ROW, EDIT, STOP, MASK, _MASS, _DRAWN, _TOP_K, RAW = range(8)
#: of a job that leaves logits as they are
PLAIN_FLOATS = (1.0, 0.0, 1.0, -math.inf)
#: integers of a second job, but for its row
RAW_JOB = (0, -1, -1, -1, 1, 0, 0, -1)


class _Jobs:
    """The numbers of jobs while a plan is made; `changed` says whose distribution differs from the logits'."""

    def __init__(self) -> None:
        self.ints: list[list[int]] = []
        self.floats: list[tuple[float, float, float, float]] = []
        self.changed: list[bool] = []

    def add(self, row: int, spec: SamplerSpec, noise: float, changes: _Changes) -> None:
        slots = [changes.edited.get(row, -1), changes.stopped.get(row, -1), changes.masked.get(row, -1)]
        drawn = spec.temperature > 0.0
        floats, top_k = PLAIN_FLOATS, 0
        if drawn:
            scale = scale_of(spec.temperature)
            floor = math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf
            floats = (scale, noise, spec.top_p, floor)
            top_k = max(spec.top_k, 0)
        # filters leave the sum of all probabilities what it is
        changed = max(slots) >= 0 or floats[0] != 1.0
        raw = row if spec.raw and not changed else -1
        mass = drawn or spec.processed or raw >= 0
        self.ints.append([row, *slots, int(mass), int(drawn), top_k, raw])
        self.floats.append(floats)
        self.changed.append(changed)

    def add_raw(self, row: int) -> None:
        self.ints[row][RAW] = len(self.ints)
        self.ints.append([row, *RAW_JOB[1:]])
        self.floats.append(PLAIN_FLOATS)


class _Changes:
    """What changes logits before the softmax: `edited`, `stopped` and `masked` number the rows of each kind."""

    def __init__(
        self, specs: Sequence[SamplerSpec], positions: Sequence[int], lanes: Sequence[int], ends: Sequence[int]
    ) -> None:
        self._specs = specs
        self.edited: dict[int, int] = {}
        self.stopped: dict[int, int] = {}
        self.masked: dict[int, int] = {}
        self.penalised: list[tuple[int, int, int, int, int]] = []
        for row, spec in enumerate(specs):
            penalised = _has_penalty(spec) and ends[row] > 0
            if penalised or spec.bias_ids:
                slot = self.edited[row] = len(self.edited)
                if penalised:
                    self.penalised.append((slot, row, lanes[row], ends[row], spec.prompt_len))
            in_range = any(stop >= 0 for stop in spec.stop_ids)
            if in_range and positions[row] - spec.prompt_len < spec.min_tokens:
                self.stopped[row] = len(self.stopped)
            if spec.grammar:
                self.masked[row] = len(self.masked)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        made: dict[str, np.ndarray[Any, Any]] = {}
        specs = self._specs
        if self.penalised:
            made["edits"] = np.array(self.penalised, np.int64)
            own = [specs[row] for _, row, _, _, _ in self.penalised]
            # float32, as the logits are
            made["penalties"] = np.array(
                [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in own], np.float32
            )
        biased = [row for row in self.edited if specs[row].bias_ids]
        if biased:
            cells = [np.frombuffer(specs[row].bias_ids, "<i4").astype(np.int64) for row in biased]
            heads = [(self.edited[row], row) for row in biased]
            at = np.repeat(np.array(heads, np.int64), [len(part) for part in cells], axis=0)
            made["bias_cells"] = np.column_stack([at, np.concatenate(cells)])
            values = b"".join([specs[row].bias_values for row in biased])
            made["bias"] = np.frombuffer(values, "<f4").astype(np.float32)
        if self.stopped:
            stops = [(slot, row, stop) for row, slot in self.stopped.items() for stop in specs[row].stop_ids]
            made["stop_cells"] = np.array([cell for cell in stops if cell[2] >= 0], np.int64)
        return made


def _noise(spec: SamplerSpec, position: int) -> float:
    return uniform(spec.seed, spec.index, position) if spec.temperature > 0.0 else 0.0


def _has_penalty(spec: SamplerSpec) -> bool:
    return spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0
