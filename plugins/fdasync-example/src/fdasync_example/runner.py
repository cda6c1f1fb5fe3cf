"""A runner for a mixture-of-experts model of arithmetic, with a second aux datum; `docs/write-a-runner.md` builds it.

A token's KV is one word. Logits and routing of a position are functions of all words up to it, so a block that is
stale, missing or misplaced changes the answer. Beside its routing each token has the entropy of the distribution of the
next one. The runner computes where it is called, in numpy: nothing is ever in flight. It samples greedily or at a
temperature, adds a logit bias, and knows no filter, no log-probs and no new weights. Made by `make_runner`.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import numpy as np

from fdasync.cache.aux import ROUTING, AuxSpec
from fdasync.errors import ConfigError, InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.runner.base import Capacity, CopyOutput, Runner, RunnerLimits, StepOutput
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.request import SamplerSpec
    from fdasync.runner.input_batch import Batch

VOCAB, LAYERS, EXPERTS, TOP_K = 64, 2, 8, 2
ENTROPY = AuxSpec("entropy", (1,), "float32")
_U64 = np.uint64
_WORD_NBYTES = 8

T = TypeVar("T")


class TinyMoeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model, and its aux data.

    Attributes:
        seed: of the model, in place of weights.
        entropy: record the entropy of the distribution of each next token, `Sample.aux["entropy"]`, float32 [1].
    """

    seed: int = 0
    entropy: bool = False


