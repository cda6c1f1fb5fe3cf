"""The n-gram drafter: what it finds, against a naive one; what it forgets, and when (`ngram.py`)."""

from __future__ import annotations

from itertools import chain

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.drafting import DrafterLimits
from fdasync.drafting.ngram import NgramConfig, NgramDrafter
from fdasync.drafting.token_pages import PAGE_TOKENS
from fdasync.errors import ConfigError
from fdasync.testing import DrafterTests
from tests.drafting.naive import ExactNgram, NaiveNgram, column, packed

PATH = 7
LIMITS = DrafterLimits(path_tokens=PATH, max_running=128)


def make(kind=NgramDrafter, path=PATH, **settings):
    return kind(NgramConfig(**settings), DrafterLimits(path_tokens=path, max_running=128))


def feed(drafter, key, tokens, at_once=1):
    for at in range(0, len(tokens), at_once):
        some = tokens[at : at + at_once]
        drafter.take((key,), column([len(some)]), np.array(some, np.int32))


def ask(drafter, *keys, most=PATH):
    counts, tokens = drafter.propose(keys, column([most] * len(keys)))
    paths = np.split(tokens, np.cumsum(counts)[:-1])
    return [path.tolist() for path in paths]


class TestNgram(DrafterTests):
    def make(self, limits):
        return NgramDrafter(NgramConfig(), limits)


class TestNgramOfLittleMemory(DrafterTests):
    def make(self, limits):
        return NgramDrafter(NgramConfig(limit_nbytes=1 << 16, keep_s=5.0), limits)


TOKENS = st.lists(st.integers(0, 2), max_size=30)


@pytest.mark.ci
@settings(max_examples=60, deadline=None)
@given(data=st.data(), orders=st.sampled_from([(8, 4, 2), (3,), (5, 4, 3, 2, 1)]), path=st.sampled_from([1, 3, 7]))
def test_paths_are_those_of_a_naive_search(data, orders, path):
    drafter = make(ExactNgram, path, orders=orders, limit_nbytes=1 << 20)
    naive = NaiveNgram(orders, path)
    prompts = data.draw(st.lists(TOKENS.filter(bool), min_size=1, max_size=2))
    for _ in range(data.draw(st.integers(5, 25))):
        live = tuple(naive.streams)
        act = data.draw(st.sampled_from(["begin", "end", "take", "take", "take"]))
        if not live or (act == "begin" and len(live) < 6):
            key = data.draw(st.sampled_from([key for key in range(6) if key not in live]))
            prompt, answer = data.draw(st.sampled_from(prompts)), data.draw(TOKENS)
            salt = data.draw(st.sampled_from(["", "", "s"]))
            drafter.begin(key, 0, packed(prompt), packed(answer), salt=salt)
            naive.begin(key, prompt, answer, salt)
        elif act == "end":
            key = data.draw(st.sampled_from(live))
            drafter.end(key)
            naive.end(key)
        else:
            keys = tuple(data.draw(st.permutations(live)))
            runs = [data.draw(st.lists(st.integers(0, 2), max_size=5)) for _ in keys]
            drafter.take(keys, column([len(run) for run in runs]), np.array(list(chain(*runs)), np.int32))
            for key, run in zip(keys, runs, strict=True):
                naive.take(key, run)
        live = tuple(naive.streams)
        if live:
            most = data.draw(st.integers(0, path))
            assert ask(drafter, *live, most=most) == [naive.propose(key, most) for key in live]


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("at_once", [1, PAGE_TOKENS + 5, 3])
def test_a_long_text_is_found_across_pages(at_once):
    random = np.random.default_rng(1)
    text = random.integers(0, 4, 1500).tolist()
    drafter, naive = make(ExactNgram), NaiveNgram((8, 4, 2), PATH)
    drafter.begin(0, 0, packed(text[:700]), packed([]))
    naive.begin(0, text[:700], [])
    for at in range(700, 1500, at_once):
        feed(drafter, 0, text[at : at + at_once], at_once)
        naive.take(0, text[at : at + at_once])
        assert ask(drafter, 0) == [naive.propose(0, PATH)]


