"""The calls of an engine to its worker process. Pure data.

The engine has a worker of a group meet the others (`Join`), opens a runner (`Open`), has it allocate (`Bind`, with the
fds of the arenas), and then sends steps and copies, which `events/actions.py` defines. The answer to a `RunStep` is a
`StepOutput`, the answer to a `SwapOut` or `SwapIn` a `CopyOutput`. New weights come from a folder, as tensors
through chunks of shared memory, or from a trainer's process group that the worker joins. Every call is numbered and
answered once (`ipc/rpc.py`). Used by both sides, `proxy.py`
and `main.py`, by `weight_transfer.py`, and by the group of workers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fdasync import errors
from fdasync.cache.aux import AuxSpec
from fdasync.cache.picks import PickShape
from fdasync.ipc.peer_blocks import BlockPull, PoolExport
from fdasync.ipc.rpc import ErrorTable
from fdasync.request import Grammar, GroupTensors, MemoryPart, WeightsGroup
from fdasync.runner.base import RunnerLimits, TensorMeta
from fdasync.runner.chosen import ChosenShape


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Be one rank of a group; comes before `Open`, with the fds of `Meeting.fds`.

    Attributes:
        rank, ranks: of this process, and how many.
        deadline_s: how long the others may take to reach an exchange.
        slot_nbytes: most bytes of a rank in an exchange.
    """

    rank: int
    ranks: int
    deadline_s: float
    slot_nbytes: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Load a runner and profile it. The answer is its `Capacity`.

    Attributes:
        runner: its entry-point name.
        config: raw; checked by the runner's own type.
        limits: of the engine.
    """

    runner: str
    config: dict[str, Any]
    limits: RunnerLimits


class Bind(msgspec.Struct, frozen=True, array_like=True, tag="bind"):
    """Allocate the KV cache, and map the arenas.

    The fds of the aux arena (where there are specs), of the host arena (where it has blocks) and of the arena of the
    host's snapshots (where it has places) come with the message, in this order.

    Attributes:
        num_blocks: of the KV cache.
        num_slots, block_tokens, specs, picks: of the aux arena.
        num_host_blocks, block_nbytes: of the host arena.
        num_host_snapshots, snapshot_nbytes: of the arena of the host's snapshots.
    """

    num_blocks: int
    num_slots: int
    block_tokens: int
    specs: tuple[AuxSpec, ...]
    num_host_blocks: int
    block_nbytes: int
    picks: PickShape | None = None
    num_host_snapshots: int = 0
    snapshot_nbytes: int = 0


class Lend(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """As `Runner.lend`; the fd of the rows comes with the message.

    Attributes:
        key: the sequence.
        shape, start, most: of the rows.
    """

    key: int
    shape: ChosenShape
    start: int
    most: int


class TakeBack(msgspec.Struct, frozen=True, array_like=True, tag="take_back"):
    """As `Runner.take_back`."""

    key: int


class LoadFolder(msgspec.Struct, frozen=True, array_like=True, tag="load_folder"):
    """Replace all weights by the weights of the checkpoint folder `path`. The answer is their weights id."""

    path: str


class ReadWeightsId(msgspec.Struct, frozen=True, array_like=True, tag="read_weights_id"):
    """Read the checkpoint folder `path`. The answer is the weights id that loading it would give."""

    path: str


class DeltaBase(msgspec.Struct, frozen=True, array_like=True, tag="delta_base"):
    """As `Runner.delta_base`. The answer is a weights id, or ""."""

    path: str


class ForgetWeights(msgspec.Struct, frozen=True, array_like=True, tag="forget_weights"):
    """As `Runner.forget_weights`."""


class FingerprintWeights(msgspec.Struct, frozen=True, array_like=True, tag="fingerprint_weights"):
    """Hash the weights in use. The answer is their `WeightsFingerprint`.

    Attributes:
        with_tensors: digest each tensor, too.
    """

    with_tensors: bool


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """As `Runner.release_memory`."""

    parts: tuple[MemoryPart, ...]
    keep_weights: bool


class Regain(msgspec.Struct, frozen=True, array_like=True, tag="regain"):
    """As `Runner.regain_memory`."""

    part: MemoryPart


class CheckGrammar(msgspec.Struct, frozen=True, array_like=True, tag="check_grammar"):
    """Check a grammar that a request asks for."""

    grammar: Grammar


class BeginTensors(msgspec.Struct, frozen=True, array_like=True, tag="begin_tensors"):
    """Tensors will come, through chunks of shared memory whose fds come with the message.

    Attributes:
        tensors: in the order of their pieces.
        chunk_nbytes: of each chunk.
    """

    tensors: tuple[TensorMeta, ...]
    chunk_nbytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a tensor in a chunk.

    Attributes:
        number: of the tensor, in `BeginTensors`.
        offset_nbytes: in the tensor.
        at_nbytes: in the chunk.
        nbytes: of the piece.
    """

    number: int
    offset_nbytes: int
    at_nbytes: int
    nbytes: int