class TinyMoeRunner(Runner):
    """See the module."""

    config_type: ClassVar[type[msgspec.Struct]] = TinyMoeConfig
    config: TinyMoeConfig

    def __init__(self, config: TinyMoeConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._specs: tuple[AuxSpec, ...] = ()
        self._table: InputBatch | None = None
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None
        self._failure = ""

    async def open(self) -> Capacity:
        limits = self.limits
        if limits.routing_debug:
            raise ConfigError("routing_debug", "this runner does not know it")
        specs = [AuxSpec(ROUTING, (LAYERS, TOP_K), "uint8")] if limits.capture is not False else []
        if self.config.entropy:
            specs.append(ENTROPY)
        self._specs = tuple(specs)
        self._block_tokens = limits.block_tokens or 16
        self._context = limits.max_context_tokens or 1024
        captured = bool(specs) and specs[0].name == ROUTING
        return Capacity(
            model="tiny_moe",
            fingerprint=hashlib.blake2b(b"tiny_moe 1", digest_size=16).hexdigest(),
            weights_id=f"{self.config.seed:032x}",
            vocab_size=VOCAB,
            eos_ids=(),
            max_context_tokens=self._context,
            block_tokens=self._block_tokens,
            num_blocks=limits.num_blocks or 256,
            block_nbytes=self._block_tokens * _WORD_NBYTES,
            kv_layout="words",
            kv_dtype="uint64",
            aux_specs=self._specs,
            moe_layer_ids=tuple(range(LAYERS)) if captured else (),
            num_hidden_layers=LAYERS,
            num_experts=EXPERTS if captured else 0,
            top_k=TOP_K if captured else 0,
        )

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        # this model has no recurrent state
        del snapshots
        self._table = InputBatch(self.limits.max_running, self._context, self._block_tokens, num_blocks)
        self._kv = np.zeros((num_blocks, self._block_tokens), _U64)
        self._arena, self._host = arena, host

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        return self._now(lambda table: self._perform(table, step), step.step_id)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        return self._now(lambda table: self._move(table, copy))

    async def aclose(self) -> None:
        self._table = self._arena = self._host = None

    def _now(self, work: Callable[[InputBatch], T], step_id: int = -1) -> asyncio.Future[T]:
        """The work's result as a future that is done. A failure fails this future, and every later one."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            if self._failure or self._table is None:
                raise InvariantBroken(self._failure or "the runner is closed, or not bound yet")
            future.set_result(work(self._table))
        except (InvariantBroken, KeyError, IndexError, ValueError) as error:
            self._failure = f"{type(error).__name__}: {error}"
            future.set_exception(RunnerError(self._failure, step_id))
        return future

    # -- a step -------------------------------------------------------------------------------------

    def _perform(self, table: InputBatch, step: RunStep) -> StepOutput:
        batch = table.plan(step)
        if not len(batch.positions):
            return StepOutput(step.step_id, ())
        lanes = np.repeat(batch.lanes, batch.counts)
        tokens = table.tokens[lanes, batch.positions].astype(_U64)
        with np.errstate(over="ignore"):
            self._kv.reshape(-1)[batch.kv_index] = _mix(tokens * _U64(2**20) + batch.positions.astype(_U64))
            logits, routing = self._forward(self._contexts(table, batch))
        rows = self._rows(logits, routing)
        if self._arena is not None:
            self._arena.scatter(batch.aux_index, batch.generations, rows)
        return StepOutput(step.step_id, self._sample(table, batch, logits))

    def _contexts(self, table: InputBatch, batch: Batch) -> NDArray[np.uint64]:
        """The context of each token of the step: the sum of all words up to its own, read by the block table."""
        found = []
        for lane, start, count in zip(batch.lanes.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True):
            words = self._kv[table.block_table(lane, start + count)].reshape(-1)[: start + count]
            found.append(np.cumsum(words)[start:])
        return np.concatenate(found)

    def _forward(self, contexts: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Logits [T, VOCAB], and the chosen experts [T, LAYERS, TOP_K]."""
        state = _mix(contexts + _U64(self.config.seed))[:, None]
        scores = _mix(state + np.arange(LAYERS * EXPERTS, dtype=_U64)).reshape(-1, LAYERS, EXPERTS)
        routing = np.argsort(scores, axis=-1)[..., : -TOP_K - 1 : -1].astype(np.uint8)
        logits = (_mix(state + np.arange(1000, 1000 + VOCAB, dtype=_U64)) >> _U64(40)).astype(np.float32)
        return logits / np.float32(2**21), routing

    def _rows(self, logits: NDArray[np.float32], routing: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
        """The rows of every spec, by its name: a step writes all of them."""
        rows: dict[str, NDArray[np.generic]] = {}
        for spec in self._specs:
            rows[spec.name] = routing if spec.name == ROUTING else entropy_of(logits)
        return rows

    def _sample(self, table: InputBatch, batch: Batch, logits: NDArray[np.float32]) -> tuple[int, ...]:
        """Sample a token of each sequence that wants one, and write it to where the next step reads it."""
        chosen: list[int] = []
        lasts = np.cumsum(batch.counts) - 1
        for number in batch.sampled.tolist():
            lane, position = int(batch.lanes[number]), int(batch.positions[lasts[number]]) + 1
            token = _draw(logits[lasts[number]], table.samplers[lane], position)
            # a sequence at the end of its context samples a token that no step will read
            if position < table.tokens.shape[1]:
                table.tokens[lane, position] = token
            chosen.append(token)
        return tuple(chosen)

    # -- a copy -------------------------------------------------------------------------------------

    def _move(self, table: InputBatch, copy: SwapOut | SwapIn) -> CopyOutput:
        if self._host is None:
            raise InvariantBroken("a copy, and there is no host tier")
        for block, place in zip(copy.device, copy.host, strict=True):
            if isinstance(copy, SwapOut):
                self._host.kv[place] = self._kv[block].view(np.uint8)
            else:
                self._kv[block] = self._host.kv[place].view(_U64)
        if isinstance(copy, SwapIn):
            # rows stay in their slots; the blocks take over the slots of the copied KV
            table.place(copy.device, copy.slots, copy.generations)
        return CopyOutput(copy.copy_id, len(copy.device) * self._host.block_nbytes, 0)


def entropy_of(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Entropies [T, 1], in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True)
    share = np.exp(shifted) / total
    entropy: NDArray[np.float32] = (np.log(total) - (share * shifted).sum(-1, keepdims=True)).astype(np.float32)
    return entropy


def _draw(logits: NDArray[np.float32], sampler: SamplerSpec | None, position: int) -> int:
    """Greedy, or by noise that depends on seed, sample index and position alone."""
    if sampler is not None and sampler.bias_ids:
        bias = sampler.logit_bias()
        logits = logits.copy()
        logits[list(bias)] += np.fromiter(bias.values(), np.float32)
    if sampler is None or sampler.temperature == 0.0:
        return int(logits.argmax())
    word = int.from_bytes(
        hashlib.blake2b(f"{sampler.seed} {sampler.index} {position}".encode(), digest_size=8).digest()
    )
    share = np.exp((logits - logits.max()) / sampler.temperature).cumsum()
    return int(np.searchsorted(share, share[-1] * (word / 2**64), side="right").clip(0, VOCAB - 1))


def _mix(words: Any) -> NDArray[np.uint64]:
    """Hash each word to a word (splitmix64)."""
    with np.errstate(over="ignore"):
        words = np.asarray(words, _U64) + _U64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> _U64(27))) * _U64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = words ^ (words >> _U64(31))
    return mixed
