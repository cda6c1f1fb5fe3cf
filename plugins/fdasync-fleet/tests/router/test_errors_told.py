"""An instance's error is the same kind of error at the router, and names the instance."""

from __future__ import annotations

import msgspec
import pytest
from fdasync_fleet.messages import Reply, decode, encode
from fdasync_fleet.verbs import error_of, failure_of

from fdasync.errors import (
    Asleep,
    BadInput,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    RemoteError,
    UpdateUnderWay,
    WakeFailed,
    WeightsBroken,
    WeightsDiffer,
    WeightsRejected,
)

TOLD = [
    (BadInput("tags", "is odd", limit=3, hint="leave it"), "tags: d0: is odd (limit: 3); leave it"),
    (ConfigError("sleep", "cannot"), "sleep: d0: cannot"),
    (UpdateUnderWay("of r1"), "another update is under way (of r1) (says d0)"),
    (Asleep("update_weights", ("weights", "kv_cache")), "d0: this engine sleeps, weights, kv_cache released"),
    (WeightsRejected("no such folder"), "d0: no such folder"),
    (WeightsBroken("a torn tensor"), "d0: a torn tensor"),
    (WeightsDiffer("a" * 32, "b" * 32, "lm_head"), f"d0: their fingerprint is {'b' * 32}, the expected one is"),
    (WakeFailed("kv_cache", "no memory"), "d0: no memory"),
]


def crossed(error: FdasyncError) -> FdasyncError:
    reply = decode(encode(Reply(7, failure=failure_of(error))))
    assert isinstance(reply, Reply)
    assert reply.failure is not None
    assert reply.error == type(error).__name__
    return error_of("d0", reply.failure)


@pytest.mark.parametrize(("error", "words"), TOLD, ids=[type(error).__name__ for error, _ in TOLD])
def test_an_error_is_the_same_error_of_the_instance(error: FdasyncError, words: str) -> None:
    told = crossed(error)
    assert type(told) is type(error)
    assert words in str(told)


@pytest.mark.parametrize("error", [EngineClosed("closed"), DeadlineExceeded("a pause", 2.0)])
def test_other_errors_are_remote_ones(error: FdasyncError) -> None:
    told = crossed(error)
    assert isinstance(told, RemoteError)
    assert (told.peer, told.error, told.problem) == ("d0", type(error).__name__, str(error))


def test_long_and_odd_words_are_cut_to_what_crosses() -> None:
    told = crossed(WeightsRejected("x" * 9000 + "\ud800"))
    assert isinstance(told, WeightsRejected)
    assert told.problem == "d0: " + "x" * 4096


def test_fields_that_are_no_error_s_are_a_remote_error() -> None:
    failure = msgspec.structs.replace(failure_of(WeightsRejected("x")), fields={"odd": "words"})
    assert isinstance(error_of("d0", failure), RemoteError)