class WriteChunk(msgspec.Struct, frozen=True, array_like=True, tag="write_chunk"):
    """Copy `pieces` of chunk number `chunk` into their tensors; with the answer the chunk is the engine's again."""

    chunk: int
    pieces: tuple[Piece, ...]


class EndTensors(msgspec.Struct, frozen=True, array_like=True, tag="end_tensors"):
    """Every byte was written."""


class ReachGroup(msgspec.Struct, frozen=True, array_like=True, tag="reach_group"):
    """As `Runner.reach_group`; the worker goes on with steps meanwhile."""

    group: WeightsGroup


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag="join_group"):
    """As `Runner.join_group`, whose `stop` comes as the message's fd."""

    group: WeightsGroup
    interface: str
    limit_s: float


class LeaveGroup(msgspec.Struct, frozen=True, array_like=True, tag="leave_group"):
    """As `Runner.leave_group`."""

    name: str


class ReceiveTensors(msgspec.Struct, frozen=True, array_like=True, tag="receive_tensors"):
    """As `Runner.receive_tensors`.

    Attributes:
        source: without tensors where they are the same as in the message before: sending thousands of descriptions
            takes longer than the tensors' bytes take between GPUs.
    """

    source: GroupTensors
    limit_s: float
    first: bool
    last: bool


class EndReceived(msgspec.Struct, frozen=True, array_like=True, tag="end_received"):
    """As `Runner.end_received`."""


class ShowPool(msgspec.Struct, frozen=True, array_like=True, tag="show_pool"):
    """Show the pool's memory to other processes. A socket's fd comes with the message; the pools' fds go through it, in
    one message of a byte. The answer is the `PoolExport`s, () where the runner shows none."""


class OpenSource(msgspec.Struct, frozen=True, array_like=True, tag="open_source"):
    """Map another instance's pools, whose fds come with the message; as `PeerBlocks.open`."""

    source: bytes
    pools: tuple[PoolExport, ...]


class CloseSource(msgspec.Struct, frozen=True, array_like=True, tag="close_source"):
    """As `PeerBlocks.close_source`."""

    source: bytes


class SumBlocks(msgspec.Struct, frozen=True, array_like=True, tag="sum_blocks"):
    """As `PeerBlocks.sums`; a `BlockPull` is the message for the other call. The answers are checksums."""

    blocks: tuple[int, ...]


_Group = JoinGroup | LeaveGroup | ReceiveTensors | EndReceived
_Weights = (
    LoadFolder
    | ReadWeightsId
    | DeltaBase
    | ForgetWeights
    | FingerprintWeights
    | BeginTensors
    | WriteChunk
    | EndTensors
    | _Group
)
PeerRequest = ShowPool | OpenSource | CloseSource | SumBlocks | BlockPull
Request = Join | Open | Bind | Lend | TakeBack | CheckGrammar | ReachGroup | Release | Regain | PeerRequest | _Weights

ERRORS = ErrorTable(
    errors.BadInput, errors.ConfigError, errors.CheckpointError, errors.UnsupportedModel, errors.PluginError,
    errors.RunnerError, errors.WakeFailed, errors.WeightsRejected, errors.WeightsBroken,
)  # fmt: skip


def error_of(error: BaseException) -> errors.FdasyncError:
    """An error that can be sent; classes that are not in the table become a RunnerError with their message."""
    if error in ERRORS:
        assert isinstance(error, errors.FdasyncError)
        return error
    return errors.RunnerError(f"{type(error).__name__}: {error}")
