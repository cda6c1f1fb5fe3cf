"""Small builders that several test files share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

from fdasync.actions import CopyRows, EmitTokens, FinishRequest, RunStep, WakeAt
from fdasync.cache.arena import AuxArena
from fdasync.cache.aux import AuxSpec
from fdasync.cache.prefix import block_keys, root_key
from fdasync.events.bus import EventBus
from fdasync.events.catalog import AbortRequested, RequestPrepared, StepDone, StopChecked, StopMatched, TimerFired
from fdasync.output import OutputHub, RequestOutput
from fdasync.request import SamplerSpec, SamplingParams
from fdasync.runner.base import Capacity, StepOutput
from fdasync.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.actions import Action
    from fdasync.events.catalog import Event

ROOT = root_key(b"tests")
SPECS = (AuxSpec("routing", (3, 2), "uint8"), AuxSpec("values", (4,), "float16"))


def case_settings(max_examples: int, **options: Any) -> settings:
    # a busy machine must not fail a test: no deadlines, no complaint of slowness
    slow = [HealthCheck.too_slow]
    return settings(max_examples=max_examples, deadline=None, print_blob=True, suppress_health_check=slow, **options)


def machine_settings(max_examples: int, steps: int) -> settings:
    return case_settings(max_examples, stateful_step_count=steps)


def make_sampler(prompt_len: int = 1, **changes: Any) -> SamplerSpec:
    values: dict[str, Any] = {
        "prompt_len": prompt_len, "seed": 0, "index": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "stop_ids": (),
        "raw": False, "processed": False, "top": 0,
    }  # fmt: skip
    return SamplerSpec(**{**values, **changes})


def make_request(key: int, tokens: Iterable[int], max_tokens: int, block_tokens: int, **fields: Any) -> RequestPrepared:
    """What prepare publishes for a prompt; rows from position 0 are wanted unless `start` says otherwise."""
    prompt = tuple(tokens)
    values: dict[str, Any] = {
        "key": key, "group": key, "tokens": prompt, "max_tokens": max_tokens, "start": 0, "namespace": ROOT,
        "block_keys": tuple(block_keys(ROOT, prompt, block_tokens)), "sampler": make_sampler(len(prompt)), "at": 1.0,
    }  # fmt: skip
    return RequestPrepared(**{**values, **fields})


def make_capacity(**changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "model": "m", "fingerprint": "f", "weights_id": "w", "vocab_size": 300, "eos_ids": (7,),
        "max_context_tokens": 100, "block_tokens": 4, "num_blocks": 20, "block_nbytes": 64, "kv_layout": "l",
        "kv_dtype": "d", "aux_specs": SPECS, "moe_layer_ids": (1, 3, 5), "num_experts": 16, "top_k": 2,
    }  # fmt: skip
    return Capacity(**{**values, **changes})


class Table:
    """A scheduler and short words for the events that tests put on the table; every turn ends in `check()`."""

    def __init__(self, **config: Any) -> None:
        values: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_running": 8, "max_step_tokens": 16}
        self.config = SchedulerConfig(**{**values, **config})
        self.scheduler = Scheduler(self.config)
        self.flying: list[RunStep] = []
        self.finished: dict[int, FinishRequest] = {}
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.decoding: list[int] = []
        self._requests: dict[int, RequestPrepared] = {}
        self._next_token = 1000

    # -- events

    def request(self, key: int, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> RequestPrepared:
        event = make_request(key, tokens, max_tokens, self.config.block_tokens, **fields)
        self._requests[key] = event
        return event

    def done(self, *tokens: int, at: float = 1.0) -> StepDone:
        """The oldest step in flight is done; tokens that are not given are numbers that never repeat."""
        step = self.flying.pop(0)
        count = self.sampled(step)
        fresh = range(self._next_token, self._next_token + count - len(tokens))
        self._next_token += len(fresh)
        return StepDone(step_id=step.step_id, tokens=(*tokens, *fresh), at=at)

    @staticmethod
    def abort(*keys: int) -> AbortRequested:
        return AbortRequested(keys=keys, at=1.0)

    @staticmethod
    def checked(key: int, num_tokens: int) -> StopChecked:
        return StopChecked(key=key, num_tokens=num_tokens, at=1.0)

    @staticmethod
    def matched(key: int, keep_tokens: int) -> StopMatched:
        return StopMatched(key=key, keep_tokens=keep_tokens, at=1.0)

    @staticmethod
    def timer(at: float) -> TimerFired:
        return TimerFired(at=at)

    # -- turns

    def turn(self, *events: Event) -> Turned:
        actions = self.scheduler.handle(list(events))
        for action in actions:
            if isinstance(action, RunStep):
                self._follow(action)
            elif isinstance(action, CopyRows):
                for span in action.spans:
                    # rows are contiguous: what a span means is its length
                    self.rows.setdefault(span.key, []).append((span.offset, span.count))
            elif isinstance(action, FinishRequest):
                assert action.key not in self.finished, f"{action.key} ended twice"
                self.finished[action.key] = action
        self.scheduler.check()
        return Turned(actions)

    def sampled(self, step: RunStep) -> int:
        return self._counts.pop(step.step_id)

    def _follow(self, step: RunStep) -> None:
        """The runner's decode set (`RunStep`), to know how many tokens the step samples."""
        if not hasattr(self, "_counts"):
            self._counts: dict[int, int] = {}
        self.decoding = [key for key in self.decoding if key not in step.leaves]
        assert set(step.skips) <= set(self.decoding)
        lasts = [chunk.key for chunk in step.chunks if chunk.last]
        self._counts[step.step_id] = len(self.decoding) - len(step.skips) + len(lasts)
        self.decoding += lasts
        self.flying.append(step)

    def run(self, *events: Event, turns: int = 200) -> None:
        """These events, then one step after the other until nothing is left to do."""
        self.turn(*events)
        for _ in range(turns):
            if not self.flying:
                return
            self.turn(self.done())
        raise AssertionError(f"still running after {turns} turns")

    def num_rows(self, key: int) -> int:
        return sum(count for _, count in self.rows.get(key, ()))

    def is_empty(self) -> bool:
        stats = self.scheduler.stats()
        free = stats.free_blocks + stats.idle_blocks == stats.num_blocks
        return free and not stats.waiting and not stats.running and not self.flying


