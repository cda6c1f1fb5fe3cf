"""A driver whose runner, output and scheduler are the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import msgspec

from fdasync.engine.driver import Driver
from fdasync.events.bus import EventBus
from fdasync.runner.base import CopyOutput, Runner, StepOutput
from fdasync.scheduler import SchedulerConfig, make_scheduler


class HandRunner(Runner):
    """Steps and copies end when the test ends them."""

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, log):
        self.log = log
        self.flights: list[tuple[int, asyncio.Future[StepOutput]]] = []
        self.copies: dict[int, asyncio.Future[CopyOutput]] = {}

    def launch(self, step):
        self.log.append(("launch", step.step_id))
        done = asyncio.get_running_loop().create_future()
        self.flights.append((step.step_id, done))
        return done

    def end(self, *tokens):
        step_id, done = self.flights.pop(0)
        done.set_result(StepOutput(step_id, tokens))

    def copy(self, copy):
        self.log.append(("copy", copy.copy_id))
        self.copies[copy.copy_id] = done = asyncio.get_running_loop().create_future()
        return done

    async def open(self):
        raise NotImplementedError

    async def bind(self, num_blocks, arena, host=None, snapshots=None):
        raise NotImplementedError

    async def aclose(self):
        raise NotImplementedError


class Output:
    """Writes down what it is told to do."""

    def __init__(self, log):
        self.log = log
        self.broken = False

    def emit(self, action, output):
        assert action.step_id == output.step_id
        self.log.append(("emit", action.tokens, output.tokens))

    def copy_rows(self, spans):
        self.log.append(("rows", sum(span.count for span in spans)))

    def finish(self, action):
        if self.broken:
            raise OSError("the disk is full")
        self.log.append(("finish", action.key, action.reason))


class Told:
    """Stands where the rehasher and the store I/O stand: writes down what each verb was given."""

    def __init__(self, log):
        for verb in ("look_up", "fetch", "write", "add"):
            setattr(self, verb, lambda action, verb=verb: log.append((verb, action)))


class Script:
    """A scheduler that does as it is told: a list of actions for each turn."""

    config = SchedulerConfig(block_tokens=4, num_blocks=8, max_running=4, max_step_tokens=16)

    def __init__(self, *turns):
        self.turns = list(turns)
        self.seen = []

    def handle(self, events):
        self.seen.append(list(events))
        answer = self.turns.pop(0) if self.turns else []
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Stage:
    """A driver and its bus.

    Attributes:
        log: what runner, output, rehasher and store were told, in order.
        failures: the errors that ended the engine.
    """

    def __init__(self, scheduler=None, *, has_store=False, has_attendant=False, **options):
        self.log = []
        attendant = SimpleNamespace(perform=lambda action: self.log.append(("elsewhere", action)))
        self.failures = []
        self.loop = asyncio.get_running_loop()
        self.runner = HandRunner(self.log)
        self.output = Output(self.log)
        self.scheduler = scheduler or make_scheduler(Script.config)
        values = {"step_deadline_s": 60.0, "trace": None, "on_failure": self.failures.append}
        self.bus = EventBus(self.loop.time)
        told = Told(self.log)
        self.driver = Driver(
            self.loop,
            self.bus,
            self.scheduler,
            self.runner,
            self.output,
            told,
            told if has_store else None,
            attendant if has_attendant else None,
            **{**values, **options},
        )

    async def turns(self, count=3):
        for _ in range(count):
            await asyncio.sleep(0)
