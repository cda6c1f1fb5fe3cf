"""Rows of a step whose sequences have drafts, planned by a host that may not know where the sequences are.

While a step is in flight, only the device knows how many tokens it gives. So the host plans the next one from what
finished steps have left: a decode gets as many rows as it can have drafts, wherever in the path it is, and the device
leaves padding where it needs fewer. What depends on a position (slots of rows, the noise of a sample) is planned for
the whole span in which the step may lie. When the step has ended, `settle` says which rows stand, and where.

A sequence whose samples depend on more than the tokens' positions (`takes_drafts`) has none, and is never uncertain
(docs/design.md, rule 42). Where the model's own layers draft on the device, a sequence without a path of the host takes
those drafts: the host knows that there are some, and not which.

Knows lanes and numbers; knows no device. Called by `device_drafts.py`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from fdasync_kernels.drafts import RUN_COLUMNS

from fdasync.errors import InvariantBroken
from fdasync.runner.drafts import Path, own_drafts_of, read_paths
from fdasync.runner.input_batch import Batch
from fdasync_transformers.sampling.plan import takes_drafts, uniforms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import InputBatch

    Ints = NDArray[np.int64]

_NO_PATH = Path(0, 0, np.zeros(0, np.int32))
# tokens of a path that is on the device
_OWN = -1


class StepRows(NamedTuple):
    """A planned step of N sampling sequences; the first n decode.

    Attributes:
        number: of the step, counted from 0.
        rows: the step with each row of a decode as a sequence of its own; positions of these are the least ones.
        runs: int64 [N, 10], as `RUN_COLUMNS`.
        paths: int32 [P], at least one.
        noise: float64 [N, span], of the samples and drafts from `known` + 1 on (of a prompt that ends here from its
            sample on); None: no sequence draws. Without drafts of the device [n, span].
        lanes, known, widths, reach: int64 [n]; the lane of each decode, its length as finished steps left it, its
            rows, and how far behind `known` this step may go.
        takes: bool [n], which may have drafts, and so may be further than `known`.
        uses: int64 [n], which use of its lane each is.
        aux_index, generations: int64 and uint32 [n, reach at most], of the positions from `known` on.
        owns: bool [n], which verify what the device drafted.
        drafting: int64 [D], which of the N the device drafts behind.
        own_drafts: how many tokens it drafts behind each, at most.
    """

    number: int
    rows: Batch
    runs: Ints
    paths: NDArray[np.int32]
    noise: NDArray[np.float64] | None
    lanes: Ints
    known: Ints
    widths: Ints
    reach: Ints
    takes: NDArray[np.bool_]
    uses: Ints
    aux_index: Ints
    generations: NDArray[np.uint32]
    owns: NDArray[np.bool_]
    drafting: Ints
    own_drafts: int


class Settled(NamedTuple):
    """What stands of a step of T rows and R samples.

    Attributes:
        stands: bool [T], which rows stand.
        positions, aux_index, generations: of these rows, as of a `Batch`.
        samples: int64 [M], which samples stand, ascending.
        counts: of each sampling sequence, how many of these are its.
        own_drafts: of each sampling sequence, how many drafts of the device were forwarded.
    """

    stands: NDArray[np.bool_]
    positions: Ints
    aux_index: Ints
    generations: NDArray[np.uint32]
    samples: Ints
    counts: tuple[int, ...]
    own_drafts: tuple[int, ...]


class RowPlanner:
    """Plans the steps of a table that was made for runs of `speculation` + 1 tokens, and settles them in their order.

    Args:
        speculation: most drafts of a sequence in a step, at least 1.
        depth: most steps in flight.
        own: whether the device drafts, too: `speculation` tokens behind the samples of each step.
    """

    def __init__(self, table: InputBatch, speculation: int, depth: int, *, own: bool = False) -> None:
        lanes = len(table.length)
        self._table = table
        self._speculation = speculation
        self._depth = depth
        self._own = speculation if own else 0
        # how many the device has drafted behind the last step that sampled, at most
        self._drafted = np.zeros(lanes, np.int64)
        # positions that steps in flight may take of each lane
        self._flying = np.zeros(lanes, np.int64)
        self._planned = 0
        # steps that have ended and that no plan knows yet, and the lengths that they left
        self._ended: deque[tuple[StepRows, Ints]] = deque()
        self._uses = np.zeros(lanes, np.int64)
        self._takes = np.zeros(lanes, np.bool_)
        # the noise of the positions in reach, each at its remainder, and the first position that was not drawn yet
        self._noise = np.zeros((lanes, depth * (speculation + 1) + self._own))
        self._undrawn = np.zeros(lanes, np.int64)

    def plan(self, step: RunStep) -> StepRows:
        """As `InputBatch.plan`. Raises InvariantBroken, also for drafts that do not fit the step or the limits."""
        table = self._table
        number, self._planned = self._planned, self._planned + 1
        self._learn(number - self._depth)
        paths = {} if step.drafts is None else read_paths(step.drafts, self._speculation, self._depth)
        laid: list[Path] = []

        def widths(decodes: Ints) -> Ints:
            self._enter(step)
            laid.extend(self._paths_of(step.step_id, paths, decodes))
            return self._widths(decodes, laid)

        batch = table.plan(step, widths)
        count = batch.num_decodes
        lanes, known, wide = batch.lanes[:count], batch.starts[:count], batch.counts[:count]
        takes = self._takes[lanes]
        # the lengths of the others are certain
        table.take_runs(batch, np.where(takes, 0, wide))
        reach = self._flying[lanes] + wide
        span = int(reach.max(initial=1))
        if span > self._depth * (self._speculation + 1):
            raise InvariantBroken(f"step {step.step_id} may lie {span} tokens behind what is known: too many in flight")
        self._flying[lanes[takes]] += wide[takes]
        room = table.room_of(lanes)
        places = known[:, None] + np.arange(span)
        size = table.block_tokens
        owns = np.array([len(path.tokens) == 0 and path.most > 0 for path in laid], np.bool_)
        sampling = batch.lanes[batch.sampled]
        most = own_drafts_of(step, self._speculation) if self._own else 0
        drafting = np.flatnonzero(self._takes[sampling]) if most else np.zeros(0, np.int64)
        self._drafted[sampling] = np.where(self._takes[sampling], most, 0)
        # positions past the table are never taken
        blocks = table.blocks[lanes[:, None], np.minimum(places, room[:, None] - 1) // size]
        slots, generations = table.slots_of(blocks)
        return StepRows(
            number=number,
            rows=_rows_of(batch, int(wide.sum())),
            runs=_runs_of(batch, laid, table.room_of(sampling)),
            paths=np.concatenate([np.zeros(1, np.int32), *[path.tokens for path in laid]]),
            noise=self._noise_of(batch, reach, span),
            lanes=lanes,
            known=known,
            widths=wide,
            reach=reach,
            takes=takes,
            uses=self._uses[lanes],
            aux_index=slots * size + places % size,
            generations=generations,
            owns=owns,
            drafting=drafting,
            own_drafts=most,
        )

    def settle(
        self, step: StepRows, starts: NDArray[np.integer], counts: NDArray[np.integer], used: NDArray[np.integer]
    ) -> Settled:
        """The step has ended; steps from the `depth`-th behind it are planned from where it left its sequences.

        Args:
            starts: [n], position of the first row of each decode.
            counts: [N], samples that stand of each sampling sequence.
            used: [n], rows of each decode that were no padding.

        Raises:
            InvariantBroken: they lie outside the step's rows.
        """
        decodes = len(step.lanes)
        stood, ahead = counts[:decodes].astype(np.int64), starts.astype(np.int64) - step.known
        if ((ahead < 0) | (stood < 0) | (stood > step.widths) | (ahead + stood > step.reach)).any():
            raise InvariantBroken(f"runs of {stood.tolist()} tokens outside the rows of step {step.rows.step_id}")
        self._ended.append((step, step.known + ahead + stood))
        first = np.cumsum(step.widths) - step.widths
        nth = np.arange(int(step.widths.sum())) - np.repeat(first, step.widths)
        kept = nth < np.repeat(stood, step.widths)
        stands = np.ones(len(step.rows.positions), np.bool_)
        stands[: len(kept)] = kept
        which = np.repeat(np.arange(decodes), step.widths)[kept]
        place = (ahead[which] + nth[kept]).astype(np.int64)
        rest = slice(len(kept), None)
        return Settled(
            stands,
            np.concatenate([step.known[which] + place, step.rows.positions[rest]]),
            np.concatenate([step.aux_index[which, place], step.rows.aux_index[rest]]),
            np.concatenate([step.generations[which, place], step.rows.generations[rest]]),
            np.concatenate([np.flatnonzero(kept), len(kept) + np.arange(len(counts) - decodes)]),
            tuple(counts.tolist()),
            (*np.where(step.owns, np.maximum(used - 1, 0), 0).tolist(), *[0] * (len(counts) - decodes)),
        )

    def _learn(self, last: int) -> None:
        """Take into account where the steps up to this one have left their sequences."""
        while self._ended and self._ended[0][0].number <= last:
            step, lengths = self._ended.popleft()
            # not of sequences that left meanwhile
            here = step.takes & (self._uses[step.lanes] == step.uses)
            lanes = step.lanes[here]
            self._table.length[lanes] = lengths[here]
            self._flying[lanes] -= step.widths[here]

    def _enter(self, step: RunStep) -> None:
        for start in step.starts:
            lane = self._table.lane_of(start.key)
            self._flying[lane] = self._undrawn[lane] = 0
            self._uses[lane] += 1
            self._takes[lane] = takes_drafts(start.sampler)

    def _paths_of(self, step_id: int, paths: dict[int, Path], decodes: Ints) -> list[Path]:
        keys = [self._table.keys[lane] for lane in decodes.tolist()]
        if left := set(paths).difference(keys):
            raise InvariantBroken(f"step {step_id} has drafts for {sorted(left)}, which it does not decode")
        if not paths and not self._own:
            return [_NO_PATH] * len(keys)
        own = [Path(0, most, _NO_PATH.tokens) for most in range(self._speculation + 1)]
        takes, drafted = self._takes[decodes].tolist(), self._drafted[decodes].tolist()
        return [
            paths.get(key, own[mine]) if ours else _NO_PATH
            for key, ours, mine in zip(keys, takes, drafted, strict=True)
        ]

    def _widths(self, decodes: Ints, laid: list[Path]) -> Ints:
        """Rows of each decode: its last token, and the most drafts that it can have wherever it is."""
        starts = np.array([path.start for path in laid], np.int64)
        lengths = np.array([len(path.tokens) for path in laid], np.int64)
        most = np.array([path.most for path in laid], np.int64)
        # the first position in reach whose successor is not before the path
        last = np.maximum(self._table.length[decodes], starts - 1)
        drafts = np.minimum(most, np.where(lengths > 0, lengths - (last + 1 - starts), most))
        drafts[last > self._table.length[decodes] + self._flying[decodes]] = 0
        wanted: Ints = 1 + np.maximum(drafts, 0)
        return wanted

    def _noise_of(self, batch: Batch, reach: Ints, span: int) -> NDArray[np.float64] | None:
        """The noise of each position is drawn once, however often it is in reach."""
        ring, samplers = self._noise, self._table.samplers
        decodes = batch.num_decodes
        # of a prompt that ends here, its sample counts as one row behind its last but one token
        chosen = batch.sampled if self._own else batch.sampled[:decodes]
        lanes = batch.lanes[chosen]
        known = batch.starts[chosen]
        known[decodes:] += batch.counts[chosen[decodes:]] - 1
        reach = np.concatenate([reach, np.ones(len(chosen) - decodes, np.int64)])
        reach = reach + np.where(self._takes[lanes], self._own, 0)
        span += self._own
        stops = known + 1 + reach
        begins = np.maximum(self._undrawn[lanes], known + 1)
        draws = False
        tokens: list[tuple[int, int, int]] = []
        new = np.zeros(len(lanes), np.int64)
        for number, (lane, begin, stop) in enumerate(zip(lanes.tolist(), begins.tolist(), stops.tolist(), strict=True)):
            sampler = samplers[lane]
            if sampler is None or sampler.temperature <= 0.0:
                continue
            draws = True
            if begin < stop:
                seed, index = sampler.seed, sampler.index
                tokens += [(seed, index, position) for position in range(begin, stop)]
                new[number] = stop - begin
        if not draws:
            return None
        if tokens:
            nth = np.arange(len(tokens)) - np.repeat(np.cumsum(new) - new, new)
            ring[np.repeat(lanes, new), (np.repeat(begins, new) + nth) % ring.shape[1]] = uniforms(tokens)
        self._undrawn[lanes] = np.maximum(self._undrawn[lanes], stops)
        places = (known[:, None] + 1 + np.arange(span)) % ring.shape[1]
        drawn: NDArray[np.float64] = ring[lanes[:, None], places]
        return drawn


def _rows_of(batch: Batch, total: int) -> Batch:
    """The step with each of the `total` rows of its decodes as a sequence."""
    decodes = batch.num_decodes
    lanes = np.concatenate([np.repeat(batch.lanes[:decodes], batch.counts[:decodes]), batch.lanes[decodes:]])
    counts = np.concatenate([np.ones(total, np.int64), batch.counts[decodes:]])
    rows = Batch(batch.step_id, lanes, counts, total)
    rows.starts = np.concatenate([batch.positions[:total], batch.starts[decodes:]])
    rows.positions, rows.kv_index = batch.positions, batch.kv_index
    rows.aux_index, rows.generations = batch.aux_index, batch.generations
    rows.sampled = np.concatenate([np.arange(total), batch.sampled[decodes:] - decodes + total])
    return rows


def _runs_of(batch: Batch, laid: list[Path], room: Ints) -> Ints:
    """The numbers of each sampling sequence, in the order of `RUN_COLUMNS`."""
    decodes = batch.num_decodes
    ended = batch.sampled[decodes:]
    widths = batch.counts[:decodes]
    lengths = np.array([len(path.tokens) for path in laid], np.int64)
    runs = np.zeros((len(batch.sampled), len(RUN_COLUMNS)), np.int64)
    runs[:, 0] = batch.lanes[batch.sampled]
    runs[:decodes, 1] = np.cumsum(widths) - widths
    runs[decodes:, 1] = int(widths.sum()) + np.arange(len(ended))
    runs[:decodes, 2], runs[decodes:, 2] = widths, 1
    runs[:decodes, 3], runs[decodes:, 3] = -1, batch.starts[ended] + batch.counts[ended] - 1
    runs[:, 4] = room
    # behind one token that belongs to none
    runs[:decodes, 5] = 1 + np.cumsum(lengths) - lengths
    runs[:decodes, 8] = [path.most for path in laid]
    runs[:decodes, 6] = np.where((lengths == 0) & (runs[:decodes, 8] > 0), _OWN, lengths)
    runs[:decodes, 7] = [path.start for path in laid]
    runs[:decodes, 9] = batch.starts[:decodes] + 1
    runs[decodes:, 9] = runs[decodes:, 3] + 1
    return runs