class Turned:
    """The actions of one turn."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.steps = [action for action in actions if isinstance(action, RunStep)]
        self.finishes = [action for action in actions if isinstance(action, FinishRequest)]
        self.emits = [action for action in actions if isinstance(action, EmitTokens)]
        self.wakes = [action for action in actions if isinstance(action, WakeAt)]

    @property
    def step(self) -> RunStep:
        (step,) = self.steps
        return step

    @property
    def finish(self) -> FinishRequest:
        (finish,) = self.finishes
        return finish

    @property
    def starts(self) -> list[int]:
        return [start.key for step in self.steps for start in step.starts]

    @property
    def chunks(self) -> list[tuple[int, int, bool]]:
        return [(chunk.key, chunk.count, chunk.last) for step in self.steps for chunk in step.chunks]

    @property
    def emitted(self) -> list[tuple[int, int]]:
        return [pair for emit in self.emits for pair in zip(emit.keys, emit.tokens, strict=True)]

    def names(self) -> list[str]:
        return [type(action).__name__ for action in self.actions]


class ByteTokenizer:
    """One token per UTF-8 byte, and token 256, a special one without text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class WordTokenizer:
    """Tokens that stand for given pieces of bytes, so that a piece may hold half a character or half a stop."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


class OutputStage:
    """One request in an `OutputHub`, and the bus that it answers on."""

    def __init__(self, tokenizer=None, rows=False, streams=True, n=1, prompt=(1, 2, 3), start=0, **params):
        self.params = SamplingParams(n=n, **{"max_tokens": 64, **params})
        self.arena = AuxArena.create(8, 4, SPECS) if rows else None
        self.bus = EventBus(lambda: 5.0, lambda: None)
        self.ended = []
        self.hub = OutputHub(self.bus, lambda: 5.0, self.arena, self.ended.append)
        self.request = RequestOutput("r", self.params, start=start, now=1.0)
        self.request.prompt = prompt
        self.request.wants_rows = rows
        self.hub.add(self.request, list(range(n)), tokenizer)
        self.step = 0

    def emit(self, *tokens, keys=None, **logprobs):
        keys = range(len(tokens)) if keys is None else keys
        rows = tuple(range(len(tokens)))
        self.step += 1
        self.hub.emit(EmitTokens(self.step, tuple(keys), tokens, rows), StepOutput(self.step, tokens, **logprobs))

    def emit_all(self, tokens):
        for token in tokens:
            self.emit(token)

    def finish(self, tokens, reason="length", key=0, num_rows=0, cached=0, spans=((0, 3),)):
        self.hub.finish(FinishRequest(key, reason, tuple(tokens), num_rows, cached, spans))

    def deltas(self):
        found = []
        for sample in self.request.samples:
            while (delta := sample.delta()) is not None:
                found.append(delta)
        return found

    def answers(self):
        return self.bus.drain()

    @property
    def sample(self):
        return self.request.result(make_capacity()).samples[0]


def letters(text):
    return list(text.encode())
