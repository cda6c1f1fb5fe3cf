"""A runner without a model: numpy arithmetic with a closed-form answer, for tests and benchmarks.

Tokens and rows are a function of *all* KV words that the block table points at (`oracle.py`): one stale, missing or
misplaced block changes the output.

With `max_run_tokens` above 1 it works as speculative decoding does: a step forwards the last token of a sequence and
drafts behind it, of which the first ones are right and the others wrong, samples at every position, and yields the
samples up to the first that a draft did not foresee. KV of the wrong drafts stays behind until it is written again.

All arrays are the host's: `tolist` copies and waits for nothing. "Device" work is done at launch, in order, as on a
stream. Rows stay in a transient buffer and are scattered when the step completes, at a time that the cost model sets.
The runner knows no requests and never blocks. The engine calls it, in its own process or in a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from fdasync.cache.aux import AuxSpec
from fdasync.cache.debug_rows import debug_rows
from fdasync.errors import BadInput, InvariantBroken, RunnerError, WeightsRejected
from fdasync.events.actions import SwapOut
from fdasync.request import Grammar
from fdasync.runner.base import Capacity, CopyOutput, PromptScores, Runner, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.input_batch import Batch, InputBatch
from fdasync.runner.oracle import U64, Oracle, SyntheticConfig, place
from fdasync.runner.prompt_scores import scored_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SeqStart, SwapIn
    from fdasync.runner.synthetic_grammar import Matcher

WEIGHTS_FILE = "weights.json"
_WORD_NBYTES = 8
_STAMP_NBYTES = 4

# free mode never samples the topmost ids: a benchmark can use them as stop ids
_FREE_MARGIN = 16


class SyntheticRunner(Runner):
    """See the module."""

    config_type: ClassVar[type[msgspec.Struct]] = SyntheticConfig

    def __init__(self, config: SyntheticConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self.config: SyntheticConfig = config
        self.oracle = Oracle(config)
        self.weights_id = config.weights_id
        self._rng = np.random.default_rng(config.seed)
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None
        self._copies: list[tuple[SwapOut | SwapIn, asyncio.Future[CopyOutput]]] = []
        self._incoming: bytearray | None = None
        self._loading = False
        self._flights: deque[_Flight] = deque()
        self._busy_until = 0.0
        self._closed = False

    async def open(self) -> Capacity:
        config, limits = self.config, self.limits
        capture = config.num_moe_layers > 0 if limits.capture == "auto" else limits.capture
        if capture and not config.num_moe_layers:
            raise BadInput("routing", "was asked for, but the model has no MoE layers", hint="set routing=False")
        if config.max_run_tokens < 1 or (config.free and config.max_run_tokens > 1):
            raise BadInput("max_run_tokens", f"is {config.max_run_tokens}", limit="1 or more; 1 with free=True")
        if config.free and config.pass_stamp:
            raise BadInput("pass_stamp", "free steps stamp no KV", hint="leave one of free and pass_stamp out")
        self._block_tokens = limits.block_tokens or config.block_tokens
        context = min(config.max_context_tokens, limits.max_context_tokens or config.max_context_tokens)
        self._context = context
        shape = (config.num_moe_layers, config.top_k)
        specs = [AuxSpec("routing", shape, self.oracle.row_dtype.__name__)] if capture else []
        if config.values_spec:
            specs.append(AuxSpec("values", (4,), "float16"))
        if config.pass_stamp:
            specs.append(AuxSpec("stamp", (1,), "uint32"))
        costs = dict.fromkeys(("step_s", "token_s", "copy_s", "load_s", "jitter"), 0.0)
        # the content of KV does not depend on its size, on the steps that write it, nor on where a sample ends
        most = {"num_blocks": 1, "max_context_tokens": 1, "eos_id": -1, "max_run_tokens": 1}
        plain = msgspec.structs.replace(config, weights_id=0, seed=0, stamp_base=0, **most, **costs)
        token_nbytes = _WORD_NBYTES + (_STAMP_NBYTES if config.pass_stamp else 0)
        return Capacity(
            model="synthetic",
            fingerprint=hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).hexdigest(),
            weights_id=f"{config.weights_id:032x}",
            vocab_size=config.vocab_size,
            eos_ids=(config.eos_id,) if config.eos_id >= 0 else (),
            max_context_tokens=context,
            block_tokens=self._block_tokens,
            num_blocks=limits.num_blocks or config.num_blocks,
            block_nbytes=token_nbytes * self._block_tokens,
            kv_layout="synthetic",
            kv_dtype="uint64",
            aux_specs=tuple(specs),
            moe_layer_ids=tuple(range(config.num_moe_layers)) if capture else (),
            num_hidden_layers=config.num_moe_layers,
            num_experts=config.num_experts if capture else 0,
            top_k=config.top_k if capture else 0,
            max_run_tokens=config.max_run_tokens,
            grammars=not config.free,
            scores_prompts=True,
            routing_debug=limits.routing_debug and capture,
        )

    async def check_grammar(self, grammar: Grammar) -> None:
        """See `synthetic_grammar.py`."""
        if self.config.free:
            await super().check_grammar(grammar)
        self.oracle.matcher(grammar)

    async def bind(self, num_blocks: int, arena: AuxArena | None, host: HostArena | None = None) -> None:
        size = self._block_tokens
        most = self.config.max_run_tokens
        self.lanes = InputBatch(self.limits.max_running, self._context, size, num_blocks, most)
        self._host = host
        self._kv = np.zeros(num_blocks * size, U64)
        self._kv_stamps = np.zeros(num_blocks * size, np.uint32)
        self._last_token = np.zeros(self.limits.max_running, np.int64)
        # by lane; and what this step found
        self._matchers: list[Matcher | None] = [None] * self.limits.max_running
        self._problems: list[tuple[int, str]] = []
        self._arena = arena
        self._constant: dict[str, NDArray[np.generic]] = {}

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[StepOutput] = loop.create_future()
        if self._loading:
            return self._refuse(done, RunnerError("launched while weights are loading", step.step_id))
        if self.config.fail_step == step.step_id:
            return self._refuse(done, RunnerError("the step was told to fail", step.step_id))
        try:
            self._check_writers(step)
            batch = self.lanes.plan(step)
            for start in step.starts:
                self._matchers[self.lanes.lane_of(start.key)] = self._matcher_of(start)
            output, rows = self._free_step(batch) if self._is_free(batch) else self._compute(batch)
            flight = _Flight(batch, output, rows, done)
        except (InvariantBroken, IndexError, KeyError, ValueError) as error:
            return self._refuse(done, RunnerError(f"{type(error).__name__}: {error}", step.step_id))
        self._flights.append(flight)
        if self.config.hang_step == step.step_id:
            return done
        cost = self._cost_s(batch)
        if cost <= 0.0:
            # one after the other, a loop turn each
            if len(self._flights) == 1:
                loop.call_soon(self._complete, flight)
        else:
            self._busy_until = max(self._busy_until, loop.time()) + cost
            # bare timer: how long its device computes
            loop.call_at(self._busy_until, self._complete, flight)
        return done

    def _matcher_of(self, start: SeqStart) -> Matcher | None:
        """Begun anew from the tokens of the answer so far, whatever interrupted it."""
        packed = start.sampler.grammar
        if not packed:
            return None
        answer = array("i", start.tokens)[start.sampler.prompt_len :]
        return self.oracle.matcher(Grammar.unpacked(packed), answer, key=start.key)

    def _refuse(self, done: asyncio.Future[StepOutput], error: RunnerError) -> asyncio.Future[StepOutput]:
        """Fail a step once the steps that were launched before it have ended."""

        def fail(_: object) -> None:
            if not done.done():
                done.set_exception(error)

        if self._flights:
            self._flights[-1].done.add_done_callback(fail)
        else:
            fail(None)
        return done

    async def aclose(self) -> None:
        self._closed = True
        for flight in self._flights:
            flight.done.cancel()
        for _, copied in self._copies:
            copied.cancel()
        self._flights.clear()
        self._copies.clear()
        self._arena = self._host = None

    # -- copies -----------------------------------------------------------------------------------

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CopyOutput] = loop.create_future()
        if self._host is None:
            done.set_exception(RunnerError(f"copy {copy.copy_id} without a host tier"))
            return done
        try:
            self._check_copy(copy)
        except InvariantBroken as error:
            done.set_exception(RunnerError(str(error)))
            return done
        self._copies.append((copy, done))
        # its targets are in use from now on: spoil them, so that an early read shows
        if isinstance(copy, SwapOut):
            self._host.kv[list(copy.host)] = 0xEE
        else:
            self._kv.reshape(-1, self._block_tokens)[list(copy.device)] = U64(0xEEEE)
        cost = self.config.copy_s
        if cost and self.config.jitter:
            cost *= 1.0 + self.config.jitter * float(self._rng.uniform(-1.0, 1.0))
        if cost > 0:
            # bare timer: how long its device copies
            loop.call_later(cost, self._copied, copy, done)
        else:
            loop.call_soon(self._copied, copy, done)
        return done

    def _check_copy(self, copy: SwapOut | SwapIn) -> None:
        """While a copy runs, no step and no other copy may write its source, nor touch its target."""
        assert self._host is not None
        if self._loading:
            raise InvariantBroken(f"copy {copy.copy_id} began while weights are loading")
        if len(copy.device) != len(copy.host) or not copy.device:
            raise InvariantBroken(f"copy {copy.copy_id} has {len(copy.device)} device and {len(copy.host)} host blocks")
        for ids, count in ((copy.device, len(self._kv) // self._block_tokens), (copy.host, self._host.num_blocks)):
            if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= count:
                raise InvariantBroken(f"copy {copy.copy_id} names blocks {ids}, there are {count}")
        if self.config.free:
            # the checks below look at every block of every sequence
            return
        written: set[int] = set()
        read: set[int] = set()
        for flight in self._flights:
            written |= set((flight.batch.kv_index // self._block_tokens).tolist())
            for lane, length in zip(flight.batch.lanes, flight.ends, strict=True):
                read |= set(self.lanes.block_table(int(lane), int(length)).tolist())
        outward = isinstance(copy, SwapOut)
        if set(copy.device) & (written if outward else written | read):
            raise InvariantBroken(f"copy {copy.copy_id} and a step in flight meet in a device block")
        for other, _ in self._copies:
            both_out = outward and isinstance(other, SwapOut)
            both_in = not outward and not isinstance(other, SwapOut)
            if set(other.device) & set(copy.device) and not both_out:
                raise InvariantBroken(f"copies {other.copy_id} and {copy.copy_id} meet in a device block")
            if set(other.host) & set(copy.host) and not both_in:
                raise InvariantBroken(f"copies {other.copy_id} and {copy.copy_id} meet in a host block")

    def _copied(self, copy: SwapOut | SwapIn, done: asyncio.Future[CopyOutput]) -> None:
        """The bytes move at the end: a source that was given away too early shows."""
        host = self._host
        if self._closed or host is None:
            return
        self._copies = [entry for entry in self._copies if entry[0] is not copy]
        before = 0 if self._arena is None else self._arena.written_nbytes
        size = self._block_tokens
        words, stamps = self._kv.reshape(-1, size), self._kv_stamps.reshape(-1, size)
        device, places = list(copy.device), list(copy.host)
        split = size * _WORD_NBYTES
        if isinstance(copy, SwapOut):
            host.kv[places, :split] = words[device].view(np.uint8)
            if self.config.pass_stamp:
                host.kv[places, split:] = stamps[device].view(np.uint8)
        else:
            words[device] = np.ascontiguousarray(host.kv[places, :split]).view(U64)
            if self.config.pass_stamp:
                stamps[device] = np.ascontiguousarray(host.kv[places, split:]).view(np.uint32)
            self.lanes.place(copy.device, copy.slots, copy.generations)
        if not done.done():
            moved = 0 if self._arena is None else self._arena.written_nbytes - before
            done.set_result(CopyOutput(copy.copy_id, len(device) * host.block_nbytes, moved))

    # -- weights ----------------------------------------------------------------------------------

    async def load_folder(self, path: str) -> str:
        """A folder with `weights.json`: {"weights_id": an integer of 64 bits}."""
        await self._load(_read_folder(path))
        return f"{self.weights_id:032x}"

    async def read_weights_id(self, path: str) -> str:
        return f"{_read_folder(path):032x}"

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        """One tensor named "weights", uint64 [1]."""
        if [tuple(msgspec.structs.astuple(meta)) for meta in tensors] != [("weights", "uint64", (1,))]:
            raise WeightsRejected(f"one tensor 'weights', uint64 [1], is all that this model has; given: {tensors}")
        self._incoming = bytearray(_WORD_NBYTES)
        self._loading = True

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        if self._incoming is None or number:
            raise InvariantBroken("write_tensor without begin_tensors")
        self._incoming[offset_nbytes : offset_nbytes + len(data)] = data

    async def end_tensors(self) -> None:
        if self._incoming is None:
            raise InvariantBroken("end_tensors without begin_tensors")
        incoming, self._incoming = self._incoming, None
        await self._load(int.from_bytes(incoming, "little"))

    async def _load(self, weights_id: int) -> None:
        if self._flights or self._copies:
            raise InvariantBroken("weights are loaded while steps or copies are in flight")
        self._loading = True
        if self.config.load_s:
            await asyncio.sleep(self.config.load_s)
        self.weights_id = weights_id
        self._loading = False

    def _cost_s(self, batch: Batch) -> float:
        cost = self.config.step_s + self.config.token_s * len(batch.positions)
        if cost and self.config.jitter:
            cost *= 1.0 + self.config.jitter * float(self._rng.uniform(-1.0, 1.0))
        return cost

    def _check_writers(self, step: RunStep) -> None:
        """No block named by a step in flight may get another writer (docs/design.md, section 5)."""
        if not self._flights or not (step.starts or step.appends):
            return
        fresh = {append.block for append in step.appends}
        for start in step.starts:
            fresh.update(start.blocks[start.num_cached // self._block_tokens :])
        for flight in self._flights:
            named = set((flight.batch.kv_index // self._block_tokens).tolist())
            if fresh & named:
                raise InvariantBroken(f"blocks {sorted(fresh & named)} have a writer in flight")

    def _complete(self, flight: _Flight) -> None:
        if self._closed:
            return
        if self._flights[0] is not flight:
            # steps complete in order: it waits for an earlier one that hangs, or whose timer is late
            flight.due = True
            return
        self._flights.popleft()
        problem = self._write_rows(flight)
        if not flight.done.done():
            if problem is None:
                flight.done.set_result(flight.output)
            else:
                flight.done.set_exception(problem)
        if self._flights:
            following = self._flights[0]
            at_once = following.due or not (self.config.step_s or self.config.token_s)
            if at_once and following.batch.step_id != self.config.hang_step:
                asyncio.get_running_loop().call_soon(self._complete, following)

    def _write_rows(self, flight: _Flight) -> RunnerError | None:
        """Write the step's rows to their slots; returns the step's error where they do not fit the specs."""
        if self._arena is None:
            return None
        try:
            self._arena.scatter(flight.batch.aux_index, flight.batch.generations, flight.rows)
        except InvariantBroken as error:
            return RunnerError(str(error), flight.batch.step_id)
        return None

    # -- arithmetic -------------------------------------------------------------------------------

    def _compute(self, batch: Batch) -> tuple[StepOutput, dict[str, NDArray[np.generic]]]:
        """Write the KV of the step's tokens, read the KV of everything before, sample."""
        inputs = self._inputs(batch)
        self._kv[batch.kv_index] = self.oracle.kv(inputs, batch.positions, self.weights_id)
        self._kv_stamps[batch.kv_index] = self.config.stamp_base + batch.step_id
        digests = np.empty(len(inputs), U64)
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
        rows: dict[str, NDArray[np.generic]] = {}
        if self._arena is not None:
            if "routing" in self._arena.rows:
                rows["routing"] = self._routing(batch, digests)
            if self.config.values_spec:
                rows["values"] = self.oracle.values(digests)
            if self.config.pass_stamp:
                rows["stamp"] = np.full((len(inputs), 1), self.config.stamp_base + batch.step_id, np.uint32)
        if self.config.max_run_tokens == 1:
            last = ends[batch.sampled] - 1
            tokens = self._sample(batch, digests[last], last)
            self._advance(batch, last, tokens)
            self._last_token[batch.lanes[batch.sampled]] = tokens
            return self._logprobs(batch, tokens, digests, last), rows
        return self._verify(batch, inputs, digests, rows)

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
            run = 1
            while run < count and drafts[first + run] == sampled[first + run - 1]:
                run += 1
            stands[first + run : first + count] = False
            last += range(first, first + run)
            counts.append(run)
        self.lanes.take_runs(batch, np.array(counts[: batch.num_decodes], np.int64))
        tokens = sampled[last]
        self._advance(batch, np.array(last, np.int64), tokens)
        self._last_token[batch.lanes[batch.sampled]] = tokens[np.cumsum(counts, dtype=np.int64) - 1]
        batch.aux_index, batch.generations = batch.aux_index[stands], batch.generations[stands]
        output = self._logprobs(batch, tokens, digests, np.array(last, np.int64))
        output = msgspec.structs.replace(output, counts=tuple(counts))
        return output, {name: part[stands] for name, part in rows.items()}

    def _draft(self, batch: Batch, number: int, first: int) -> list[int]:
        """Tokens to forward behind the last one of a decode: right as far as `Oracle.run_length` says, then wrong."""
        oracle, size = self.oracle, self._block_tokens
        lane, start, count = int(batch.lanes[number]), int(batch.starts[number]), int(batch.counts[number])
        table = self.lanes.block_table(lane, start + count).astype(np.int64)
        index = (table[:, None] * size + np.arange(size)).ravel()[:start]
        digest = oracle.running_sums(self._kv[index])[-1:]
        right = oracle.run_length(start)
        tokens = [int(self._last_token[lane])]
        forks: dict[int, Matcher] = {}
        for ahead in range(count - 1):
            position = np.array([start + ahead])
            with np.errstate(over="ignore"):
                word = oracle.kv(np.array(tokens[-1:]), position, self.weights_id)
                digest = digest + word * place(position.astype(U64))
            token = int(self._sample(batch, digest, np.array([first + ahead]), forks)[0])
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
        return StepOutput(batch.step_id, tuple(tokens.tolist()), raw, processed, top, scores=scores, problems=problems)

    def _scores(self, batch: Batch, digests: NDArray[np.uint64]) -> tuple[PromptScores, ...]:
        scores = []
        for run in scored_runs(batch, self.lanes):
            values, tops = self.oracle.prompt_scores(digests[run.rows], run.tokens, run.top, self.weights_id)
            ids = np.full((len(values), run.top), -1, "<i4")
            best = np.zeros((len(values), run.top), "<f4")
            for row, one in enumerate(tops):
                ids[row, : len(one.token_ids)], best[row, : len(one.token_ids)] = one.token_ids, one.logprobs
            logprobs = values.astype("<f4").tobytes()
            scores.append(PromptScores(run.key, run.start, logprobs, run.top, ids.tobytes(), best.tobytes()))
        return tuple(scores)

    def _inputs(self, batch: Batch) -> NDArray[np.int64]:
        inputs = np.empty(len(batch.positions), np.int64)
        at = 0
        if self.config.max_run_tokens == 1:
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


class _Weights(msgspec.Struct):
    weights_id: int


def _read_folder(path: str) -> int:
    """The weights id that a folder names. Raises WeightsRejected."""
    try:
        text = Path(path, WEIGHTS_FILE).read_bytes()  # blocking: some bytes, in tests
        return msgspec.json.decode(text, type=_Weights).weights_id
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsRejected(f"{path}: {error}") from None


class _Flight:
    """A step that is launched and not completed.

    Attributes:
        batch: the step.
        ends: of each sequence, the position behind its last token in this step.
        output, rows: its results; the rows are not in the arena yet.
        done: set when it completes.
        due: its time has come, and an earlier step has not ended.
    """

    __slots__ = ("batch", "done", "due", "ends", "output", "rows")

    def __init__(
        self, batch: Batch, output: StepOutput, rows: dict[str, NDArray[np.generic]], done: asyncio.Future[StepOutput]
    ) -> None:
        self.batch = batch
        self.ends = batch.starts + batch.counts
        self.output = output
        self.rows = rows
        self.done = done
        self.due = False
