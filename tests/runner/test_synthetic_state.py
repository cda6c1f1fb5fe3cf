"""The recurrence of the synthetic model, against the one line that says what it is."""

from __future__ import annotations

import numpy as np
import pytest

from fdasync.runner.synthetic.oracle import U64, Oracle, SyntheticConfig, mix

WORDS = 3


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(SyntheticConfig(state_words=WORDS))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 1 << 64, shape, dtype=np.uint64)


def test_states_are_a_s_plus_w(oracle):
    words, state = drawn(300), drawn(WORDS)
    factors = [int(word) | 1 for word in mix(np.arange(WORDS, dtype=U64))]
    found = oracle.states(words, state)
    now = state.tolist()
    for row, word in zip(found.tolist(), words.tolist(), strict=True):
        now = [(factor * one + word) % (1 << 64) for factor, one in zip(factors, now, strict=True)]
        assert row == now


def test_a_run_in_pieces_is_the_whole_run(oracle):
    words, state = drawn(40), drawn(WORDS)
    whole = oracle.states(words, state)
    first = oracle.states(words[:13], state)
    assert np.array_equal(np.concatenate([first, oracle.states(words[13:], first[-1])]), whole)


@pytest.mark.parametrize("bit", [0, 1, 31, 63])
@pytest.mark.parametrize("word", range(WORDS))
def test_every_bit_of_a_state_counts(oracle, word, bit):
    state = drawn(1, WORDS)
    other = state.copy()
    other[0, word] ^= U64(1 << bit)
    assert oracle.folded(state) != oracle.folded(other)
    # and is still there many tokens later
    words = drawn(100)
    assert (oracle.states(words, state[0])[-1] != oracle.states(words, other[0])[-1]).any()


def test_the_order_of_tokens_counts(oracle):
    words = drawn(2)
    state = np.zeros(WORDS, U64)
    assert (oracle.states(words, state)[-1] != oracle.states(words[::-1], state)[-1]).all()
