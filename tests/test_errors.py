"""Errors: their fields, their tree, and their way through a worker's socket (`errors.py`, `worker/main.py`)."""

from __future__ import annotations

import asyncio
import inspect

import msgspec
import pytest

from fdasync import errors
from fdasync.errors import (
    Asleep,
    BadInput,
    BuffersOut,
    ChatUnsupported,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DecodeFailed,
    DeviceFailed,
    DuplicateRequestId,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    FdasyncError,
    GrammarFailed,
    InstanceLost,
    InvariantBroken,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    PermanentError,
    PluginError,
    ProcessorFailed,
    ProtocolError,
    RemoteError,
    RoutingMismatch,
    RunnerError,
    SourceUnsupported,
    StoreBusy,
    StoreRejected,
    StoreTimeout,
    StoreUnavailable,
    TaskCancelled,
    TokenizerFailed,
    TooLong,
    TransientError,
    UnsupportedModel,
    UpdateUnderWay,
    WakeFailed,
    WeightsBroken,
    WeightsDiffer,
    WeightsRejected,
    WorkerDied,
    WorkerStuck,
    WrongLoop,
)
from fdasync.ipc.errors import Failed
from fdasync.runner.worker.main import RunnerService

EXAMPLES = [
    (BadInput("top_p", "is odd", limit=3, hint="try less"), "top_p: is odd (limit: 3); try less"),
    (BadInput("top_p", "is odd"), "top_p: is odd"),
    (TooLong("prompt", "is too long", limit=8, prompt_tokens=9), "prompt: is too long (limit: 8)"),
    (
        RoutingMismatch("expert 9 does not exist", sequence=2, request_id="r7", layer=3, position=17),
        "routing[2], request 'r7', layer 3, position 17: expert 9 does not exist",
    ),
    (RoutingMismatch("is no record", sequence=0), "routing[0]: is no record"),
    (
        Asleep("update_weights", ("weights", "kv_cache")),
        "update_weights: this engine sleeps, weights, kv_cache released; wake the weights first",
    ),
    (WakeFailed("kv_cache", "no memory"), "the engine still sleeps, kv_cache could not be woken: no memory"),
    (UpdateUnderWay("of d0"), "update_weights: another update is under way (of d0); wait for its end"),
    (UpdateUnderWay("of d0", "a join is under way"), "update_weights: a join is under way (of d0); wait for its end"),
    (SourceUnsupported("tensors", "a folder"), "source: tensors cannot be loaded here (limit: a folder)"),
    (ConfigError("config.x", "is odd", limit=0), "config.x: is odd (limit: 0)"),
    (DuplicateRequestId("r1"), "'r1' names a request that is still live"),
    (CheckpointError("/m", "no weights"), "/m: no weights"),
    (
        ChatUnsupported("Letters", "knows no chat templates"),
        "messages: tokenizer Letters knows no chat templates; give text or token ids",
    ),
    (TokenizerFailed("Letters", "encode raised KeyError: 'x'"), "tokenizer Letters: encode raised KeyError: 'x'"),
    (UnsupportedModel("llama", "dense"), "llama: dense"),
    (PluginError("g", "n", "d", "broken"), "plugin 'n' of g (from d): broken"),
    (PluginError("g", "n", "", "broken"), "plugin 'n' of g: broken"),
    (EngineClosed("draining"), "the engine is draining"),
    (TaskCancelled("fdasync-engine"), "task 'fdasync-engine', which is the engine's own, was cancelled from outside"),
    (WrongLoop("engine"), "the engine was started on another event loop: it is used and closed on that one"),
    (EngineFailed(OSError("disk")), "the engine failed: OSError: disk"),
    (InvariantBroken("rule", ["a", "b"]), "rule\n  a\n  b"),
    (DeadlineExceeded("step 3", 0.5), "step 3 did not end within 0.5 s"),
    (DecodeFailed(KeyError("x"), None), "the tokenizer could not decode: KeyError: 'x'"),
    (GrammarFailed("too many states"), "the grammar could not be kept: too many states"),
    (ProcessorFailed("mine: NaN"), "the logits could not be processed: mine: NaN"),
    (RunnerError("smoke", 7), "step 7: smoke"),
    (RunnerError("smoke"), "smoke"),
    (DeviceFailed("an illegal address"), "the device failed: an illegal address"),
    (BuffersOut("rows", 8, 9, {"step": 4}), "rows: no room for 8 bytes (limit: 9; in use: step 4)"),
    (WorkerDied("w", 5, -9), "the w process 5 ended by signal 9"),
    (WorkerDied("w", 5, 3), "the w process 5 ended with status 3"),
    (WorkerDied("w", 5, None), "the w process 5 ended with an unknown status"),
    (WorkerStuck("w", 5, "step 3", 2.0), "the w process 5 did not finish step 3 within 2 s"),
    (ProtocolError("too large"), "too large"),
    (StoreUnavailable("file", "no disk"), "store file: no disk"),
    (StoreBusy("file", "a long line"), "store file: a long line"),
    (StoreRejected("file", "no folder", "make one"), "store file: no folder; make one"),
    (StoreRejected("file", "no folder"), "store file: no folder"),
    (WeightsRejected("no such tensor"), "the weights were not taken: no such tensor"),
    (WeightsBroken("disk"), "half-way, load them again: disk"),
    (
        WeightsDiffer("a", "b", "x", "d0"),
        "again: d0: their fingerprint is b, the expected one is a, and the first tensor",
    ),
    (WeightsDiffer("a", "b"), "load them again: their fingerprint is b, the expected one is a"),
    (EngineBusy(8, 8), "8 samples are inside (limit: 8)"),
    (PeerUnreachable("ipc:///d", "silent for 3 s"), "ipc:///d: silent for 3 s"),
    (PeerRefused("d0", "shape.block_tokens", "16, not 32"), "d0: shape.block_tokens: 16, not 32"),
    (PeerBusy("d0", 100), "d0: 100 bytes are on their way"),
    (InstanceLost("r1", "d0: gone"), "request r1: d0: gone"),
    (RemoteError("d0", "RunnerError", "smoke"), "d0: RunnerError: smoke"),
]


