"""Configuration: one frozen struct, checked in one place, resolved once against what the runner is.

Units stand in names. "auto" becomes a value in `resolve`, which returns a new object and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.errors import ConfigError
from fdasync.runner.base import RunnerLimits
from fdasync.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import Capacity

Auto = Literal["auto"]

# the scheduler keeps books of every block: some hundred bytes each
MAX_BLOCKS = 1 << 22


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is made of.

    Attributes:
        model: checkpoint folder; "" for runners that need none.
        runner: entry-point name in `fdasync.runners`.
        runner_config: the runner's own keys, decoded by it; unknown ones are refused by name.
        process: "worker" runs the model in a child process of its own (the default: a CPU forward pass, or
            an import of torch, would block the loop); "inline" runs it on the engine's loop.
        tokenizer: entry-point name in `fdasync.tokenizers`; "auto" takes the one the runner names; "none" means
            tokens in, tokens out.
        routing: capture expert routing; "auto": if the model has MoE layers.
        max_context_tokens: most tokens of one request, prompt and output; "auto": the model's.
        block_tokens: tokens of a KV block, a power of two; "auto": the runner's choice.
        num_blocks: KV blocks on the device; "auto": what the runner profiled.
        max_running: sequences in a step.
        max_step_tokens: token budget of a step; longer prompts are prefilled in chunks.
        max_requests: live samples; further requests wait at the door.
        pipeline_depth: steps in flight: 1 is plain, 2 overlaps.
        prefix_cache: share KV (and rows) between requests with equal prefixes.
        decode_reserve_blocks: see `SchedulerConfig`.
        inline_tokenise_chars: longer texts are tokenised in a child process.
        start_deadline_s: loading and profiling.
        step_deadline_s: one step, from its launch or the end of the step before it, to its own end. A runner warms
            up and compiles before it says hello, under the start deadline.
        request_deadline_s: of requests that name none.
        prepare_deadline_s: tokenising in the child process.
        close_deadline_s: steps in flight, and the worker's own end, at `aclose`.
        seed: of what the engine draws itself (missing sampling seeds, request ids); None: from the system.
        trace_turns: keep this many of the latest turns for `Engine.trace`; 0: none.
    """

    model: str = ""
    runner: str = "transformers"
    runner_config: dict[str, Any] = msgspec.field(default_factory=dict)
    process: Literal["worker", "inline"] = "worker"
    tokenizer: str = "auto"
    routing: bool | Auto = "auto"
    max_context_tokens: int | Auto = "auto"
    block_tokens: int | Auto = "auto"
    num_blocks: int | Auto = "auto"
    max_running: int = 256
    max_step_tokens: int = 2048
    max_requests: int = 4096
    pipeline_depth: int = 2
    prefix_cache: bool = True
    decode_reserve_blocks: int = 1
    inline_tokenise_chars: int = 8000
    start_deadline_s: float = 900.0
    step_deadline_s: float = 120.0
    request_deadline_s: float = 3600.0
    prepare_deadline_s: float = 60.0
    close_deadline_s: float = 10.0
    seed: int | None = None
    trace_turns: int = 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """A checked config from plain values (a parsed TOML or JSON file). Raises ConfigError."""
        try:
            config = msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ConfigError.of_validation(error, "config") from None
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ConfigError naming the first field that makes no sense."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError.of_validation(error, "config") from None
        for name in ("max_running", "max_step_tokens", "max_requests"):
            _bounds(name, getattr(self, name), 1, 1 << 24)
        if self.max_context_tokens != "auto":
            _bounds("max_context_tokens", self.max_context_tokens, 2, 1 << 31)
        if self.num_blocks != "auto":
            _bounds("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        if self.block_tokens != "auto":
            _bounds("block_tokens", self.block_tokens, 2, 4096)
            if self.block_tokens & (self.block_tokens - 1):
                raise ConfigError("config.block_tokens", f"{self.block_tokens} is not a power of two")
        try:
            self.model.encode()
        except UnicodeEncodeError:
            raise ConfigError("config.model", "has a lone surrogate: it is no path") from None
        _bounds("pipeline_depth", self.pipeline_depth, 1, 2)
        _bounds("decode_reserve_blocks", self.decode_reserve_blocks, 0, 1024)
        _bounds("inline_tokenise_chars", self.inline_tokenise_chars, 0, 1 << 24)
        _bounds("trace_turns", self.trace_turns, 0, 1 << 30)
        for name in self.__struct_fields__:
            if name.endswith("_deadline_s"):
                _bounds(name, getattr(self, name), 1e-3, 1e9)
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

    def runner_limits(self) -> RunnerLimits:
        """What the runner is asked for."""
        return RunnerLimits(
            model=self.model,
            capture=self.routing,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_context_tokens=_or_none(self.max_context_tokens),
            block_tokens=_or_none(self.block_tokens),
            num_blocks=_or_none(self.num_blocks),
            pipeline_depth=self.pipeline_depth,
        )


def resolve(config: EngineConfig, capacity: Capacity) -> SchedulerConfig:
    """The scheduler's configuration for a runner of this capacity. Raises ConfigError."""
    if capacity.num_blocks > MAX_BLOCKS:
        raise ConfigError("config.num_blocks", f"the runner offers {capacity.num_blocks} blocks", limit=MAX_BLOCKS)
    if capacity.num_blocks < 1:
        raise ConfigError("config.num_blocks", "the runner found no memory for KV blocks", hint="give it less to hold")
    return SchedulerConfig(
        block_tokens=capacity.block_tokens,
        num_blocks=capacity.num_blocks,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        pipeline_depth=config.pipeline_depth,
        prefix_cache=config.prefix_cache,
        capture=bool(capacity.aux_specs),
        decode_reserve_blocks=config.decode_reserve_blocks,
    )


def _bounds(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"config.{field}", f"{value!r} is out of range", limit=f"{low:g} to {high:g}")


def _or_none(value: int | Auto) -> int | None:
    return None if value == "auto" else value
