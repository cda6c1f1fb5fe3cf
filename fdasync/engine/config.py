"""`EngineConfig`: one frozen struct, checked in one place, and resolved once against the runner's capacity.

Names carry their units. `resolve` gives every "auto" a value, in a new object. Knows no running engine. Called by
`engine/engine.py`, `engine/runtime.py` and the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fdasync.cache.host_arena import host_nbytes
from fdasync.drafting import Speculation
from fdasync.errors import ConfigError, PluginError
from fdasync.ipc.gpus import check_count, check_names
from fdasync.registry.mapping import check, common, struct_of
from fdasync.registry.registry import POLICIES, Registry
from fdasync.request import FIRST_VERSION, MAX_VERSION_CHARS, Numerics
from fdasync.runner.base import RunnerLimits
from fdasync.runner.shares import MOST_RANKS
from fdasync.scheduler import LeaseRules, Policy, SchedulerConfig
from fdasync.scheduler.state.policy import OWN_POLICIES, check_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.runner.base import Capacity

Auto = Literal["auto"]

# the scheduler holds some hundred bytes for each block
MAX_BLOCKS = 1 << 22
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Seconds = Annotated[float, Meta(ge=1e-3, le=1e9)]
Blocks = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Version = Annotated[str, Meta(min_length=1, max_length=MAX_VERSION_CHARS)] | Annotated[int, Meta(ge=0, le=2**63 - 1)]
# assumed until it is measured: too slow a guess costs one request a tenth of it, too fast a guess the first hits after
# a restart
_PREFILL_TOKENS_PER_S = 1000.0
_AUTO_HOST_NBYTES = 1 << 30
_AUTO_HOST_MIN_BLOCKS = 16
_AUTO_HOST_MIN_SNAPSHOTS = 8
# of a runner's key `device`: the first GPU that its process sees
_OWN_GPU = ("auto", "cuda", "cuda:0")
# of an update: its weights may come from a slower place than the first weights did
_UPDATE_S, _UPDATE_STARTS = 120.0, 3.0
# keys that had another name: an old name is refused, and the error gives the new one
_RENAMED = {"lease_kill_s": "store_kill_s"}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an engine is told at its start.

    A mapping in the place of `speculation` or `leases` is read as `from_mapping` reads it, and refused at once.

    Attributes:
        model: checkpoint folder; left out for runners that need none.
        runner: which installed runner computes the model (`fdasync plugins` lists them).
        runner_config: the runner's own keys, decoded by it; unknown ones are refused by name.
        process: "worker" runs the model in a child process of its own (the default: a CPU forward pass, or
            an import of torch, would block the loop); "inline" runs it on the engine's loop.
        tokenizer: entry-point name in `fdasync.tokenizers`; "auto" takes the one the runner names; "none" means
            tokens in, tokens out.
        routing: capture expert routing; "auto": if the model has MoE layers.
        routing_debug: self-check: the capture records digits of each token's position instead of expert ids, and every
            row is checked when it comes off the device and when it comes to its request; a wrong one fails the engine.
            Blocks of such an engine have identities of their own. Rows of results are then of no other use.
        numerics: "fixed": every number of a token depends on its prefix and the weights alone, to the last bit, through
            batches, chunks, prefix hits, preemption, swaps, hand-overs and restarts; so a trainer can compute the same
            bits. A runner or model that cannot promise it is an error of the start. Blocks computed under one setting
            are never used under the other. "default": the fastest arithmetic; last bits may depend on the batch.
        sum_slices: with fixed numerics, 1, 2 or 4: sums that ranks share are made of so many parts, whatever the number
            of ranks, which must divide it; so every such number gives the same results. It costs time where ranks are
            fewer. Blocks of other slices are never used.
        tensor_parallel: how many worker processes compute each step together, each with its part of the model; 1 to
            8. Blocks do not depend on it: engines of different numbers share stores and hand requests to each other.
        gpus: the GPU of each rank, in order: indices of GPUs that this process sees (by PCI address, as `nvidia-smi`
            counts, and by its CUDA_VISIBLE_DEVICES), UUIDs ("GPU-...") or parts ("MIG-..."). Each worker sees its own
            GPU first. They are locked: another engine of this user that names one is refused. "auto": a group of the
            `transformers` runner takes the first GPUs that are free; any other worker sees all GPUs that this process
            sees, locks none, and its runner chooses.
        share_gpus: other engines may have the same GPUs, if they share them as well.
        max_context_tokens: most tokens of one request, prompt and output; "auto": the model's.
        block_tokens: tokens of a KV block, a power of two; "auto": the runner's choice.
        num_blocks: KV blocks on the device; "auto": what the runner profiled.
        max_running: sequences in a step.
        max_step_tokens: token budget of a step; longer prompts are prefilled in chunks.
        max_requests: live samples; further requests wait for a place.
        pipeline_depth: steps in flight: 1 is plain, 2 overlaps.
        prefix_cache: share KV (and rows) between requests with equal prefixes.
        policy: entry-point name in `fdasync.policies`: which requests go first, in every line of the engine.
        policy_config: the policy's own keys, decoded by it; unknown ones are refused by name.
        speculation: several tokens of a sequence in a step, as far as drafts of them are right; see `Speculation`. No
            token, log-prob or row depends on it. None: one token a step.
        decode_reserve_blocks: free blocks that admission leaves for each decoding sequence, a quarter of all blocks at
            most; "auto": 2 on decode instances, else 1.
        host_blocks: KV blocks of the host tier, behind the device: blocks that the device evicts are copied there and
            back. 0: no host tier; "auto": 0 without a store and a role, else the blocks that 1 GiB holds.
        num_snapshots: of a model with recurrent layers: places on the device for snapshots of a sequence's state, from
            which other sequences go on behind cached tokens; "auto": the runner's choice.
        host_snapshots: places for snapshots on the host, behind the device's; "auto": 0 without a host tier, else as
            many as 1 GiB holds, and no more than it has blocks.
        state_every_tokens: besides the ends of prompts and answers and the places where prompts part, snapshots are
            taken at the multiples of this, itself one of a block's tokens; "auto": such that they take as many bytes as
            the KV between them. A store keeps no others; engines with different numbers share no stored block.
        role: "alone", or the role among instances (`fdasync_fleet`): "prefill" instances hand requests to "decode"
            instances, "mixed" instances serve requests whole. Every role but "alone" needs a host tier.
        leases: bounds on leases, the room that a decode instance grants to prefill instances; see `LeaseRules`.
        store: entry-point name in `fdasync.stores` of the tier behind the host; "" for none.
        store_config: the store's own keys, decoded by it; unknown ones are refused by name.
        write_through: which blocks are written to the store as soon as they are sealed: "all", only blocks of a
            "prompt", or none ("off").
        write_back: blocks of preempted requests go to the host at once, and to the store if there is one.
        chosen_positions_nbytes: most bytes that positions chosen by indexers may take, of all requests together that
            ask for them, until their results were taken or dropped. A request that needs more is refused; a request
            that finds no room now waits.
        fetch_min_tokens: shorter runs of tokens are computed and never looked up in the store. The measured speeds of
            fetching and prefill decide whether a longer run is fetched.
        store_required: a store that cannot be opened is an error of the start; otherwise the engine starts without it.
            Then it publishes `BreakerChanged`, and uses the store once it opens. A store that is configured wrongly is
            an error of the start in any case.
        store_open_deadline_s: how long the start waits for the store to open. An opening that takes longer goes on,
            and is ended after `store_kill_s` or this, whichever is longer; then it is tried again.
        store_deadline_s: of one call to the store; then its circuit breaker opens.
        store_retry_s: after this long a store that failed is tried again; doubles while it fails.
        store_calls: calls to the store at a time.
        weight_version: label of the weights that the engine starts with, up to 256 characters; an integer becomes its
            digits.
        store_kill_s: a call to the store that is past its deadline and older than this has the store's process
            killed, so that no call holds its blocks for longer. The age includes starting the process anew where the
            last one has ended.
        inline_tokenise_chars: longer texts are tokenised in a child process.
        start_deadline_s: loading and profiling.
        weights_interface: network interface on which workers meet a trainer's process group, whose ports ask nobody
            who they are; "": the loopback one, and no address of another machine is dialled.
        update_deadline_s: loading new weights, and comparing or hashing them, each; a worker that takes longer fails
            the engine. "auto": two minutes and three times what the runner's own start took, at most
            `start_deadline_s`.
        step_deadline_s: one step, from its launch or the end of the step before it, to its own end. A runner warms
            up and compiles before it says hello, under the start deadline.
        request_deadline_s: of requests that name none.
        prepare_deadline_s: tokenising in the child process.
        close_deadline_s: of the end: steps in flight, writes to the store, the ends of store and worker. Work that
            has not ended by then is killed, or abandoned and named in the error. Where steps take most of it, closing
            the rest may take as long again; the kernel may need up to 15 s more to kill a process.
        seed: of what the engine draws itself (missing sampling seeds, request ids); by default from the system.
        taps: taps that run beside the engine: entry-point name in `fdasync.taps`, and the tap's own keys, decoded by
            it. A tap that is missing or broken is an error at once; `docs/events.md` shows how to write one.
        trace_turns: keep this many of the latest turns for a trace; 0: none.
        profile_folder: where a profile makes the folder of its files; "": where the system has temporary files.
    """

    model: str = ""
    runner: str = "transformers"
    runner_config: dict[str, Any] = msgspec.field(default_factory=dict)
    process: Literal["worker", "inline"] = "worker"
    tokenizer: str = "auto"
    routing: bool | Auto = "auto"
    routing_debug: bool = False
    numerics: Numerics = "default"
    # a tree adds neighbouring slices; the slices of a rank are a subtree of it
    sum_slices: Literal[1, 2, 4] = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    gpus: tuple[int | str, ...] | Auto = "auto"
    share_gpus: bool = False
    max_context_tokens: Annotated[int, Meta(ge=2, le=1 << 31)] | Auto = "auto"
    block_tokens: Annotated[int, Meta(ge=2, le=4096)] | Auto = "auto"
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] | Auto = "auto"
    max_running: Count = 256
    max_step_tokens: Count = 2048
    max_requests: Count = 4096
    pipeline_depth: Annotated[int, Meta(ge=1, le=2)] = 2
    prefix_cache: bool = True
    policy: str = "arrival"
    policy_config: dict[str, Any] = msgspec.field(default_factory=dict)
    speculation: Speculation | None = None
    decode_reserve_blocks: Annotated[int, Meta(ge=0, le=1024)] | Auto = "auto"
    host_blocks: Blocks | Auto = "auto"
    num_snapshots: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] | Auto = "auto"
    host_snapshots: Blocks | Auto = "auto"
    state_every_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | Auto = "auto"
    role: Literal["alone", "mixed", "prefill", "decode"] = "alone"
    leases: LeaseRules = LeaseRules()
    store: str = ""
    store_config: dict[str, Any] = msgspec.field(default_factory=dict)
    write_through: Literal["off", "prompt", "all"] = "all"
    write_back: bool = True
    chosen_positions_nbytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 1 << 30
    fetch_min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    store_required: bool = False
    store_open_deadline_s: Seconds = 10.0
    store_deadline_s: Seconds = 5.0
    store_retry_s: Seconds = 1.0
    store_calls: Annotated[int, Meta(ge=1, le=1024)] = 8
    store_kill_s: Seconds = 30.0
    weight_version: Version = FIRST_VERSION
    inline_tokenise_chars: Annotated[int, Meta(ge=0, le=1 << 24)] = 8000
    start_deadline_s: Seconds = 900.0
    weights_interface: str = ""
    update_deadline_s: Seconds | Auto = "auto"
    step_deadline_s: Seconds = 120.0
    request_deadline_s: Seconds = 3600.0
    prepare_deadline_s: Seconds = 60.0
    close_deadline_s: Seconds = 10.0
    seed: int | None = None
    taps: Annotated[dict[str, dict[str, Any]], Meta(max_length=256)] = msgspec.field(default_factory=dict)
    trace_turns: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    profile_folder: str = ""

    def __post_init__(self) -> None:
        version: Any = self.weight_version
        if type(version) is int and 0 <= version < 1 << 63:
            msgspec.structs.force_setattr(self, "weight_version", str(version))
        for name, kind in (("speculation", Speculation), ("leases", LeaseRules)):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                made = struct_of(kind, given, error=ConfigError, root=f"config.{name}")
                msgspec.structs.force_setattr(self, name, made)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """A checked config from plain values (a parsed TOML or JSON file). Raises ConfigError."""
        given: object = values
        for old, new in _RENAMED.items():
            if isinstance(given, Mapping) and old in given:
                raise ConfigError(f"config.{old}", f"is named {new!r} now")
        _check_list(given.get("gpus") if isinstance(given, Mapping) else None)
        config = struct_of(cls, values, error=ConfigError, root="config")
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ConfigError naming the first field whose value is wrong."""
        _check_list(self.gpus)
        check(self, error=ConfigError, root="config")
        if self.block_tokens != "auto" and self.block_tokens & (self.block_tokens - 1):
            raise ConfigError("config.block_tokens", f"{self.block_tokens} is not a power of two")
        _check_encodes("policy_config", self.policy_config, "stand in a trace", msgspec.json.encode)
        _check_encodes("store_config", self.store_config, "be sent to a process", msgspec.msgpack.encode)
        self._validate_tiers()
        self._validate_gpus()
        self._validate_group()
        if self.speculation is not None:
            self.speculation.validate()
            _check_runs(self, 1 + self.speculation.max_tokens)
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                "config.max_step_tokens",
                f"{self.max_step_tokens} cannot hold one token of each of max_running={self.max_running} sequences",
                limit=f"at least {self.max_running}",
            )
        if self.max_requests < self.max_running:
            raise ConfigError(
                "config.max_requests", f"{self.max_requests} is below max_running", limit=self.max_running
            )

    def _validate_gpus(self) -> None:
        if self.gpus == "auto":
            return
        check_names(self.gpus)
        # several instances have a file in common, which names the GPUs of all
        check_count(len(self.gpus), self.tensor_parallel)
        if self.process == "inline":
            raise ConfigError(
                "config.gpus",
                "is set, and config.process is 'inline': what this process sees is settled already",
                hint="set process to 'worker', or CUDA_VISIBLE_DEVICES before this process starts",
            )
        device = self.runner_config.get("device", "auto")
        if device not in _OWN_GPU:
            raise ConfigError(
                "config.gpus",
                f"is set, and config.runner_config.device is {device!r}",
                hint="leave one of them out: a worker's own GPU is the first that it sees",
            )

    def _validate_group(self) -> None:
        if self.sum_slices > 1 and self.numerics != "fixed":
            raise ConfigError(
                "config.sum_slices",
                f"is {self.sum_slices}, and config.numerics is {self.numerics!r}",
                hint="slices belong to numerics='fixed'",
            )
        if self.tensor_parallel == 1:
            return
        if self.process == "inline":
            raise ConfigError(
                "config.process",
                f"is 'inline', and config.tensor_parallel is {self.tensor_parallel}",
                hint="each rank is a process of its own: set process to 'worker'",
            )
        device = self.runner_config.get("device", "auto")
        if isinstance(device, str) and device.startswith("cuda:") and device not in _OWN_GPU:
            raise ConfigError(
                "config.runner_config.device",
                f"is {device!r}, and config.tensor_parallel is {self.tensor_parallel}: each rank has its own GPU",
                hint="leave it out, and name the GPUs in config.gpus (--gpus)",
            )
        if self.numerics == "fixed" and self.sum_slices % self.tensor_parallel:
            raise ConfigError(
                "config.sum_slices",
                f"is {self.sum_slices}, and config.tensor_parallel is {self.tensor_parallel}: with fixed numerics a"
                " rank computes whole slices of a sum",
                hint="set sum_slices to 4, and tensor_parallel to 2 or 4",
            )

    def _validate_tiers(self) -> None:
        hands_over = self.role != "alone"
        if self.store and self.host_blocks == 0:
            raise ConfigError(
                "config.host_blocks", "is 0, and a store is set", hint="stores are read and written by way of the host"
            )
        if hands_over and self.host_blocks == 0:
            raise ConfigError(
                "config.host_blocks", f"is 0, and the role is {self.role!r}", hint="instances read host blocks"
            )
        if (self.store or hands_over or self.host_blocks not in (0, "auto")) and not self.prefix_cache:
            raise ConfigError(
                "config.prefix_cache",
                "is off, and a host tier, a store or a role is set",
                hint="tiers and other instances find blocks by prefix",
            )
        for name, given in (("store_config", self.store_config), ("store_required", self.store_required)):
            if given and not self.store:
                raise ConfigError(f"config.{name}", "is set, but config.store names no store")

    @property
    def places_gpus(self) -> bool:
        """Whether the engine says which GPUs its workers see; else the runner chooses among all."""
        if self.gpus != "auto":
            return True
        chooses = self.runner != "transformers" or self.runner_config.get("device", "auto") not in _OWN_GPU
        return self.tensor_parallel > 1 and not chooses

    def update_limit_s(self, start_s: float) -> float:
        """The deadline of updates.

        Args:
            start_s: how long the runner took to open, which loaded as many weights as an update brings.
        """
        if self.update_deadline_s != "auto":
            return self.update_deadline_s
        return min(_UPDATE_S + _UPDATE_STARTS * start_s, self.start_deadline_s)

    def runner_limits(self) -> RunnerLimits:
        """The limits that the runner is made with; None where the runner decides."""
        known: dict[str, Any] = common(self, RunnerLimits)
        known = {name: None if value == "auto" else value for name, value in known.items()}
        drafts = 0 if self.speculation is None else self.speculation.max_tokens
        return RunnerLimits(**known | {"capture": self.routing, "speculation": drafts})


def _check_list(gpus: object) -> None:
    """Raise ConfigError for a text that is no list of GPUs; other values have their checks."""
    if isinstance(gpus, str) and gpus != "auto":
        raise ConfigError("config.gpus", f"is {gpus!r}, and no list", limit='"auto", or such as [0, 1] or ["GPU-..."]')


def host_blocks(config: EngineConfig, capacity: Capacity) -> int:
    """Blocks of the host tier. Raises ConfigError if they cannot fit into memory."""
    stride = host_nbytes(1, capacity.block_nbytes) - host_nbytes(0, capacity.block_nbytes)
    if config.host_blocks == "auto":
        wanted = config.store or config.role != "alone"
        return max(_AUTO_HOST_NBYTES // stride, _AUTO_HOST_MIN_BLOCKS) if wanted else 0
    return _in_memory("host_blocks", config.host_blocks, stride, "blocks")


def _in_memory(field: str, count: int, stride: int, what: str) -> int:
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // stride
    if count > most:
        problem = f"{count} {what} of {stride} bytes are more than this machine's memory"
        raise ConfigError(f"config.{field}", problem, limit=most)
    return count


def host_snapshots(config: EngineConfig, capacity: Capacity) -> int:
    """Places of snapshots on the host. Raises ConfigError if they cannot fit into memory, where there is no host tier
    for them, and where a store needs some."""
    blocks = host_blocks(config, capacity)
    if not capacity.state_specs:
        return 0
    if not blocks:
        if config.host_snapshots not in ("auto", 0):
            raise ConfigError(
                "config.host_snapshots", "are asked for, and there is no host tier", hint="set host_blocks too"
            )
        return 0
    if (config.store or config.role != "alone") and config.host_snapshots == 0:
        problem = "is 0: states go to and come from stores and other instances by way of the host"
        raise ConfigError("config.host_snapshots", problem, limit=1)
    stride = host_nbytes(1, capacity.snapshot_nbytes) - host_nbytes(0, capacity.snapshot_nbytes)
    if config.host_snapshots == "auto":
        return min(blocks, max(_AUTO_HOST_NBYTES // stride, _AUTO_HOST_MIN_SNAPSHOTS))
    return _in_memory("host_snapshots", config.host_snapshots, stride, "snapshots")


def with_state_every(config: EngineConfig, capacity: Capacity) -> Capacity:
    """A runner's capacity, and how often states are kept. Raises ConfigError."""
    if not capacity.state_specs:
        return capacity
    size, every = capacity.block_tokens, config.state_every_tokens
    if every == "auto":
        every = -(-capacity.snapshot_nbytes // capacity.block_nbytes) * size
    if every % size:
        raise ConfigError("config.state_every_tokens", f"is {every}", limit=f"a multiple of block_tokens={size}")
    return msgspec.structs.replace(capacity, state_every_tokens=every)


def _check_recurrent(config: EngineConfig, capacity: Capacity) -> None:
    """What a model with recurrent layers needs, and what it cannot do yet. Raises ConfigError."""
    if config.role != "alone" and capacity.num_snapshots < 2:
        problem = f"is {capacity.num_snapshots}: a sequence that starts from one leaves another to be handed over"
        raise ConfigError("config.num_snapshots", problem, limit="2 or more")


def resolve(config: EngineConfig, capacity: Capacity, namespace: bytes = b"") -> SchedulerConfig:
    """The scheduler's configuration for a runner of this capacity. Raises ConfigError."""
    if capacity.num_blocks > MAX_BLOCKS:
        raise ConfigError("config.num_blocks", f"the runner offers {capacity.num_blocks} blocks", limit=MAX_BLOCKS)
    if capacity.num_blocks < 1:
        raise ConfigError("config.num_blocks", "the runner found no memory for KV blocks", hint="give it less to hold")
    if capacity.max_run_tokens > 1:
        _check_runs(config, capacity.max_run_tokens)
    recurrent = bool(capacity.state_specs)
    if recurrent:
        _check_recurrent(config, capacity)
    reserve, speculation = config.decode_reserve_blocks, config.speculation
    # what both have is as the runner resolved it
    known = common(config, SchedulerConfig) | common(capacity, SchedulerConfig)
    return SchedulerConfig(**known | {
        "namespace": namespace,
        "capture": bool(capacity.aux_specs),
        "recurrent": recurrent,
        "store": bool(config.store),
        "kv_events": config.role != "alone",
        "num_host_blocks": host_blocks(config, capacity),
        "num_host_snapshots": host_snapshots(config, capacity),
        "decode_reserve_blocks": (2 if config.role == "decode" else 1) if reserve == "auto" else reserve,
        "state_every_tokens": capacity.state_every_tokens if recurrent else capacity.block_tokens,
        "snapshot_nbytes": capacity.snapshot_nbytes,
        "prefill_tokens_per_s": capacity.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S,
        "own_drafter": capacity.drafter,
        "drafter": "" if speculation is None else speculation.host_drafter,
        "drafter_config": {} if speculation is None else speculation.drafter_config,
        "weighs_drafts": speculation is None or speculation.budget,
    })  # fmt: skip


def policy_class(name: str) -> type[Policy]:
    """The class of the policy of this name. Raises PluginError."""
    # mypy takes an abstract base for a class that is going to be made
    return OWN_POLICIES.get(name) or Registry().load(POLICIES, name, Policy)


def make_policy(name: str, config: Mapping[str, Any]) -> Policy:
    """The policy of this name with its own configuration decoded. Raises PluginError, also where a few candidates show
    that it breaks its contract; ConfigError naming the key."""
    kind = policy_class(name)
    own = struct_of(kind.config_type, config, error=ConfigError, root="policy_config")
    try:
        policy = kind(own)
    except Exception as error:
        raise PluginError(POLICIES, name, "", f"it cannot be made: {type(error).__name__}: {error}") from error
    check_policy(policy)
    return policy


def _check_runs(config: EngineConfig, run: int) -> None:
    """Whether an engine can plan steps that yield up to `run` tokens of a sequence. Raises ConfigError."""
    if config.max_step_tokens < run * config.max_running:
        raise ConfigError(
            "config.max_step_tokens",
            f"{config.max_step_tokens} cannot hold {run} tokens of each of max_running={config.max_running} sequences",
            limit=f"at least {run * config.max_running}",
        )


def _check_encodes(field: str, value: Any, what: str, encode: Callable[[Any], bytes]) -> None:
    try:
        encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"config.{field}", f"holds what cannot {what}: {error}") from None
