"""What a step of the synthetic runner computes: KV, tokens, log-probs and rows of a batch, at once.

Tokens and rows are a function of *all* KV words that the block table points at (`oracle.py`): one stale, missing or
misplaced block changes the output.

With `max_run_tokens` above 1 it works as speculative decoding does: a step forwards the last token of a sequence and
drafts behind it (the first ones right, the others wrong), samples at every position, and yields the samples up to the
first that a draft did not foresee. KV of the wrong drafts stays behind until it is written again. With
`RunnerLimits.speculation` it does the same with the host's drafts.

It knows no time: `runner.py`, which extends it, says when a step ends, and copies and loads.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdasync.cache.aux import AuxSpec
from fdasync.cache.debug_rows import debug_rows
from fdasync.cache.snapshots import StateSpec, snapshot_nbytes
from fdasync.errors import InvariantBroken
from fdasync.request import Grammar
from fdasync.runner.base import PromptScores, Runner, RunnerLimits, StepOutput
from fdasync.runner.chosen import ChosenRows, ChosenShape, LentRows, LentRun
from fdasync.runner.drafts import follow, read_paths
from fdasync.runner.input_batch import Batch, InputBatch
from fdasync.runner.prompt_scores import scored_runs
from fdasync.runner.synthetic.oracle import CHOSEN_LAYERS, U64, Oracle, SyntheticConfig, place
from fdasync.runner.synthetic.state import States

if TYPE_CHECKING:
    import asyncio

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SeqStart, TakeSnapshot
    from fdasync.runner.synthetic.grammar import Matcher

#: for each sequence of a step, int32 [tokens, layers, top_k]
Chosen = list[tuple[LentRun, NDArray[np.int32]]]
# free mode never samples the topmost ids: a benchmark can use them as stop ids
_FREE_MARGIN = 16


class Flight:
    """A step that is launched and not completed.

    Attributes:
        step, batch: the step.
        ends: of each sequence, the position behind its last token in this step.
        output, rows: its results; the rows are not in the arena yet.
        chosen: what indexers chose for the tokens that stand, by sequence that wants it; not where it goes yet.
        done: set when it completes.
        due: its time has come, and an earlier step has not ended.
    """

    __slots__ = ("batch", "chosen", "done", "due", "ends", "output", "rows", "step")

    def __init__(
        self,
        step: RunStep,
        batch: Batch,
        output: StepOutput,
        rows: dict[str, NDArray[np.generic]],
        done: asyncio.Future[StepOutput],
    ) -> None:
        self.step = step
        self.batch = batch
        self.ends = batch.starts + batch.counts
        self.output = output
        self.rows = rows
        self.chosen: Chosen = []
        self.done = done
        self.due = False


class SyntheticSteps(Runner):
    """See the module. `open` of the class that extends it sets `_block_tokens` and `_context`."""

    config_type: ClassVar[type[msgspec.Struct]] = SyntheticConfig
    _block_tokens: int
    _context: int

    def __init__(self, config: SyntheticConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self.config: SyntheticConfig = config
        self.oracle = Oracle(config)
        self.weights_id = config.weights_id
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None
        self._flights: deque[Flight] = deque()
        # most tokens that a step yields of a sequence
        self._most = 1 + limits.speculation if limits.speculation else config.max_run_tokens
        # the host's drafts in the step that is being planned, by lane
        self._host_drafts: dict[int, list[int]] = {}
        self._states: States | None = None
        self._num_snapshots = 0
        self._lent = LentRows()
        # of the step that was computed last; of each of its sequences, the states behind its tokens
        self._chosen: Chosen = []
        self._behind: list[NDArray[np.uint64]] = []

    def _chosen_shape(self) -> ChosenShape | None:
        top_k = self.config.chosen_top_k
        return ChosenShape(CHOSEN_LAYERS, top_k) if top_k and self.limits.tensor_parallel == 1 else None

    async def lend(self, key: int, rows: ChosenRows) -> None:
        self._lent.lend(key, rows)

    def take_back(self, key: int) -> None:
        self._lent.take_back(key)

    def _state_specs(self) -> tuple[StateSpec, ...]:
        config = self.config
        if not config.state_words:
            return ()
        self._num_snapshots = config.num_snapshots if self.limits.num_snapshots is None else self.limits.num_snapshots
        return (StateSpec("state", (config.state_words,), "uint64", (0,)),)

    async def check_grammar(self, grammar: Grammar) -> None:
        """See `grammar.py`."""
        if self.config.free:
            await super().check_grammar(grammar)
        self.oracle.matcher(grammar)

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        size = self._block_tokens
        self.lanes = InputBatch(self.limits.max_running, self._context, size, num_blocks, self._most)
        self._host = host
        self._kv, self._kv_stamps = self._allocate(num_blocks * size)
        specs = self._state_specs()
        if specs:
            self._states = States(
                self.limits.max_running,
                self.config.state_words,
                self._num_snapshots,
                snapshot_nbytes(specs),
                snapshots,
            )
        self._last_token = np.zeros(self.limits.max_running, np.int64)
        # by lane; and what this step found
        self._matchers: list[Matcher | None] = [None] * self.limits.max_running
        self._problems: list[tuple[int, str]] = []
        self._arena = arena
        self._constant: dict[str, NDArray[np.generic]] = {}

    def _allocate(self, words: int) -> tuple[NDArray[U64], NDArray[np.uint32]]:
        """The KV and its stamps, zeroed."""
        return np.zeros(words, U64), np.zeros(words, np.uint32)

    def _matcher_of(self, start: SeqStart) -> Matcher | None:
        """Begun anew from the tokens of the answer so far, whatever interrupted it."""
        packed = start.sampler.grammar
        if not packed:
            return None
        answer = array("i", start.tokens)[start.sampler.prompt_len :]
        return self.oracle.matcher(Grammar.unpacked(packed), answer, key=start.key)

    def _plan(self, step: RunStep) -> Batch:
        batch = self._plan_tokens(step)
        self._takes: dict[int, list[TakeSnapshot]] = {}
        for take in step.snapshots:
            self._takes.setdefault(take.key, []).append(take)
        if self._states is not None:
            for start in step.starts:
                self._states.begin(self.lanes.lane_of(start.key), start.snapshot, start.num_cached)
        return batch

    def _plan_tokens(self, step: RunStep) -> Batch:
        if not self.limits.speculation:
            if step.drafts is not None:
                raise InvariantBroken(f"step {step.step_id} has drafts, and limits.speculation is 0")
            return self.lanes.plan(step)
        paths = {}
        if step.drafts is not None:
            paths = read_paths(step.drafts, self.limits.speculation, self.limits.pipeline_depth)
        lanes = self.lanes

        def widths(decodes: NDArray[np.int64]) -> NDArray[np.int64]:
            self._host_drafts = {}
            wanted = np.ones(len(decodes), np.int64)
            left = set(paths)
            for number, lane in enumerate(decodes.tolist()):
                path = paths.get(lanes.keys[lane])
                if path is None:
                    continue
                left.discard(lanes.keys[lane])
                drafts = follow(path, int(lanes.length[lane]), self.config.vocab_size)
                self._host_drafts[lane] = drafts.tolist()
                wanted[number] += len(drafts)
            if left:
                raise InvariantBroken(f"step {step.step_id} has drafts for {sorted(left)}, which it does not decode")
            return wanted

        return lanes.plan(step, widths)

    def _compute(self, batch: Batch) -> tuple[StepOutput, dict[str, NDArray[np.generic]]]:
        """Write the KV of the step's tokens, read the KV of everything before, sample; move the states on."""
        inputs = self._inputs(batch)
        self._kv[batch.kv_index] = self.oracle.kv(inputs, batch.positions, self.weights_id)
        self._kv_stamps[batch.kv_index] = self.config.stamp_base + batch.step_id
        digests = np.empty(len(inputs), U64)
        self._behind = []
        ends = np.cumsum(batch.counts)
        size = self._block_tokens
        offsets = np.arange(size)
        with np.errstate(over="ignore"):
            for lane, start, count, end in zip(batch.lanes, batch.starts, batch.counts, ends, strict=True):
                table = self.lanes.block_table(int(lane), int(start + count)).astype(np.int64)
                index = (table[:, None] * size + offsets).ravel()[: start + count]
                if self.config.pass_stamp:
                    self._check_stamps(table, index, int(start))
                sums = self.oracle.running_sums(self._kv[index])
                digests[end - count : end] = sums[start:]
                if self._states is not None:
                    self._behind.append(self.oracle.states(self._kv[index][start:], self._states.live[lane]))
                    digests[end - count : end] ^= self.oracle.folded(self._behind[-1])
        self._chosen = []
        for run in self._lent.runs(batch, self.lanes) if self.config.chosen_top_k else ():
            own = slice(run.at, run.at + run.count)
            self._chosen.append((run, self.oracle.chosen(digests[own], batch.positions[own])))
        rows: dict[str, NDArray[np.generic]] = {}
        if self._arena is not None:
            if "routing" in self._arena.rows:
                rows["routing"] = self._routing(batch, digests)
            if self.config.values_spec:
                rows["values"] = self.oracle.values(digests)
            if self.config.pass_stamp:
                rows["stamp"] = np.full((len(inputs), 1), self.config.stamp_base + batch.step_id, np.uint32)
        if self._most == 1:
            self._advance_states(batch, batch.counts)
            last = ends[batch.sampled] - 1
            tokens = self._sample(batch, digests[last], last)
            self._advance(batch, last, tokens)
            self._last_token[batch.lanes[batch.sampled]] = tokens
            return self._logprobs(batch, tokens, digests, last), rows
        return self._verify(batch, inputs, digests, rows)

    def _advance_states(self, batch: Batch, stood: NDArray[np.int64]) -> None:
        """Move each sequence's state behind its tokens that stand, and take the snapshots."""
        for number, own in enumerate(self._behind):
            assert self._states is not None
            lane, start, count = int(batch.lanes[number]), int(batch.starts[number]), int(stood[number])
            if count:
                self._states.live[lane] = own[count - 1]
            for take in self._takes.pop(self.lanes.keys[lane], ()):
                here = start < take.position <= start + count
                if here:
                    self._states.take(take.place, own[take.position - start - 1])
                elif self._most == 1 or number >= batch.num_decodes:
                    raise InvariantBroken(f"{take} lies outside of [{start}, {start + count}]")
        if self._takes:
            raise InvariantBroken(f"step {batch.step_id} takes snapshots of {sorted(self._takes)}, and computes none")

    def _verify(
        self,
        batch: Batch,
        drafts: NDArray[np.int64],
        digests: NDArray[np.uint64],
        rows: dict[str, NDArray[np.generic]],
    ) -> tuple[StepOutput, dict[str, NDArray[np.generic]]]:
        """Cut the drafts to runs: of each decode, the samples up to the first that differs from the next draft, and
        their rows."""
        firsts = np.cumsum(batch.counts) - batch.counts
        # of a chunk the last position alone is sampled
        decoded = int(batch.counts[: batch.num_decodes].sum())
        places = np.concatenate([np.arange(decoded), (firsts + batch.counts - 1)[batch.num_decodes :]])
        sampled = np.zeros(len(drafts), np.int64)
        sampled[places] = self._sample(batch, digests[places], places)
        stands = np.ones(len(drafts), bool)
        last, counts = [], []
        for number in batch.sampled.tolist():
            first, count = int(firsts[number]), int(batch.counts[number])
            if number >= batch.num_decodes:
                last.append(first + count - 1)
                counts.append(1)
                continue
            run = min(count, 1)
            while 0 < run < count and drafts[first + run] == sampled[first + run - 1]:
                run += 1
            stands[first + run : first + count] = False
            last += range(first, first + run)
            counts.append(run)
        runs = np.array(counts[: batch.num_decodes], np.int64)
        self._advance_states(batch, np.concatenate([runs, batch.counts[batch.num_decodes :]]))
        self.lanes.take_runs(batch, runs)
        self._chosen = [
            (run, picked[: counts[run.number]] if run.number < batch.num_decodes else picked)
            for run, picked in self._chosen
        ]
        tokens = sampled[last]
        if self.limits.speculation:
            # the token behind the last position of a context is never forwarded, nor drafted behind
            lanes, places = self._lanes_of(batch, np.array(last, np.int64)), batch.positions[last] + 1
            here = places < self.lanes.tokens.shape[1]
            self.lanes.tokens[lanes[here], places[here]] = tokens[here]
        self._advance(batch, np.array(last, np.int64), tokens)
        given = np.array(counts, np.int64)
        ends = np.cumsum(given)[given > 0]
        self._last_token[batch.lanes[batch.sampled][given > 0]] = tokens[ends - 1]
        batch.aux_index, batch.generations = batch.aux_index[stands], batch.generations[stands]
        output = self._logprobs(batch, tokens, digests, np.array(last, np.int64))
        output = msgspec.structs.replace(output, counts=tuple(counts))
        return output, {name: part[stands] for name, part in rows.items()}

    def _draft(self, batch: Batch, number: int, first: int) -> list[int]:
        """The last token of a decode and those to forward behind it: the host's drafts, or its own: right as far as
        `Oracle.run_length` says, then wrong."""
        oracle, size = self.oracle, self._block_tokens
        lane, start, count = int(batch.lanes[number]), int(batch.starts[number]), int(batch.counts[number])
        if not count:
            return []
        if self.limits.speculation:
            return [int(self._last_token[lane]), *self._host_drafts.get(lane, ())][:count]
        table = self.lanes.block_table(lane, start + count).astype(np.int64)
        index = (table[:, None] * size + np.arange(size)).ravel()[:start]
        digest = oracle.running_sums(self._kv[index])[-1:]
        state = None if self._states is None else self._states.live[lane]
        right = oracle.run_length(start)
        tokens = [int(self._last_token[lane])]
        forks: dict[int, Matcher] = {}
        for ahead in range(count - 1):
            position = np.array([start + ahead])
            with np.errstate(over="ignore"):
                word = oracle.kv(np.array(tokens[-1:]), position, self.weights_id)
                digest = digest + word * place(position.astype(U64))
            seen = digest
            if state is not None:
                state = oracle.states(word, state)
                seen, state = digest ^ oracle.folded(state), state[-1]
            token = int(self._sample(batch, seen, np.array([first + ahead]), forks)[0])
            is_right = len(tokens) < right
            tokens.append(token if is_right else (token + 1) % self.config.vocab_size)
        return tokens

    def _logprobs(
        self, batch: Batch, tokens: NDArray[np.int64], every: NDArray[np.uint64], last: NDArray[np.int64]
    ) -> StepOutput:
        """The output with these tokens, sampled at the places `last` of the step's tokens."""
        digests = every[last]
        samplers = [self.lanes.samplers[lane] for lane in self._lanes_of(batch, last)]
        raw = processed = top = None
        if any(sampler is not None and (sampler.raw or sampler.processed) for sampler in samplers):
            values = self.oracle.logprobs(digests, tokens, self.weights_id)
            raw, processed = tuple(values.tolist()), tuple((values / 2).tolist())
            if any(sampler is not None and sampler.top for sampler in samplers):
                top = tuple(
                    None if sampler is None else self.oracle.top(digest, sampler.top, self.weights_id)
                    for sampler, digest in zip(samplers, digests, strict=True)
                )
        prefilled = [self.lanes.samplers[int(lane)] for lane in batch.lanes[batch.num_decodes :]]
        wanted = any(sampler is not None and sampler.score_from >= 0 for sampler in prefilled)
        scores = self._scores(batch, every) if wanted else ()
        problems, self._problems = tuple(self._problems), []
        return StepOutput(
            step_id=batch.step_id,
            tokens=tuple(tokens.tolist()),
            raw=raw,
            processed=processed,
            top=top,
            scores=scores,
            problems=problems,
        )

    def _scores(self, batch: Batch, digests: NDArray[np.uint64]) -> tuple[PromptScores, ...]:
        scores = []
        for run in scored_runs(batch, self.lanes):
            values, tops = self.oracle.prompt_scores(digests[run.rows], run.tokens, run.top, self.weights_id)
            ids = np.full((len(values), run.top), -1, "<i4")
            best = np.zeros((len(values), run.top), "<f4")
            for row, one in enumerate(tops):
                ids[row, : len(one.token_ids)], best[row, : len(one.token_ids)] = one.token_ids, one.logprobs
            logprobs = values.astype("<f4").tobytes()
            scores.append(
                PromptScores(
                    key=run.key,
                    start=run.start,
                    logprobs=logprobs,
                    top=run.top,
                    top_ids=ids.tobytes(),
                    top_logprobs=best.tobytes(),
                )
            )
        return tuple(scores)

    def _inputs(self, batch: Batch) -> NDArray[np.int64]:
        inputs = np.empty(len(batch.positions), np.int64)
        at = 0
        if self._most == 1:
            inputs[: batch.num_decodes] = self._last_token[batch.lanes[: batch.num_decodes]]
            at = batch.num_decodes
        else:
            for number in range(batch.num_decodes):
                drafts = self._draft(batch, number, at)
                inputs[at : at + len(drafts)] = drafts
                at += len(drafts)
        for number in range(batch.num_decodes, len(batch.lanes)):
            lane, start, count = int(batch.lanes[number]), int(batch.starts[number]), int(batch.counts[number])
            inputs[at : at + count] = self.lanes.tokens[lane, start : start + count]
            at += count
        return inputs

    def _sample(
        self,
        batch: Batch,
        digests: NDArray[np.uint64],
        places: NDArray[np.int64],
        forks: dict[int, Matcher] | None = None,
    ) -> NDArray[np.int64]:
        """The tokens that these digests give, at the places of the step's tokens.

        `forks`: matchers by lane that took the samples at earlier places; they take these too.
        """
        forks = {} if forks is None else forks
        tokens = self.oracle.sample(digests, self._noise(batch, places), self.weights_id)
        for number, lane in enumerate(self._lanes_of(batch, places).tolist()):
            sampler = self.lanes.samplers[lane]
            if sampler is not None and sampler.bias_ids:
                tokens[number] = self.oracle.biased(int(tokens[number]), sampler.logit_bias())
            matcher = self._matchers[lane]
            if matcher is not None:
                if lane not in forks:
                    forks[lane] = matcher.fork()
                tokens[number] = forks[lane].take(int(tokens[number]))
        return tokens

    def _advance(self, batch: Batch, places: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """The matchers take the tokens that the step yields."""
        for lane, token in zip(self._lanes_of(batch, places).tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers[lane]
            if matcher is not None:
                if matcher.is_broken:
                    self._problems.append((matcher.key, "it was told to break"))
                matcher.take(token)

    def _noise(self, batch: Batch, last: NDArray[np.int64]) -> NDArray[np.uint64]:
        noise = np.zeros(len(last), U64)
        for number, (lane, position) in enumerate(zip(self._lanes_of(batch, last), batch.positions[last], strict=True)):
            sampler = self.lanes.samplers[lane]
            if sampler is not None and sampler.temperature > 0:
                noise[number] = self.oracle.noise(sampler.seed, sampler.index, int(position) + 1)
        return noise

    @staticmethod
    def _lanes_of(batch: Batch, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lanes of these tokens of a step."""
        return np.repeat(batch.lanes, batch.counts)[places]

    def _check_stamps(self, table: NDArray[np.int64], index: NDArray[np.int64], start: int) -> None:
        """Rows in a slot must carry the stamp of the KV in use (docs/design.md, rule 25)."""
        if self._arena is None or "stamp" not in self._arena.rows:
            return
        size = self._block_tokens
        slots, _generations = self.lanes.slots_of(table)
        # rows of steps in flight are not scattered yet
        flying = {self.config.stamp_base + flight.batch.step_id for flight in self._flights}
        stamps = self._kv_stamps[index[:start]]
        where = (slots[:, None] * size + np.arange(size)).ravel()[:start]
        settled = ~np.isin(stamps, list(flying)) if flying else np.ones(start, bool)
        rows: NDArray[Any] = self._arena.rows["stamp"][where, 0]
        if (rows[settled] != stamps[settled]).any():
            raise InvariantBroken("rows in a slot do not belong to the KV in use")

    def _routing(self, batch: Batch, digests: NDArray[np.uint64]) -> NDArray[np.generic]:
        if not self.limits.routing_debug:
            return self.oracle.rows(digests)
        spec = AuxSpec("routing", (self.config.num_moe_layers, self.config.top_k), self.oracle.row_dtype.__name__)
        return debug_rows(batch.positions, spec)

    def _is_free(self, batch: Batch) -> bool:
        return self.config.free and not self.limits.routing_debug and batch.num_decodes == len(batch.lanes)

    def _free_step(self, batch: Batch) -> tuple[StepOutput, dict[str, NDArray[np.generic]]]:
        tokens = (self._last_token[batch.lanes] + 1) % (self.config.vocab_size - _FREE_MARGIN)
        self._last_token[batch.lanes] = tokens
        output = StepOutput(batch.step_id, tuple(tokens.tolist()))
        if self._arena is None:
            return output, {}
        count = len(tokens)
        for name, rows in self._arena.rows.items():
            if name not in self._constant or len(self._constant[name]) < count:
                ramp = np.arange(int(np.prod(rows.shape[1:]))) % self.config.num_experts
                shaped = ramp.astype(rows.dtype).reshape(rows.shape[1:])
                self._constant[name] = np.broadcast_to(shaped, (max(count, 256), *rows.shape[1:])).copy()
        return output, {name: self._constant[name][:count] for name in self._arena.rows}