def test_answers_that_end_with_their_page_begin_together():
    """The longest answers that a page holds, and those that are a token longer or shorter."""
    random = np.random.default_rng(4)
    room = PAGE_TOKENS - (PATH + 7)
    drafter, naive = make(ExactNgram), NaiveNgram((8, 4, 2), PATH)
    keys = tuple(range(6))
    answers = [random.integers(0, 3, room + more).tolist() for more in (0, 1, -1, 0, 1 - room, -room)]
    prompts = [[1, 2, 3] if key % 2 else [4] for key in keys]
    drafter.begin_all(keys, keys, tuple(map(packed, prompts)), tuple(map(packed, answers)), ("",) * 6)
    for key in keys:
        naive.begin(key, prompts[key], answers[key])
    for _ in range(40):
        assert ask(drafter, *keys) == [naive.propose(key, PATH) for key in keys]
        tokens = random.integers(0, 3, len(keys))
        drafter.take(keys, column([1] * 6), tokens.astype(np.int32))
        for key in keys:
            naive.take(key, [int(tokens[key])])


def test_a_text_outlasts_its_sequences_where_it_is_kept():
    assert not make().outlasts
    assert make(keep_s=1.0).outlasts


def test_hashing_loses_next_to_nothing():
    """The tables as they are: what they say was there, and most of what was there is said."""
    random = np.random.default_rng(2)
    drafter, naive = make(limit_nbytes=4 << 20), NaiveNgram((8, 4, 2), PATH)
    for key in range(4):
        drafter.begin(key, 0, packed([1, 2, 3]), packed([]))
        naive.begin(key, [1, 2, 3], [])
    same = total = 0
    for _ in range(150):
        tokens = random.integers(0, 12, 4)
        drafter.take(tuple(range(4)), column([1] * 4), tokens.astype(np.int32))
        for key in range(4):
            naive.take(key, [int(tokens[key])])
        expected = [naive.propose(key, PATH) for key in range(4)]
        same += sum(path == other for path, other in zip(ask(drafter, 0, 1, 2, 3), expected, strict=True))
        total += 4
    assert same >= 0.98 * total


def test_tokens_of_siblings_are_found_and_no_others():
    drafter = make()
    text = list(range(100, 140))
    for key, prompt, salt in ((0, [5, 6], ""), (1, [5, 6], ""), (2, [5, 7], ""), (3, [5, 6], "other")):
        drafter.begin(key, 0, packed(prompt), packed([]), salt=salt)
    feed(drafter, 0, text)
    for key in (1, 2, 3):
        feed(drafter, key, text[:2])
    assert ask(drafter, 1, 2, 3) == [text[2:9], [], []]
    assert ask(drafter, 1, 1 + 1, most=3) == [text[2:5], []]


def test_the_first_token_of_an_answer_is_found_behind_the_prompt():
    drafter = make()
    drafter.begin(0, 0, packed([1, 2, 3]), packed(list(range(10, 30))))
    drafter.begin(1, 0, packed([1, 2, 3]), packed([]))
    assert ask(drafter, 1) == [list(range(10, 17))]


def test_one_token_repeated_100_000_times():
    drafter = make()
    drafter.begin(0, 0, packed([9]), packed([9] * 50_000))
    feed(drafter, 0, [9] * 50_000, at_once=100)
    assert ask(drafter, 0) == [[9] * PATH]
    assert drafter.stats().nbytes <= drafter.stats().limit_nbytes


def test_ids_up_to_the_greatest():
    top = 2**31 - 1
    text = [top, 0, top - 1, 1, top, 2**30] * 5
    drafter = make()
    drafter.begin(0, 0, packed([0]), packed(text))
    assert ask(drafter, 0) == [(text * 2)[:PATH]]


