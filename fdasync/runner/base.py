"""The contract of runners: a runner owns a model and its KV cache, and performs steps.

`fdasync.testing.RunnerTests` checks the contract. A runner knows sequences by number, blocks by id and slots by
number; it knows nothing of requests, text, prefix caching or deadlines. Called by the engine's driver, or by
`worker/main.py` in a process of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.cache.snapshots import StateSpec, snapshot_nbytes
from fdasync.errors import (
    BadInput,
    ConfigError,
    DeadlineExceeded,
    FdasyncError,
    InvariantBroken,
    WeightsBroken,
    WeightsRejected,
)
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.ipc.remote import NO_FD, Fd, remote
from fdasync.request import Grammar, GroupTensors, MemoryPart, Numerics, WeightsFingerprint, WeightsGroup
from fdasync.request import TensorMeta as TensorMeta
from fdasync.result import TopLogprobs
from fdasync.runner.chosen import ChosenRows, ChosenShape
from fdasync.runner.facts import Facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.ipc.exchange import Exchange
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.runner.report import ModelReport


class RunnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's settings for a runner, known before the runner loads.

    Attributes:
        model: checkpoint folder, or "" where the runner needs none.
        capture: of routing: "auto" (if the model has MoE layers), True (refuse a model without them), False.
        max_running: most sequences at a time.
        max_step_tokens: most tokens in one step.
        max_context_tokens: most tokens of a sequence, or None for the model's own bound.
        block_tokens, num_blocks: as configured, or None to let the runner choose or profile.
        pipeline_depth: most steps in flight.
        routing_debug: record digits of each token's position instead of expert ids (`cache/debug_rows.py`).
        numerics: the arithmetic that is asked for; `Capacity.numerics` answers.
        sum_slices: with fixed numerics, the parts that sums over ranks are made of; `Capacity.sum_slices` answers.
        speculation: the most drafts of one sequence that a step may verify (`events.actions.Drafts`); 0: no step has
            any. A runner that verifies answers `Capacity.max_run_tokens` of 1 + speculation, any other one answers 1.
        tensor_parallel: how many processes compute each step together, the *ranks* of a group; 1: this one alone.
        rank: of this process among them, from 0.
        shows_blocks: other instances of this machine shall copy blocks from the device (`Runner.peer_blocks`).
        num_snapshots: places of snapshots on the device, or None to let the runner choose; a model without recurrent
            state has none.
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
    numerics: Numerics = "default"
    sum_slices: int = 1
    speculation: int = 0
    tensor_parallel: int = 1
    rank: int = 0
    shows_blocks: bool = False
    num_snapshots: int | None = None


class Capacity(Facts, frozen=True, kw_only=True):
    """What a loaded and profiled runner offers the engine: what `Facts` tell, and what the engine alone has to know.

    Attributes:
        fingerprint: hex digest of all that KV depends on, except the weights (architecture, config); of the whole
            model, whatever `tensor_parallel` is, as `weights_id` is.
        weights_id: hex XXH3-128 over the tensor bytes as loaded (docs/design.md, rule 1).
        state_specs: the recurrent state of a sequence, part by part; empty for a model that has KV alone. Its blocks
            carry snapshots of it, and a sequence starts behind cached tokens only from one (`SeqStart.snapshot`).
        num_snapshots: places of snapshots on the device that `bind` will allocate, beside a live state for each of
            `max_running` sequences.
        state_every_tokens: the engine's: sequences take snapshots at its multiples, and stores keep these snapshots.
        max_run_tokens: most tokens that one step yields of one decoding sequence, its *run*; 1: no step yields more, or
            less.
        drafter: name of the runner's own drafter ("mtp"), which drafts as many tokens as `RunStep.own_drafts` says, and
            whose drafts each step tells (`StepOutput.own_drafts`); "": it has none, or does not tell.
        chosen: what the model's indexers choose for a token, where steps write it to memory that they are lent
            (`Runner.lend`); None: they do not, or there are none.
        prefill_tokens_per_s: as measured at start; 0: not measured. The scheduler takes it for the speed of computing
            blocks, against fetching them from a store, until steps give a better figure.
        notes: for people, such as special cases in force.
    """

    fingerprint: str
    weights_id: str
    state_specs: tuple[StateSpec, ...] = ()
    num_snapshots: int = 0
    state_every_tokens: int = 0
    max_run_tokens: int = 1
    drafter: str = ""
    chosen: ChosenShape | None = None
    prefill_tokens_per_s: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.aux_specs]
        if len(set(names)) < len(names):
            raise BadInput("aux_specs", f"two of one name among {', '.join(names)}")

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of one snapshot; a live state has about as many; 0 without recurrent state."""
        return snapshot_nbytes(self.state_specs)


class PromptScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Raw log-probs of a run of tokens of one sequence's prompt.

    Attributes:
        key: the sequence.
        start: position of the run's first token, at least 1.
        logprobs: of each token, float32 little-endian: log-softmax of the model's logits one position before.
        top: how many alternatives each token has.
        top_ids, top_logprobs: `top` for each token, best first, int32 and float32 little-endian; id -1 stands behind
            the last one of a token that has fewer with a probability above 0.
    """

    key: int
    start: int
    logprobs: bytes
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def count(self) -> int:
        """Tokens of the run."""
        return len(self.logprobs) // 4


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """The samples of a step: columns with one entry per token, sequence after sequence in the order of `RunStep`.

    Attributes:
        step_id: of the `RunStep`.
        tokens: sampled ids.
        raw, processed: log-prob of each token; None when no sampled sequence asked for it. Entries of sequences that
            did not ask have no meaning.
        top: alternatives; None likewise.
        counts: how many entries each sampled sequence has (`Capacity.max_run_tokens`), 0 where its block table had no
            room left; None: one each.
        scores: a run for each chunk with tokens of a prompt in it that `SamplerSpec.score_from` asks for: a chunk of
            the positions [a, b) scores the tokens at [a + 1, b + 1) that are wanted and belong to the prompt.
        problems: sequences whose grammar cannot be kept any further, and why; each is told once. Their tokens from this
            step on have no meaning.
        unprocessed: likewise, sequences whose logits a processor could not change.
        own_drafts: how many drafts of the runner's own drafter the step forwarded of each sampled sequence, 0 where it
            forwarded the host's drafts; None: `Capacity.drafter` is "".
    """

    step_id: int
    tokens: tuple[int, ...]
    raw: tuple[float, ...] | None = None
    processed: tuple[float, ...] | None = None
    top: tuple[TopLogprobs | None, ...] | None = None
    counts: tuple[int, ...] | None = None
    scores: tuple[PromptScores, ...] = ()
    problems: tuple[tuple[int, str], ...] = ()
    unprocessed: tuple[tuple[int, str], ...] = ()
    own_drafts: tuple[int, ...] | None = None


class CopyOutput(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """A copy of blocks between device and host is done.

    Attributes:
        copy_id: of the `SwapOut` or `SwapIn`.
        kv_nbytes: bytes of KV moved.
        aux_nbytes: bytes of rows moved, by the arena's own count; 0, since slots stay with their KV.
    """

    copy_id: int
    kv_nbytes: int
    aux_nbytes: int


class Runner(ABC):
    """One model and its KV cache.

    Life: `open` once, `bind` once, then `launch` any number of times, then `aclose`. Used from one loop.

    Attributes:
        config_type: frozen msgspec Struct that `make_runner` decodes `runner_config` into.
        config: the decoded configuration.
        limits: of the engine.
        on_failure: set by the engine; the runner calls it when it fails while no step is in flight, as a worker that
            dies idle does.
        in_use: an engine has this object; set by engines.
    """

    config_type: ClassVar[type[msgspec.Struct]]
    in_use = False

    def __init__(self, config: Any, limits: RunnerLimits) -> None:
        self.config = config
        self.limits = limits
        self.on_failure: Callable[[Exception], None] | None = None

    def examine(self) -> ModelReport:
        """Look at the model without loading it, before `open` or instead of it. Blocks: not for an engine's loop.

        Raises CheckpointError for a folder that is broken, and BadInput, as this default does, where a runner has
        nothing to look at.
        """
        raise BadInput("runner", f"{type(self).__name__} says nothing of a model before it is opened")

    def join(self, exchange: Exchange) -> None:
        """Be one rank of a group; called before `open` where `RunnerLimits.tensor_parallel` is above 1.

        The exchange is the caller's, and open until after `aclose`. All ranks get the same calls in the same order,
        except that only rank 0 gets `check_grammar`, and `bind`'s arena of rows. Each rank answers all of its calls;
        tokens and rows of a step are rank 0's; samples in other ranks' answers are ignored. One rank writes each byte
        of a host block (`runner/shares.py`): a rank answers a `SwapOut` with the number of bytes that it wrote itself,
        and the ranks' numbers add up to the whole blocks.

        Raises ConfigError, as this default does, where a runner computes in one process alone.
        """
        raise ConfigError("tensor_parallel", f"{type(self).__name__} computes in one process, not in {exchange.ranks}")

    @abstractmethod
    async def open(self) -> Capacity:
        """Load, profile and check the model. A runner that blocks its loop meanwhile belongs in a worker.

        Raises CheckpointError, UnsupportedModel or ConfigError; then `aclose` is still called.
        """

    @abstractmethod
    @remote()
    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        """Allocate `num_blocks` KV blocks, use `arena` for rows (None: there are no aux specs), `host` for copies of
        blocks (None: there is no host tier), and `snapshots` for copies of snapshots (None: there is no host tier, or
        no recurrent state), whose "blocks" are `Capacity.snapshot_nbytes` long.

        The caller owns all three and keeps them open until after `aclose`.
        """

    @abstractmethod
    @remote()
    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """Start a step; return at once. Steps complete in the order of launch.

        The future ends with the output when KV and rows of the step are written, or with RunnerError; then the runner
        takes no more steps. Cancelling the future stops the waiting, not the work. Between launch and completion the
        caller gives no block or slot of the step to another writer.
        """

    @remote()
    async def lend(self, key: int, rows: ChosenRows) -> None:
        """Lend the memory for the positions that indexers choose for the tokens of sequence `key`; called once, before
        the step that starts it first, where its `SamplerSpec.chosen_from` is not -1.

        Each step writes the rows of its tokens that stand before its future ends; rows that are there already stay as
        they are, whatever starts the sequence again. The caller keeps the rows, and may close their descriptor on
        return; a runner refers to them until `take_back`, and closes nothing. An error ends this one request, and
        nothing was lent. Where the call is cancelled, rows may have been lent or not, and `take_back` follows: it does
        nothing if they were not. Never called, and refused by this default, where `Capacity.chosen` is None.
        """
        raise InvariantBroken(f"positions of sequence {key} from {rows.start} on, of a runner that tells none")

    @remote()
    def take_back(self, key: int) -> None:
        """What was lent for a sequence has no use any more: no later step computes it; steps in flight may still write.
        Called once for each `lend` that began and raised no error but CancelledError."""
        raise InvariantBroken(f"positions of sequence {key}, which were never lent")

    @abstractmethod
    @remote()
    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Start copying the KV of whole blocks between device and host; return at once.

        The future ends when every byte is copied, or with RunnerError; then the runner takes no more work. Copies and
        steps may complete in any order: until this copy has, no step in flight or to come writes a block that the copy
        reads, or touches a block that it writes. Rows stay in their slots. Cancelling stops the waiting only.
        """

    def peer_blocks(self) -> PeerBlocks | None:
        """What copies blocks from device to device between instances; called after `bind`, and used until `aclose`.

        None, as this default: other processes cannot read this runner's blocks, or `RunnerLimits.shows_blocks` did not
        ask for it. While a pull runs, its target has the same promise as a `SwapIn`'s.
        """
        return None

    @remote(beside=True, ranks="first")
    async def check_grammar(self, grammar: Grammar) -> None:
        """Check a grammar before a sequence asks for it; steps may be in flight.

        Raises BadInput naming what is wrong with it, as this default does for every grammar.
        """
        raise BadInput("grammar", f"a grammar ({grammar.kind}) was asked for, but this engine's runner samples freely")

    @remote(words="profiling", beside=True)
    async def profile(self, parent: str, name: str, seconds: float) -> str:
        """Record for so long what this process does. Steps go on, more slowly, and may stop while the file is written.
        Cancelling ends it, and writes nothing.

        Args:
            parent: where a folder called `name` is made; "": where the system has temporary files.

        Returns the folder. It has a file that Perfetto and Chrome's tracing open, `rank-0.json.gz` for rank 0. Raises
        BadInput, as this default does, where a runner records nothing, or records already; RunnerError where the file
        cannot be written.
        """
        del parent, name, seconds
        raise BadInput("profile", f"{type(self).__name__} records nothing of itself")

    # -- new weights: no step is in flight, none is launched before the end ---------------------------

    @remote(words="loading a folder", changes=True)
    async def load_folder(self, path: str) -> str:
        """Replace all weights by a checkpoint folder's, of the same architecture; returns their weights id.

        Raises WeightsRejected before anything is changed, WeightsBroken after.
        """
        raise WeightsRejected(f"this runner cannot load {path!r}: it takes no new weights")

    @remote(words="reading a folder")
    async def read_weights_id(self, path: str) -> str:
        """The weights id that `load_folder` of this folder would return. Reads the whole folder, changes nothing.

        Raises WeightsRejected, as this default does: then a version in use cannot be given again.
        """
        raise WeightsRejected(f"this runner cannot compare {path!r} with the weights in use")

    @remote(words="reading a folder", ranks="first")
    async def delta_base(self, path: str) -> str:  # noqa: ARG002 - the contract's
        """The weights id that the weights in use must have when `load_folder` applies this folder of changed tensors to
        them; "" for a whole checkpoint, as this default says of all folders. Changes nothing. Raises WeightsRejected.
        """
        return ""

    @remote(words="forgetting weights")  # noqa: B027 - a runner whose updates are always whole has nothing to do
    async def forget_weights(self) -> None:
        """Nobody wants the present weights, though an update has ended: refuse the next update unless it brings all of
        them (a whole folder, or every tensor). No step comes before one has."""

    @remote(words="checking tensors", changes=True)
    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        """Check names, shapes and dtypes of the tensors to come; changes nothing yet. Raises WeightsRejected."""
        raise WeightsRejected(f"this runner takes no new weights ({len(tensors)} tensors were given)")

    @remote(words="writing tensors", changes=True)
    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        """Write the next bytes of tensor `number` of `begin_tensors`. Tensors come whole and in order, in pieces of
        whole elements. `data` is the caller's again on return. Raises WeightsBroken."""
        raise InvariantBroken(f"write_tensor({number}, {offset_nbytes}) of {len(data)} bytes without begin_tensors")

    @remote(words="ending an update", changes=True)
    async def end_tensors(self) -> None:
        """End the update: every byte was written. Other tensors keep their values. Raises WeightsBroken."""
        raise InvariantBroken("end_tensors without begin_tensors")

    @remote(words="hashing weights")
    async def fingerprint_weights(self, with_tensors: bool = False) -> WeightsFingerprint:
        """Read and hash the weights in use, which an update has ended; changes nothing.

        Args:
            with_tensors: digest each tensor, too.

        Raises WeightsBroken, as this default does: then tensors cannot be compared with what their caller expects.
        """
        what = "the digests of its tensors" if with_tensors else "the fingerprint of its weights"
        raise WeightsBroken(f"this runner cannot tell {what}")

    @remote(beside=True, ranks="first")  # noqa: B027 - one that joins none waits for nobody
    async def reach_group(self, group: WeightsGroup) -> None:
        """Wait until the store of a group answers, while steps go on. Changes nothing. The caller bounds it; cancelling
        it ends it. Raises WeightsRejected if something else than a store answers."""

    @remote(words="joining a group")
    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, stop: Fd = NO_FD) -> None:
        """Become a rank of a trainer's process group; returns once the ranks have met, or are ready to.

        Args:
            group: `rank` is this runner's. Another group of that name that was joined before is left first; the same
                group is joined already.
            interface: network interface to listen on; "": the loopback one.
            limit_s: longest that the ranks may take to meet.
            stop: fd of a pipe that is at its end as soon as nobody wants the join any more; -1: there is none. A runner
                that blocks its loop looks at it meanwhile.

        May block its loop for `limit_s`. Raises WeightsRejected, as this default does, where it cannot join, and where
        it was stopped.
        """
        del interface, limit_s, stop
        raise WeightsRejected(f"this runner joins no process group ({group.name!r})")

    @remote(words="leaving a group")  # noqa: B027 - a runner that joins none leaves none
    async def leave_group(self, name: str) -> None:
        """Leave a group, if there is one of that name. Its other ranks see the end of the connection."""

    @remote(words="receiving tensors", changes=True)
    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        """Check tensors as `begin_tensors` does, and receive them from rank 0 of a group in place.

        Args:
            limit_s: longest that all of it may take; the group's `timeout_s` bounds the wait for each broadcast.
            first: these are the first tensors of an update; else an update goes on, and its tensors so far stay.
            last: of the update. Until the last ones have come no step may use the weights.

        The group is left where this fails: what its rank 0 has sent by then is not known. Raises WeightsRejected
        before the first byte, as this default does; WeightsBroken after.
        """
        del limit_s, first, last
        raise WeightsRejected(f"this runner joins no process group ({source.group!r})")

    @remote(words="ending an update", changes=True)
    async def end_received(self) -> None:
        """End an update whose tensors have all come, the last ones by `receive_tensors` without `last`. Raises
        WeightsBroken where it does not replace all that an earlier update broke."""
        raise InvariantBroken("end_received without receive_tensors")

    # -- sleep: no step and no copy is in flight, none is launched before all is there again -------------

    @remote(words="releasing memory")
    async def release_memory(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """Give these parts of the device's memory back to the device.

        No block has content that anybody will read. Where `keep_weights`, "weights" go to host memory; else they are
        dropped, also weights that an earlier call kept, and a whole update must come before the next step. Other state
        of the model (buffers that no update brings) is kept. Parts are released at most once, but for "weights" that
        are to be dropped after they were kept. `aclose` may come while memory is released; other calls for weights come
        only once the weights are there again. Called where `Capacity.no_sleep` is "". Any error fails the runner.
        """
        raise InvariantBroken(f"a release of {', '.join(parts)} (keep_weights={keep_weights}) that was not offered")

    @remote(words="taking memory back")
    async def regain_memory(self, part: MemoryPart) -> None:
        """Take the memory of a released part back. Weights that were kept are as before; dropped ones and blocks have
        any content. "cuda_graph" comes last.

        Raises WakeFailed where the device does not give it, and nothing has changed: it may be tried again.
        """
        raise InvariantBroken(f"{part} was to be taken back, and never released")

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        """The error that the engine fails with when `what` (a step) did not complete within its deadline."""
        return DeadlineExceeded(what, deadline_s)

    @abstractmethod
    async def aclose(self) -> None:
        """Free everything; idempotent, right after a failed `open` too. Waits for launched work, bounded."""
