"""Whom a router chooses, from what it knows of its instances."""

from __future__ import annotations

import pytest

from fdasync.pd.fleet import Fleet
from fdasync.pd.messages import PROTOCOL, BlockNews, Facts, Hello, Shape, Status

KEYS = tuple(bytes([number]) * 16 for number in range(8))
SHAPE = Shape(bytes(16), "l", "d", 4, 64, ())


class FakePeer:
    def __init__(self, address, role):
        self.address, self.is_up, self.role, self.incarnation = address, True, role, address.encode()
        facts = Facts("m", 300, 100, 100, (), 0, None, "", "", 8, 0)
        self.hello = Hello(PROTOCOL, address, role, address, SHAPE, (), b"n" * 16, facts)


class Stage:
    """A fleet of instances with these names: p0 prefills, d0 decodes, m0 does both."""

    def __init__(self, *names, direct=0):
        self.fleet = Fleet(direct)
        roles = {"p": "prefill", "d": "decode", "m": "mixed"}
        for name in names:
            self.fleet.add(FakePeer(name, roles[name[0]])).came_up()

    def __getitem__(self, name):
        return self.fleet.find(name)

    def status(self, name, state="running", queued=0, running=0, free=100):
        self[name].status = Status(state, 0, queued, running, 0, free, 100)

    def has(self, name, *numbers):
        self[name].learn(BlockNews(b"n" * 16, False, tuple([KEYS[number] for number in numbers]), ()))

    def choose(self, num_tokens=32, without=(), prefill="", decoders=(), keys=KEYS):
        route = self.fleet.choose(keys, num_tokens, without, prefill, decoders)
        return None if route is None else (route.first.address, [member.address for member in route.decoders])


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


def test_who_is_not_there_drains_or_leaves_gets_nothing():
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


def test_prefill_goes_where_least_stands_before_it():
    stage = Stage("p0", "p1", "d0")
    stage.status("p0", queued=100)
    assert stage.choose()[0] == "p1"
    # what was sent since its last word counts too
    stage["p1"].tokens = 200
    assert stage.choose()[0] == "p0"


def test_a_prefix_is_worth_the_tokens_that_it_saves():
    stage = Stage("p0", "p1", "d0")
    stage.has("p1", 0, 1, 2)
    assert stage.choose()[0] == "p1"
    stage.status("p1", queued=11)
    assert stage.choose()[0] == "p1"
    stage.status("p1", queued=13)
    assert stage.choose()[0] == "p0"
    # a block without those before it is of no use
    stage.has("p0", 1, 2, 3)
    assert stage["p0"].prefix_blocks(KEYS) == 0


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


def test_who_failed_it_before_is_asked_last_not_never():
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


def test_whom_the_caller_names_serves_it():
    stage = Stage("p0", "p1", "d0", "d1", "m0")
    stage.status("p1", queued=1000)
    assert stage.choose(prefill="p1", decoders=["d1", "d0"]) == ("p1", ["d1", "d0"])
    assert stage.choose(prefill="p1") == ("p1", ["d0", "d1"])
    assert stage.choose(decoders=["d1"]) == ("p0", ["d1"])
    # not a mixed one that would be quicker
    stage.status("p0", queued=1000)
    assert stage.choose(decoders=["d1"]) == ("p0", ["d1"])
    assert stage.choose(prefill="m0") == ("m0", ["d0", "d1"])


def test_who_is_named_and_cannot_take_it_now_is_passed_over():
    stage = Stage("p0", "p1", "d0", "d1", "d2", "m0")
    stage["d1"].behind = True
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


def test_who_is_named_as_both_serves_it_whole():
    stage = Stage("p0", "d0", "m0")
    assert stage.choose(prefill="d0") == ("d0", [])
    assert stage.choose(prefill="m0", decoders=["m0"]) == ("m0", [])


def test_a_named_decoder_without_anybody_to_prefill_gets_it_whole():
    assert Stage("d0", "m0").choose(decoders=["d0"]) == ("d0", [])


def test_whom_the_caller_names_and_is_not_there_is_waited_for():
    stage = Stage("p0", "p1", "d0")
    stage["p1"].peer.is_up = False
    assert stage.choose(prefill="p1") is None
    assert stage.choose(prefill="unheard of") is None
    assert stage.choose(decoders=["unheard of"]) is None


@pytest.mark.parametrize("namespace", [b"n" * 16, b"o" * 16])
def test_news_of_other_weights_replace_what_was_known(namespace):
    stage = Stage("p0")
    stage.has("p0", 0, 1)
    member = stage["p0"]
    member.learn(BlockNews(namespace, False, (KEYS[2],), (KEYS[0],)))
    assert member.blocks == ({KEYS[1], KEYS[2]} if namespace == b"n" * 16 else {KEYS[2]})
    member.learn(BlockNews(namespace, True, (KEYS[3],), ()))
    assert member.blocks == {KEYS[3]}
    member.came_up()
    assert member.blocks == set()