@pytest.mark.parametrize("keep_s", [0.0, 10.0])
def test_a_prompt_is_dropped_with_its_last_sequence_or_kept_for_a_while(keep_s):
    drafter = make(keep_s=keep_s)
    text = list(range(50, 90))

    def begin(key, now):
        drafter.begin(key, 0, packed([1, 2]), packed(text[:2]), now=now)
        return ask(drafter, key)[0]

    drafter.begin(0, 0, packed([1, 2]), packed(text), now=0.0)
    assert begin(1, 1.0) == text[2:9]
    drafter.end(0, now=2.0)
    assert begin(2, 3.0) == text[2:9], "a sibling lives"
    drafter.end(1, now=4.0)
    drafter.end(2, now=5.0)
    assert drafter.stats().prompts == (1 if keep_s else 0)
    assert begin(3, 14.0) == (text[2:9] if keep_s else [])
    drafter.end(3, now=15.0)
    assert begin(4, 25.0) == [], "it is over at this very second"
    drafter.end(4, now=26.0)
    drafter.begin(5, 0, packed([3]), packed([]), now=36.0)
    assert drafter.stats().prompts == 1


def test_keys_are_used_again():
    drafter = make()
    for turn in range(50):
        text = list(range(turn * 100, turn * 100 + 30))
        drafter.begin(7, 7, packed([1]), packed(text + text[:3]))
        assert ask(drafter, 7) == [text[3:10]]
        drafter.end(7)
    stats = drafter.stats()
    assert (stats.sequences, stats.prompts, drafter._pages.in_use) == (0, 0, 0)


@pytest.mark.ci
@pytest.mark.parametrize("keep_s", [0.0, 1e6])
def test_memory_stays_within_its_limit_and_recent_text_is_found(keep_s):
    drafter = make(limit_nbytes=1 << 18, keep_s=keep_s)
    random = np.random.default_rng(3)
    found = 0
    for number in range(2000):
        text = random.integers(0, 1 << 31, 40).tolist()
        drafter.begin(number, number, packed([number, 1]), packed(text + text[:3]), now=float(number))
        found += ask(drafter, number) == [text[3:10]]
        if number >= 5:
            drafter.end(number - 5, now=float(number))
        stats = drafter.stats()
        assert stats.nbytes <= stats.limit_nbytes
        assert stats.prompts <= max(6, 2 * drafter._pages.most)
    # the others were overwritten in the tables
    assert found >= 1950


def test_more_sequences_than_memory_get_paths_or_none():
    """Sequences that find no page are passed over; the others go on, and all can end."""
    drafter = make(limit_nbytes=1 << 16)
    text = list(range(20)) * 2
    for key in range(3000):
        drafter.begin(key, key, packed([key]), packed([]))
    for at in range(0, 40, 4):
        drafter.take(tuple(range(3000)), column([4] * 3000), np.array(text[at : at + 4] * 3000, np.int32))
    paths = ask(drafter, *range(3000))
    held = [path for path in paths if path]
    assert held
    assert all(path == text[:PATH] for path in held)
    feed(drafter, 0, list(range(5000)), at_once=500)
    for key in range(3000):
        drafter.end(key)
    assert drafter.stats().sequences == 0
    assert drafter._pages.in_use == 0
    assert drafter.stats().nbytes <= drafter.stats().limit_nbytes
    drafter.begin(1, 1, packed([1]), packed(text))
    assert ask(drafter, 1) == [text[:PATH]]


def test_a_prompt_larger_than_the_memory_keeps_its_end():
    drafter = make(limit_nbytes=1 << 17)
    text = np.random.default_rng(4).integers(0, 1 << 31, 200_000).tolist()
    drafter.begin(0, 0, packed(text), packed(text[-100:-90]))
    assert ask(drafter, 0) == [text[-90:-83]]
    assert drafter.stats().nbytes <= drafter.stats().limit_nbytes


def test_settings_that_cannot_be_are_refused():
    for orders in ((2, 4), (3, 3)):
        with pytest.raises(ConfigError, match="orders"):
            make(orders=orders)
    with pytest.raises(ConfigError, match="too long"):
        make(path=200)
    for wrong in ({"orders": []}, {"orders": [9]}, {"keep_s": -1.0}, {"limit_nbytes": 10}, {"order": [2]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, NgramConfig)
