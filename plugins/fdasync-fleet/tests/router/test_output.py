"""The output of one sample on a router: what is read comes once, and all of it is there at the end."""

from __future__ import annotations

import gc
from random import Random

import pytest
from fdasync_fleet.router.output import RoutedOutput, merged

from fdasync.result import Delta, TopLogprobs


def delta(number: int, *, scored: bool = False, text: str = "", tokens: int = 1) -> Delta:
    ids = tuple(range(number, number + tokens))
    values = tuple([token / 8 for token in ids]) if scored else None
    tops = tuple([TopLogprobs((token,), (0.5,)) if token % 2 else None for token in ids]) if scored else None
    return Delta(index=3, token_ids=ids, text=text, raw_logprobs=values, processed_logprobs=values, top_logprobs=tops)


@pytest.mark.parametrize("seed", range(20))
def test_deltas_are_read_once_and_in_order_and_the_whole_has_them_all(seed: int):
    rng = Random(seed)
    scored = rng.random() < 0.5
    output, read, sent = RoutedOutput(3), [], []
    for number in range(0, 90, 3):
        one = delta(number, scored=scored, text=rng.choice(["", "ab"]), tokens=rng.choice([0, 1, 3]))
        output.add(one)
        sent.append(one)
        if rng.random() < 0.4 and (taken := output.take(is_whole=True)) is not None:
            read.append(taken)
            assert output.take(is_whole=True) is None
        assert output.whole() == merged(sent)
    last = Delta(index=3, token_ids=(), finish_reason="length")
    output.add(last)
    whole = output.whole()
    assert whole.finish_reason == "length"
    # what was not read can still be read, and nothing is told twice
    rest = output.take(is_whole=True)
    assert rest is not None
    assert merged([*read, rest]) == whole == output.whole()
    assert output.take(is_whole=True) is None


def test_output_without_any_delta_is_empty():
    output = RoutedOutput(2)
    assert not output
    assert output.take(is_whole=True) is None
    assert output.whole() == Delta(index=2, token_ids=())
    output.add(Delta(index=2, token_ids=(), finish_reason="abort"))
    assert output
    assert output.take(is_whole=True) == Delta(index=2, token_ids=(), finish_reason="abort")
    assert output
    assert output.whole().finish_reason == "abort"


def test_no_object_of_a_delta_stays_when_it_was_read():
    output = RoutedOutput(0)
    deltas = [delta(number, scored=True, text="x") for number in range(100)]
    for one in deltas:
        output.add(one)
        assert output.take(is_whole=True) is one
    # one look at all that the process holds, whatever else it has loaded
    held = [each for each in gc.get_referrers(*deltas) if each is not deltas]
    assert held == []
    # the lists of values, whatever their length
    assert len(gc.get_referents(output)) < 12


def test_the_last_delta_waits_for_the_rest_of_its_sample():
    output = RoutedOutput(0)
    output.add(Delta(index=0, token_ids=(1,)))
    output.add(Delta(index=0, token_ids=(2,), finish_reason="length"))
    assert output.take(is_whole=False).token_ids == (1,)
    assert output.take(is_whole=False) is None
    assert output.whole().token_ids == (1, 2)
    assert output.take(is_whole=True).token_ids == (2,)
    assert output.take(is_whole=True) is None
