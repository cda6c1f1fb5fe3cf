"""Whom a router chooses, from what it knows of its instances."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from fdasync_fleet.router.instances import MISSED, OUT, MemoryStanding, WeightsStanding
from fdasync_fleet.router.limits import Need, need_of
from instance_stage import KEYS, Stage, with_limits

from fdasync.request import SamplingParams
from tests.support.router_scene import kv_batch


def test_prefill_and_decode_instances_share_a_request():
    assert Stage("p0", "d0", "d1").choose() == ("p0", ["d0", "d1"])


def test_where_one_half_is_missing_whoever_is_there_serves_it_whole():
    assert Stage("d0").choose() == ("d0", [])
    assert Stage("p0").choose() == ("p0", [])
    assert Stage("m0").choose() == ("m0", [])
    assert Stage().choose() is None
    stage = Stage("p0", "d0")
    stage["d0"].peer.is_up = False
    assert stage.choose() == ("p0", [])


def test_an_instance_that_is_away_drains_or_leaves_gets_nothing():
    stage = Stage("m0", "m1", "m2", "m3")
    stage["m0"].peer.is_up = False
    stage["m1"].leaving = True
    stage.status("m2", "draining")
    assert stage.choose() == ("m3", [])
    stage["m3"].leaving = True
    assert stage.choose() is None
    # a paused one will go on
    stage.status("m2", "paused")
    assert stage.choose() == ("m2", [])


def test_of_all_that_weights_and_memory_may_be_one_pair_gets_requests():
    for standing, memory in itertools.product(get_args(WeightsStanding), get_args(MemoryStanding)):
        stage = Stage("m0")
        stage["m0"].stands(standing)
        stage["m0"].wakes(memory)
        assert (stage.choose() is not None) == ((standing, memory) == ("alike", "as_told"))
        assert stage["m0"].is_out == (standing in OUT)
        assert stage["m0"].lacks_weights or standing not in MISSED
        # nothing comes behind the last word
        stage["m0"].stands("alike")
        assert (stage["m0"].standing == "dropped") == (standing == "dropped")


def test_the_page_has_every_word():
    page = (Path(__file__).parents[4] / "docs" / "prefill-decode.md").read_text()
    (table,) = [part for part in page.split("\n\n") if part.startswith("| word | the instance's weights")]
    assert tuple(re.findall(r"(?m)^\| `(\w+)`", table)) == get_args(WeightsStanding)
    assert all(f"`{word}`" in page for word in get_args(MemoryStanding))


def test_prefill_goes_where_least_stands_before_it():
    stage = Stage("p0", "p1", "d0")
    stage.status("p0", queued=100)
    assert stage.choose()[0] == "p1"
    # what was sent since its last word counts too
    stage["p1"].sent(200, ())
    assert stage.choose()[0] == "p0"


def test_a_prefix_is_worth_twice_the_tokens_that_it_saves():
    stage = Stage("p0", "p1", "d0")
    stage.has("p1", 0, 1, 2)
    assert stage.choose()[0] == "p1"
    stage.status("p1", queued=23)
    assert stage.choose()[0] == "p1"
    stage.status("p1", queued=25)
    assert stage.choose()[0] == "p0"
    # a block without those before it is of no use
    stage.has("p0", 1, 2, 3)
    assert stage.fleet.index.prefixes(KEYS, 1 << stage["p0"].slot) == [(0, 1)]


def test_decoders_are_in_order_of_load_and_prefix():
    stage = Stage("p0", "d0", "d1", "d2")
    stage.status("d0", free=20)
    stage.status("d1", free=50)
    stage.status("d2", free=90)
    assert stage.choose()[1] == ["d2", "d1", "d0"]
    # requests that it cannot have told of yet
    stage["d2"].live = 10
    assert stage.choose()[1] == ["d1", "d0", "d2"]
    stage.status("d2", free=90, running=10)
    assert stage.choose()[1][0] == "d2"
    stage.status("d1", free=84)
    stage.has("d1", *range(8))
    assert stage.choose()[1][0] == "d1"


def test_no_more_than_eight_decoders_are_named():
    stage = Stage("p0", *[f"d{number}" for number in range(10)])
    assert len(stage.choose()[1]) == 8


def test_an_instance_that_failed_the_request_before_is_asked_last_not_never():
    stage = Stage("p0", "p1", "d0", "d1")
    assert stage.choose(without=["p0", "d0"]) == ("p1", ["d1"])
    assert stage.choose(without=["p0", "p1", "d0", "d1"]) == ("p0", ["d0", "d1"])


def test_a_mixed_instance_serves_it_whole_where_that_is_quicker():
    stage = Stage("p0", "d0", "m0")
    stage.status("p0", queued=50)
    assert stage.choose() == ("m0", [])
    stage.status("m0", queued=60)
    assert stage.choose() == ("p0", ["d0"])


def test_what_lacks_little_on_a_decoder_goes_there_at_once():
    stage = Stage("p0", "d0", "d1", direct=16)
    assert stage.choose() == ("p0", ["d0", "d1"])
    stage.has("d1", *range(5))
    assert stage.choose() == ("d1", [])
    assert stage.choose(num_tokens=15, keys=()) == ("d0", [])


def test_the_instances_that_the_caller_names_serve_it():
    stage = Stage("p0", "p1", "d0", "d1", "m0")
    stage.status("p1", queued=1000)
    assert stage.choose(prefill="p1", decoders=["d1", "d0"]) == ("p1", ["d1", "d0"])
    assert stage.choose(prefill="p1") == ("p1", ["d0", "d1"])
    assert stage.choose(decoders=["d1"]) == ("p0", ["d1"])
    # not a mixed one that would be quicker
    stage.status("p0", queued=1000)
    assert stage.choose(decoders=["d1"]) == ("p0", ["d1"])
    assert stage.choose(prefill="m0") == ("m0", ["d0", "d1"])


def test_a_named_instance_that_cannot_take_it_now_is_passed_over():
    stage = Stage("p0", "p1", "d0", "d1", "d2", "m0")
    stage["d1"].stands("behind")
    stage["d2"].peer.is_up = False
    # one that is not there may be to p0
    assert stage.choose(decoders=["p1", "d1", "d2", "d0", "m0"]) == ("p0", ["d2", "d0", "m0"])
    stage["d0"].leaving = True
    stage.status("m0", "draining")
    assert stage.choose(decoders=["p1", "d1", "d0", "m0"]) is None
    assert stage.fleet.may_serve("", ["d1"])
    for decoders in (["p1"], ["d0", "m0"], ["unheard of"]):
        assert not stage.fleet.may_serve("", decoders)
    assert stage.fleet.may_serve("p0", [])
    stage["p0"].peer.is_up = False
    assert not stage.fleet.may_serve("p0", [])
    assert stage.fleet.may_serve("", [])


def test_an_instance_that_is_named_as_both_serves_it_whole():
    stage = Stage("p0", "d0", "m0")
    assert stage.choose(prefill="d0") == ("d0", [])
    assert stage.choose(prefill="m0", decoders=["m0"]) == ("m0", [])


def test_a_named_decoder_without_anybody_to_prefill_gets_it_whole():
    assert Stage("d0", "m0").choose(decoders=["d0"]) == ("d0", [])


def test_an_instance_that_the_caller_names_and_that_is_away_is_waited_for():
    stage = Stage("p0", "p1", "d0")
    stage["p1"].peer.is_up = False
    assert stage.choose(prefill="p1") is None
    assert stage.choose(prefill="unheard of") is None
    assert stage.choose(decoders=["unheard of"]) is None


@pytest.mark.parametrize("namespace", [b"n" * 16, b"o" * 16])
def test_events_of_other_weights_replace_what_was_known(namespace):
    stage = Stage("p0")
    stage.has("p0", 0, 1)
    member = stage["p0"]
    member.learn(kv_batch(namespace, 0, False, (KEYS[2],), (KEYS[0],)))
    assert member.blocks == ({KEYS[1], KEYS[2]} if namespace == b"n" * 16 else {KEYS[2]})
    member.learn(kv_batch(namespace, 0, True, (KEYS[3],), ()))
    assert member.blocks == {KEYS[3]}
    member.came_up()
    assert member.blocks == set()


# -- instances that hold unequal amounts


def test_an_instance_that_cannot_hold_a_request_is_left_out():
    stage = Stage("m0", "m1")
    with_limits(stage, "m0", blocks=10)
    stage.status("m1", queued=1000)
    # the last token is never forwarded
    assert stage.choose(need=Need(30, 11)) == ("m0", [])
    assert stage.choose(need=Need(30, 12)) == ("m1", [])
    with_limits(stage, "m0", context=40)
    assert stage.choose(need=Need(30, 10)) == ("m0", [])
    assert stage.choose(need=Need(30, 11)) == ("m1", [])
    with_limits(stage, "m0", requests=3)
    assert stage.choose(need=Need(samples=3)) == ("m0", [])
    assert stage.choose(need=Need(samples=4)) == ("m1", [])


def test_a_prefill_instance_needs_room_for_the_prompt_alone():
    stage = Stage("p0", "p1", "d0")
    with_limits(stage, "p0", blocks=10)
    stage.status("p1", queued=1000)
    assert stage.choose(need=Need(40, 60)) == ("p0", ["d0"])
    assert stage.choose(need=Need(41, 50)) == ("p1", ["d0"])
    with_limits(stage, "p1", context=41)
    # no prefill instance holds the prompt
    assert stage.choose(need=Need(45, 50)) == ("d0", [])


def test_a_decode_instance_needs_room_for_all_of_it_and_for_a_group_at_once():
    stage = Stage("p0", "d0", "d1")
    with_limits(stage, "d0", blocks=10)
    stage.status("d1", free=1)
    assert stage.choose(need=Need(30, 11)) == ("p0", ["d0", "d1"])
    assert stage.choose(need=Need(30, 12)) == ("p0", ["d1"])
    # seven full blocks of the prompt, and an open one for each sample
    assert stage.choose(need=Need(28, 4, 3)) == ("p0", ["d0", "d1"])
    assert stage.choose(need=Need(28, 4, 4)) == ("p0", ["d1"])
    with_limits(stage, "d1", blocks=10)
    # the samples of a group run in turn where one instance serves it whole
    assert stage.choose(need=Need(28, 4, 4)) == ("d0", [])
    assert stage.choose(need=Need(30, 12)) == ("p0", [])


def test_an_instance_that_failed_a_request_is_asked_again_where_no_other_can_hold_it():
    stage = Stage("m0", "m1")
    with_limits(stage, "m0", blocks=10)
    assert stage.choose(need=Need(30, 30), without=["m1"]) == ("m1", [])


def test_an_instance_that_the_caller_names_has_to_hold_it():
    stage = Stage("p0", "d0", "d1", "m0")
    with_limits(stage, "d0", blocks=10)
    with_limits(stage, "p0", blocks=10)
    long = Need(30, 30)
    assert stage.choose(need=long, decoders=["d0", "d1"]) == ("p0", ["d1"])
    assert stage.choose(need=long, decoders=["d0"]) is None
    assert not stage.fleet.may_serve("", ["d0"], long)
    assert stage.fleet.refusal(long, "", ["d0"]).limit == 41
    assert stage.fleet.refusal(long, "", ["d1"]) is None
    assert stage.choose(need=Need(50, 30), prefill="p0") == ("d1", [])
    assert stage.choose(need=Need(50, 30), prefill="p0", decoders=["d0"]) is None
    assert stage.fleet.refusal(Need(50, 30), "p0", ["d0"]).limit == 41


def test_a_request_that_no_instance_can_hold_is_refused_with_the_largest_limit_among_them():
    stage = Stage("p0", "d0", "m0")
    for name, blocks, context in (("p0", 20, 1000), ("d0", 30, 90), ("m0", 10, 1000)):
        with_limits(stage, name, blocks=blocks, context=context)
    assert stage.fleet.refusal(Need(50, 40), "", []) is None
    error = stage.fleet.refusal(Need(50, 41), "", [])
    assert (error.field, error.limit, error.prompt_tokens) == ("max_tokens", 90, 50)
    assert "the context" in error.problem
    error = stage.fleet.refusal(Need(90, 1), "", [])
    assert (error.field, error.limit) == ("prompt", 90)
    with_limits(stage, "d0", blocks=21, context=1000)
    assert "the KV blocks" in stage.fleet.refusal(Need(50, 41), "", []).problem
    error = stage.fleet.refusal(Need(samples=65), "", [])
    assert (error.field, error.limit) == ("n", 64)


def test_no_request_is_refused_for_good_while_an_instance_that_may_hold_it_is_away():
    stage = Stage("m0", "m1")
    with_limits(stage, "m0", blocks=10)
    stage["m1"].peer.is_up = False
    long = Need(30, 30)
    assert stage.choose(need=long) is None
    assert not stage.fleet.may_serve("", [], long)
    assert stage.fleet.refusal(long, "", []) is None
    assert stage.fleet.refusal(Need(30, 80), "", []) is not None
    # one that never answered may hold anything
    stage["m1"].peer.hello = None
    assert stage.fleet.refusal(Need(30, 80), "", []) is None


def test_what_a_request_needs_follows_from_its_fields():
    assert need_of(None, bytes(20), SamplingParams(max_tokens=7, n=3)) == Need(5, 7, samples=3)
    assert need_of(None, bytes(20), SamplingParams(max_tokens=7, prompt_logprobs_start=0)) == Need(5, 7, scores=True)


@pytest.mark.parametrize(
    ("need", "field"), [(Need(grammar=True), "grammar"), (Need(scores=True), "prompt_logprobs_start")]
)
def test_what_a_runner_cannot_do_is_asked_of_others(need, field):
    assert Stage("m7", "m8").choose() == ("m7", [])
    assert Stage("m7", "m1").choose(need=need) == ("m1", [])
    assert Stage("p7", "p1", "d8", "d2").choose(need=need) == ("p1", ["d2"])
    # one side alone can: it serves the request whole
    assert Stage("p1", "d8").choose(need=need) == ("p1", [])
    assert Stage("p7", "d2").choose(need=need) == ("d2", [])
    assert Stage("m7", "m1").fleet.refusal(need, "", []) is None
    nobody = Stage("m7", "m8").fleet.refusal(need, "", [])
    assert nobody.field == field
    assert "no instance" in str(nobody)
    # the limit is that of those that can
    assert Stage("m7", "m1").fleet.refusal(msgspec.structs.replace(need, samples=65), "", []).field == "n"
