"""What a runner is: the thing that owns a model and its KV cache, and performs steps.

The contract that `fdasync.testing.RunnerTests` checks. A runner knows sequences by number, blocks by
id and slots by number; it knows nothing of requests, text, prefix caching or deadlines. Called by
`driver.py` in process, or by `worker/proxy.py` on the other side of a socket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from fdasync.cache.aux import AuxSpec
from fdasync.errors import DeadlineExceeded, FdasyncError, InvariantBroken, WeightsRejected
from fdasync.result import TopLogprobs

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut


class RunnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine asks of a runner, before it loads.

    Attributes:
        model: checkpoint folder, or "" where the runner needs none.
        capture: of routing: "auto" (if the model has MoE layers), True (refuse a model without them), False.
        max_running: most sequences at a time.
        max_step_tokens: most tokens in one step.
        max_context_tokens: bound on a sequence, or None for the model's own.
        block_tokens, num_blocks: as configured, or None to let the runner choose or profile.
        pipeline_depth: most steps in flight.
        routing_debug: record digits of each token's position instead of expert ids (`cache/debug_rows.py`).
    """

    model: str = ""
    capture: bool | Literal["auto"] = "auto"
    max_running: int
    max_step_tokens: int
    max_context_tokens: int | None = None
    block_tokens: int | None = None
    num_blocks: int | None = None
    pipeline_depth: int = 1
    routing_debug: bool = False


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is, once loaded and profiled; a worker's Hello.

    Attributes:
        model: name for people.
        fingerprint: hex digest of everything but the weights that KV depends on (architecture, config).
        weights_id: hex XXH3-128 over the tensor bytes as loaded (DECISIONS 1).
        vocab_size, eos_ids: of the model; sampled ids are below vocab_size.
        max_context_tokens: most tokens of one sequence, prompt and output.
        block_tokens, num_blocks: of the KV cache that `bind` will allocate.
        block_nbytes: of one block over all layers.
        kv_layout, kv_dtype: names; blocks of other layouts or dtypes are never mixed.
        aux_specs: what each step writes per token, all of it (`AuxArena.scatter`): routing where it is captured, and
            whatever else; empty where there is nothing.
        moe_layer_ids: hidden-layer numbers of the routing's rows.
        num_experts, top_k: of the routing.
        top_k_by_layer: where layers differ (DECISIONS 3), else None.
        tokenizer: entry-point name in `fdasync.tokenizers` that fits, or "".
        prefill_tokens_per_s: as measured at start; 0: it was not. What it costs to compute what a store has, until
            steps say better.
        routing_debug: rows name positions, not experts; as was asked for.
        notes: things worth telling a person, such as special cases in force.
    """

    model: str
    fingerprint: str
    weights_id: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context_tokens: int
    block_tokens: int
    num_blocks: int
    block_nbytes: int
    kv_layout: str
    kv_dtype: str
    aux_specs: tuple[AuxSpec, ...] = ()
    moe_layer_ids: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    top_k_by_layer: tuple[int, ...] | None = None
    tokenizer: str = ""
    prefill_tokens_per_s: float = 0.0
    routing_debug: bool = False
    notes: tuple[str, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """What a step sampled, one entry per sampled sequence, in the order `RunStep` defines.

    Attributes:
        tokens: sampled ids.
        raw, processed: log-prob of each; None when no sampled sequence asked (entries of sequences that did
            not ask are of no meaning).
        top: alternatives; None likewise.
    """

    step_id: int
    tokens: tuple[int, ...]
    raw: tuple[float, ...] | None = None
    processed: tuple[float, ...] | None = None
    top: tuple[TopLogprobs | None, ...] | None = None


class CopyOutput(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """A copy of blocks between device and host is done.

    Attributes:
        kv_nbytes: KV moved.
        aux_nbytes: rows moved, by the arena's own count: slots stay with their KV, so none are.
    """

    copy_id: int
    kv_nbytes: int
    aux_nbytes: int


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a caller gives for a weight update.

    Attributes:
        name: as in the checkpoint or in the model's state dict.
        dtype: numpy's name, or "bfloat16".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Runner(ABC):
    """One model and its KV cache.

    Life: `open` once, `bind` once, then `launch` any number of times, then `aclose`. Used from one loop.
    `config_type` is a frozen msgspec Struct that the registry decodes `runner_config` into.
    """

    config_type: ClassVar[type[msgspec.Struct]]

    def __init__(self, config: Any, limits: RunnerLimits) -> None:
        self.config = config
        self.limits = limits
        #: set by the engine: tells it of an end that no step in flight would show (a worker that died idle)
        self.on_failure: Callable[[Exception], None] | None = None

    @abstractmethod
    async def open(self) -> Capacity:
        """Load, profile, check itself. May block its loop: a runner that does belongs in a worker.

        Raises CheckpointError, UnsupportedModel or ConfigError; then `aclose` is still called.
        """

    @abstractmethod
    async def bind(self, num_blocks: int, arena: AuxArena | None, host: HostArena | None = None) -> None:
        """Allocate `num_blocks` KV blocks, use `arena` for rows (None: there are no aux specs) and `host` for copies of
        blocks (None: there is no host tier).

        The caller owns both and keeps them open until after `aclose`.
        """

    @abstractmethod
    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """Start a step; return at once. Steps complete in the order of launch.

        The future ends with the output when KV and rows of the step are written, or with RunnerError (then
        the runner takes no more steps). Cancelling it stops the waiting, not the work. Between launch and
        completion no block or slot named by the step may be given to another writer.
        """

    @abstractmethod
    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Start copying the KV of whole blocks between device and host; return at once.

        The future ends when every byte is there, or with RunnerError (then the runner takes no more work).
        Copies and steps may complete in any order: until this one has, no step in flight or to come writes a block
        that it reads, or touches one that it writes. Rows stay where they are. Cancelling stops the waiting only.
        """

    # -- new weights: no step is in flight, none is launched before the end ---------------------------

    async def load_folder(self, path: str) -> str:
        """Replace all weights by those of a checkpoint folder of the same architecture; returns their weights id.

        Raises WeightsRejected before anything is changed, WeightsBroken after.
        """
        raise WeightsRejected(f"this runner cannot load {path!r}: it takes no new weights")

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        """Check names, shapes and dtypes of what will be written; nothing is changed yet. Raises WeightsRejected."""
        raise WeightsRejected(f"this runner takes no new weights ({len(tensors)} tensors were given)")

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        """Write the next bytes of tensor `number` of `begin_tensors`: each comes whole, in order, in pieces that hold
        whole elements. `data` is the caller's again on return. Raises WeightsBroken."""
        raise InvariantBroken(f"write_tensor({number}, {offset_nbytes}) of {len(data)} bytes without begin_tensors")

    async def end_tensors(self) -> None:
        """Every byte was written. Tensors that were not named keep their values. Raises WeightsBroken."""
        raise InvariantBroken("end_tensors without begin_tensors")

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        """The error to fail with when `what` (a step) did not complete within its deadline."""
        return DeadlineExceeded(what, deadline_s)

    @abstractmethod
    async def aclose(self) -> None:
        """Free everything; idempotent, right after a failed `open` too. Waits for launched work, bounded."""
