"""A runner without a model: numpy arithmetic with a closed-form answer, for tests and benchmarks.

This module is the runner's life: its capacity, steps and copies in time, weights. `steps.py` computes a step,
`copies.py` says which copies may run, `state.py` keeps the recurrent state.

All arrays are the host's: `tolist` copies and waits for nothing. "Device" work is done at launch, in order, as on a
stream. Rows stay in a transient buffer and are scattered when the step completes, at a time that the cost model sets.
The runner knows no requests and never blocks; a rank of a group that has joined an exchange waits there in each step.
Every rank holds and computes whole blocks, and writes its own shares of them to the host: a share that no rank writes,
or that two ranks do, shows in tokens. The engine calls it, in its own process or in a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.cache.aux import AuxSpec
from fdasync.errors import BadInput, InvariantBroken, RunnerError, WeightsRejected
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.request import WeightsFingerprint
from fdasync.runner.base import Capacity, CopyOutput, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.shares import Part, part_of
from fdasync.runner.synthetic.copies import check_beside_copies, check_beside_steps, check_blocks
from fdasync.runner.synthetic.oracle import U64, SyntheticConfig
from fdasync.runner.synthetic.peers import SyntheticPeers
from fdasync.runner.synthetic.ranks import compare_ranks
from fdasync.runner.synthetic.sleep import SPOILT, SyntheticSleep
from fdasync.runner.synthetic.steps import Flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.ipc.exchange import Exchange
    from fdasync.ipc.peers.blocks import BlockPull, PeerBlocks
    from fdasync.runner.input_batch import Batch

WEIGHTS_FILE = "weights.json"
_WORD_NBYTES = 8
_STAMP_NBYTES = 4
# halves of the one word of weights, and the tensors that replace them
_LOW, _HIGH = 1, 2
_WHOLE = _LOW | _HIGH
_TENSORS = {"weights": (_WHOLE, "uint64"), "weights.low": (_LOW, "uint32"), "weights.high": (_HIGH, "uint32")}


class SyntheticRunner(SyntheticSleep):
    """See the module."""

    def __init__(self, config: SyntheticConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._rng = np.random.default_rng(config.seed)
        self._copies: list[tuple[SwapOut | SwapIn, asyncio.Future[CopyOutput]]] = []
        # of the tensors to come: the halves that each replaces, and its bytes
        self._incoming: list[tuple[int, bytearray]] | None = None
        # halves of the weights that an update has left unfinished
        self._torn = 0
        self._loading = False
        self._busy_until = 0.0
        self._closed = False
        self._exchange: Exchange | None = None
        # bytes of a host block that this rank writes
        self._own = slice(0, 0)
        self._part = Part(0, 1, writes=True)
        self._peers: SyntheticPeers | None = None

    def join(self, exchange: Exchange) -> None:
        """See `Runner`: in each step the ranks compare tokens and rows."""
        self._exchange = exchange

    async def open(self) -> Capacity:
        config, limits = self.config, self.limits
        capture = config.num_moe_layers > 0 if limits.capture == "auto" else limits.capture
        if capture and not config.num_moe_layers:
            raise BadInput("routing", "was asked for, but the model has no MoE layers", hint="set routing=False")
        if config.max_run_tokens < 1 or (config.free and config.max_run_tokens > 1):
            raise BadInput("max_run_tokens", f"is {config.max_run_tokens}", limit="1 or more; 1 with free=True")
        if limits.speculation and (config.free or config.max_run_tokens > 1):
            raise BadInput("speculation", f"is {limits.speculation}", limit="0 with free=True or drafts of its own")
        if config.free and config.pass_stamp:
            raise BadInput("pass_stamp", "free steps stamp no KV", hint="leave one of free and pass_stamp out")
        if config.chosen_top_k and config.free:
            raise BadInput(
                "chosen_top_k", "free steps choose no positions", hint="leave one of free and chosen_top_k out"
            )
        if config.state_words and config.free:
            raise BadInput("state_words", "is set", limit="0 with free=True")
        self._block_tokens = limits.block_tokens or config.block_tokens
        context = min(config.max_context_tokens, limits.max_context_tokens or config.max_context_tokens)
        self._context = context
        shape = (config.num_moe_layers, config.top_k)
        specs = [AuxSpec("routing", shape, self.oracle.row_dtype.__name__)] if capture else []
        if config.values_spec:
            specs.append(AuxSpec("values", (4,), "float16"))
        if config.pass_stamp:
            specs.append(AuxSpec("stamp", (1,), "uint32"))
        costs = dict.fromkeys(("step_s", "token_s", "copy_s", "load_s", "sleep_s", "jitter"), 0.0)
        # the content of KV does not depend on its size, on the steps that write it, nor on where a sample ends
        most = {
            "num_blocks": 1,
            "max_context_tokens": 1,
            "eos_id": -1,
            "max_run_tokens": 1,
            "num_snapshots": 1,
            "chosen_top_k": 0,
            "kv_shares": 1,
            "fail_wakes": 0,
        }
        plain = msgspec.structs.replace(config, weights_id=0, seed=0, stamp_base=0, **most, **costs)
        token_nbytes = _WORD_NBYTES + (_STAMP_NBYTES if config.pass_stamp else 0)
        block_nbytes = token_nbytes * self._block_tokens
        if config.kv_shares < 1 or block_nbytes % config.kv_shares:
            raise BadInput("kv_shares", f"is {config.kv_shares}", limit=f"a divisor of {block_nbytes} bytes of a block")
        part = self._part = part_of(config.kv_shares, limits.tensor_parallel, limits.rank)
        share_nbytes = block_nbytes // config.kv_shares
        first = part.first * share_nbytes
        self._own = slice(first, first + (part.num_shares * share_nbytes if part.writes else 0))
        return Capacity(
            model="synthetic",
            fingerprint=hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).hexdigest(),
            weights_id=f"{config.weights_id:032x}",
            vocab_size=config.vocab_size,
            eos_ids=(config.eos_id,) if config.eos_id >= 0 else (),
            max_context_tokens=context,
            block_tokens=self._block_tokens,
            num_blocks=limits.num_blocks or config.num_blocks,
            block_nbytes=block_nbytes,
            kv_layout="synthetic",
            kv_dtype="uint64",
            aux_specs=tuple(specs),
            state_specs=self._state_specs(),
            num_snapshots=self._num_snapshots,
            moe_layer_ids=tuple(range(config.num_moe_layers)) if capture else (),
            num_hidden_layers=config.num_moe_layers,
            num_experts=config.num_experts if capture else 0,
            top_k=config.top_k if capture else 0,
            max_run_tokens=self._most,
            grammars=not config.free,
            scores_prompts=True,
            chosen=self._chosen_shape(),
            routing_debug=limits.routing_debug and capture,
            tensor_parallel=limits.tensor_parallel,
            # a free decode step does not look at the prefix
            numerics="default" if config.free else limits.numerics,
            sum_slices=limits.sum_slices,
            no_sleep="other instances of this machine have its blocks mapped" if limits.shows_blocks else "",
            notes=("no model: tokens follow from those before them by a rule",),
        )

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[StepOutput] = loop.create_future()
        if self._loading:
            return self._refuse(done, RunnerError("launched while weights are loading", step.step_id))
        if self.cannot_step:
            return self._refuse(done, RunnerError(f"launched with {self.cannot_step}", step.step_id))
        if self.config.fail_step == step.step_id:
            return self._refuse(done, RunnerError("the step was told to fail", step.step_id))
        try:
            self._check_writers(step)
            if self._states is not None:
                self._states.check(step, [copy for copy, _ in self._copies])
            batch = self._plan(step)
            for start in step.starts:
                self._matchers[self.lanes.lane_of(start.key)] = self._matcher_of(start)
            output, rows = self._free_step(batch) if self._is_free(batch) else self._compute(batch)
            if self._exchange is not None:
                compare_ranks(self._exchange, output)
            flight = Flight(step, batch, output, rows, done)
            flight.chosen, self._chosen = self._chosen, []
        except (InvariantBroken, IndexError, KeyError, ValueError) as error:
            return self._refuse(done, RunnerError(f"{type(error).__name__}: {error}", step.step_id))
        except RunnerError as error:
            # of the exchange
            return self._refuse(done, RunnerError(error.problem, step.step_id))
        self._flights.append(flight)
        if self.config.hang_step == step.step_id:
            return done
        if not self._takes_time:
            # one after the other, a loop turn each
            if len(self._flights) == 1:
                loop.call_soon(self._complete, flight)
        else:
            # without a token it may take none, and still ends behind the step before it
            self._busy_until = max(self._busy_until, loop.time()) + max(self._cost_s(batch), 0.0)
            # bare timer: how long its device computes
            loop.call_at(self._busy_until, self._complete, flight)
        return done

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
        peers, self._peers = self._peers, None
        if peers is not None:
            self._kv, self._kv_stamps = np.zeros(0, U64), np.zeros(0, np.uint32)
            await peers.aclose()

    # -- blocks of other instances ----------------------------------------------------------------

    def _allocate(self, words: int) -> tuple[NDArray[U64], NDArray[np.uint32]]:
        kv, stamps = super()._allocate(words)
        stamped, size, shares = self.config.pass_stamp, self._block_tokens, self.config.kv_shares
        if not self.limits.shows_blocks or not SyntheticPeers.takes(size, shares, stamped=stamped):
            return kv, stamps
        self._peers = SyntheticPeers(words, size, shares, self._part, self, stamped=stamped)
        return self._peers.words, self._peers.stamps if stamped else stamps

    def peer_blocks(self) -> PeerBlocks | None:
        return None if self._peers is None else self._peers.rows

    def check_pull(self, pull: BlockPull) -> None:
        """Raises InvariantBroken where a step or a copy in flight meets the blocks that are to be filled."""
        copy = SwapIn(copy_id=-1, host=(), device=pull.ours, slots=pull.slots, generations=pull.generations)
        check_beside_steps(copy, self._flights, self.lanes, self._block_tokens)
        check_beside_copies(copy, [other for other, _ in self._copies])
        # its targets are in use from now on: spoil them, so that an early read shows
        self._kv.reshape(-1, self._block_tokens)[list(pull.ours)] = U64(0xEEEE)

    def pulled(self, pull: BlockPull) -> None:
        """Blocks of another instance are here."""
        self.lanes.place(pull.ours, pull.slots, pull.generations)

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
        if copy.snapshots and self._states is not None:
            self._states.spoil(copy, writes=self.limits.rank == 0)
        elif isinstance(copy, SwapOut):
            self._host.kv[list(copy.host), self._own] = 0xEE
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
        """Raises InvariantBroken for a copy that may not run now."""
        assert self._host is not None
        if self._loading or "kv_cache" in self._released:
            raise InvariantBroken(f"copy {copy.copy_id} began while weights are loading, or without blocks")
        if copy.snapshots:
            if copy.device or self._states is None:
                raise InvariantBroken(f"copy {copy.copy_id} has snapshots, and blocks or a model without state")
            others = [other for other, _ in self._copies]
            self._states.check_copy(copy, others, [flight.step for flight in self._flights])
            return
        check_blocks(copy, len(self._kv) // self._block_tokens, self._host.num_blocks)
        if self.config.free:
            # the other checks look at every block of every sequence
            return
        check_beside_steps(copy, self._flights, self.lanes, self._block_tokens)
        check_beside_copies(copy, [other for other, _ in self._copies])

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
        if copy.snapshots and self._states is not None:
            moved_nbytes = self._states.copy(copy, writes=self.limits.rank == 0)
        elif isinstance(copy, SwapOut):
            whole = np.empty((len(device), host.block_nbytes), np.uint8)
            whole[:, :split] = words[device].view(np.uint8)
            if self.config.pass_stamp:
                whole[:, split:] = stamps[device].view(np.uint8)
            host.kv[places, self._own] = whole[:, self._own]
            moved_nbytes = len(device) * (self._own.stop - self._own.start)
        else:
            moved_nbytes = len(device) * host.block_nbytes
            words[device] = np.ascontiguousarray(host.kv[places, :split]).view(U64)
            if self.config.pass_stamp:
                stamps[device] = np.ascontiguousarray(host.kv[places, split:]).view(np.uint32)
            self.lanes.place(copy.device, copy.slots, copy.generations)
        if not done.done():
            moved = 0 if self._arena is None else self._arena.written_nbytes - before
            done.set_result(CopyOutput(copy.copy_id, moved_nbytes, moved))

    # -- weights ----------------------------------------------------------------------------------

    async def load_folder(self, path: str) -> str:
        """A folder with `weights.json`: {"weights_id": an integer of 64 bits}; with a "base", another such integer, it
        is a delta, which is applied to these weights alone."""
        folder = _read_folder(path)
        if folder.base is not None and (folder.base != self.weights_id or self._owed):
            raise WeightsRejected(f"{path}: is a delta to weights {folder.base}, which are not in use")
        await self._load(folder.weights_id)
        return f"{self.weights_id:032x}"

    async def read_weights_id(self, path: str) -> str:
        return f"{_read_folder(path).weights_id:032x}"

    async def delta_base(self, path: str) -> str:
        base = _read_folder(path).base
        return "" if base is None else f"{base:032x}"

    async def forget_weights(self) -> None:
        self.weights_id, self.lacks_weights = SPOILT, True

    @property
    def _owed(self) -> int:
        """Halves of the weights that the next update must bring."""
        return _WHOLE if self.lacks_weights else self._torn

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        """One tensor named "weights", uint64 [1], or its halves "weights.low" and "weights.high", uint32 [1]."""
        self._incoming = self._checked(tensors, self._owed)
        self._loading = True

    def _checked(self, tensors: Sequence[TensorMeta], owed: int) -> list[tuple[int, bytearray]]:
        """Room for tensors that fit, with the halves that each replaces. Raises WeightsRejected."""
        found, covered = [], 0
        for meta in tensors:
            halves, dtype = _TENSORS.get(meta.name, (0, ""))
            if not halves or (meta.dtype, tuple(meta.shape)) != (dtype, (1,)) or halves & covered:
                raise WeightsRejected(f"{meta} is none of {', '.join(_TENSORS)}, of one item, each of them once")
            covered |= halves
            found.append((halves, bytearray(_WORD_NBYTES if halves == _WHOLE else _WORD_NBYTES // 2)))
        if owed & ~covered:
            raise WeightsRejected("these tensors leave out some that were dropped, or that an update left unfinished")
        return found

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        if self._incoming is None or not 0 <= number < len(self._incoming):
            raise InvariantBroken("write_tensor without begin_tensors")
        halves, room = self._incoming[number]
        self._torn |= halves
        room[offset_nbytes : offset_nbytes + len(data)] = data

    async def end_tensors(self) -> None:
        if self._incoming is None:
            raise InvariantBroken("end_tensors without begin_tensors")
        incoming, self._incoming = self._incoming, None
        await self._load(self._replaced(incoming))

    def _replaced(self, incoming: Sequence[tuple[int, bytearray]]) -> int:
        """The weights in use with some halves of others."""
        word = bytearray(self.weights_id.to_bytes(_WORD_NBYTES, "little"))
        for halves, data in incoming:
            first = _WORD_NBYTES // 2 if halves == _HIGH else 0
            word[first : first + len(data)] = data
        return int.from_bytes(word, "little")

    async def fingerprint_weights(self, with_tensors: bool = False) -> WeightsFingerprint:
        """As of a folder with these weights. The one tensor's digest is its value."""
        held = f"{self.weights_id:032x}"
        return WeightsFingerprint(held, {"weights": held} if with_tensors else {})

    async def _load(self, weights_id: int) -> None:
        if "weights" in self._released:
            raise InvariantBroken("weights are loaded where there is no memory for them")
        if self._flights or self._copies:
            raise InvariantBroken("weights are loaded while steps or copies are in flight")
        self._loading = True
        if self.config.load_s:
            await asyncio.sleep(self.config.load_s)
        self.weights_id = weights_id
        self.lacks_weights, self._torn = False, 0
        self._loading = False

    @property
    def _takes_time(self) -> bool:
        return self.config.step_s > 0 or self.config.token_s > 0

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

    def _complete(self, flight: Flight) -> None:
        if self._closed:
            return
        if self._flights[0] is not flight:
            # steps complete in order: it waits for an earlier step that hangs, or whose timer is late
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
            at_once = following.due or not self._takes_time
            if at_once and following.batch.step_id != self.config.hang_step:
                asyncio.get_running_loop().call_soon(self._complete, following)

    def _write_rows(self, flight: Flight) -> RunnerError | None:
        """Write the step's rows to their slots; returns the step's error where they do not fit the specs."""
        try:
            for run, picked in flight.chosen:
                for layer in range(picked.shape[1]):
                    run.rows.write(layer, run.position, picked[:, layer])
                run.rows.stand(run.position, len(picked))
            if self._arena is not None:
                self._arena.scatter(flight.batch.aux_index, flight.batch.generations, flight.rows)
        except InvariantBroken as error:
            return RunnerError(str(error), flight.batch.step_id)
        return None


class _Weights(msgspec.Struct):
    weights_id: int
    base: int | None = None


def _read_folder(path: str) -> _Weights:
    """What a folder says. Raises WeightsRejected."""
    try:
        text = Path(path, WEIGHTS_FILE).read_bytes()  # blocking: some bytes, in tests
        return msgspec.json.decode(text, type=_Weights)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsRejected(f"{path}: {error}") from None