async def test_a_store_timeout_says_what_it_waited_for_and_hands_on_the_end():
    ended = asyncio.get_running_loop().create_future()
    error = StoreTimeout("file", "put", 0.5, ended)
    assert str(error) == "store file: put did not end within 0.5 s"
    assert (error.deadline_s, error.ended) == (0.5, ended)
    assert isinstance(error, TimeoutError)
    assert isinstance(error, StoreUnavailable)


@pytest.mark.parametrize(("error", "text"), EXAMPLES, ids=[type(error).__name__ for error, _ in EXAMPLES])
def test_errors_say_what_their_fields_say(error, text):
    assert text in str(error)
    names = [name for name in inspect.signature(type(error).__init__).parameters if name != "self"]
    assert all(hasattr(error, name) for name in names), names


def test_every_error_has_an_example():
    classes = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, FdasyncError)}
    # a StoreTimeout needs a loop, and has a test of its own
    bases = {FdasyncError, TransientError, PermanentError, StoreTimeout}
    assert classes - bases == {type(error) for error, _ in EXAMPLES}


def test_each_error_is_either_transient_or_permanent():
    for error, _ in EXAMPLES:
        assert isinstance(error, TransientError) != isinstance(error, PermanentError)


def test_types_that_callers_know():
    assert issubclass(BadInput, ValueError)
    assert issubclass(DeadlineExceeded, TimeoutError)
    cause = OSError("disk")
    error = EngineFailed(cause, partial=3)
    assert error.__cause__ is cause
    assert error.partial == 3


# -- the wire


ERRORS = RunnerService.errors


def error_of(error: BaseException) -> FdasyncError:
    return RunnerService().error_of(None, error)


WHOLE = [
    BadInput("a", "b", limit="0 to 3", hint="d"),
    BadInput("a", "b"),
    ConfigError("runner_config.x", "is odd", limit="3"),
    CheckpointError("/m", "no weights"),
    UnsupportedModel("llama", "dense"),
    PluginError("g", "n", "d", "broken"),
    RunnerError("smoke", 7),
]


@pytest.mark.parametrize("error", WHOLE, ids=[type(error).__name__ for error in WHOLE])
def test_errors_that_a_worker_may_raise_arrive_whole(error):
    sent = msgspec.msgpack.encode(ERRORS.pack(1, error_of(error)))
    got = ERRORS.unpack(msgspec.msgpack.decode(sent, type=Failed))
    assert type(got) is type(error)
    assert vars(got) == vars(error)
    assert str(got) == str(error)


def test_fields_are_taken_by_name_not_by_place():
    got = ERRORS.unpack(Failed(1, "PluginError", {"problem": "p", "distribution": "d", "name": "n", "group": "g"}))
    assert (got.group, got.name, got.distribution, got.problem) == ("g", "n", "d", "p")


def test_a_limit_crosses_in_words():
    got = ERRORS.unpack(ERRORS.pack(1, BadInput("a", "b", limit=range(3))))
    assert got.limit == "range(0, 3)"


@pytest.mark.parametrize("error", [OSError("disk"), WorkerDied("w", 1, 2), DuplicateRequestId("x"), KeyError("k")])
def test_other_errors_arrive_as_words(error):
    got = ERRORS.unpack(ERRORS.pack(1, error_of(error)))
    assert type(got) is RunnerError
    assert got.problem == f"{type(error).__name__}: {error}"
    assert got.step_id == -1


@pytest.mark.parametrize(
    "failed",
    [
        Failed(1, "OSError", {"problem": "x"}),
        Failed(1, "SystemExit", {}),
        Failed(1, "eval", {"problem": "x", "step_id": 1}),
        Failed(1, "EngineClosed", {"state": "x"}),
        Failed(1, "WorkerDied", {"name": "a", "pid": 1, "exit_status": 0}),
        Failed(1, "RunnerError", {"problem": "x"}),
        Failed(1, "RunnerError", {"problem": "x", "step_id": 1, "more": 2}),
        Failed(1, "BadInput", {"problem": "x", "step_id": 1}),
        Failed(1, "RunnerError", {"problem": "x", "step_id": "one"}),
    ],
)
def test_nothing_else_can_be_made_from_the_wire(failed):
    with pytest.raises(ProtocolError, match=failed.kind):
        ERRORS.unpack(failed)
