"""Identities of prompts, whether they are remembered or hashed."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from fdasync_fleet.router.blocks import prompt_keys as room
from fdasync_fleet.router.blocks.prompt_keys import PromptKeys

from fdasync.cache.identity import block_keys, root_key
from fdasync.testing.sim.loop import run_sim

NAMESPACE = b"n" * 16


def of(prompt_keys, prompt, size=4, salt="", namespace=NAMESPACE):
    return run_sim(prompt_keys.of(namespace, salt, array("i", prompt).tobytes(), size))


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_has_the_identities_that_instances_give_it(seed):
    rng = Random(seed)
    prompt_keys = PromptKeys()
    prompts = [[rng.randrange(9) for _ in range(rng.randrange(1, 400))] for _ in range(3)]
    for _ in range(40):
        prompt = rng.choice(prompts)[: rng.randrange(1, 400)] + [rng.randrange(9)] * rng.randrange(100)
        size, salt, namespace = rng.choice((1, 4, 16)), rng.choice(("", "tenant")), rng.choice((NAMESPACE, b"o" * 16))
        assert list(of(prompt_keys, prompt, size, salt, namespace)) == block_keys(
            root_key(namespace, salt.encode()), prompt, size
        )


def test_what_is_shared_is_hashed_once(monkeypatch):
    hashed = []
    real = room.packed_block_keys

    def packed_block_keys(root, tokens, block_tokens):
        hashed.append(len(tokens) // 4 // block_tokens)
        return real(root, tokens, block_tokens)

    monkeypatch.setattr(room, "packed_block_keys", packed_block_keys)
    prompt_keys = PromptKeys()
    # 40 blocks: two runs of 16, and 8
    prompt = list(range(160))
    first = of(prompt_keys, prompt)
    assert of(prompt_keys, prompt) == first
    assert hashed == [16, 16, 8]
    of(prompt_keys, [*prompt, *range(64)])
    assert hashed[3:] == [16, 8]


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(room, "_MAX_RUNS", 3)
    prompt_keys = PromptKeys()
    for number in range(10):
        of(prompt_keys, [number] * 64)
        of(prompt_keys, [77] * 64)
    assert len(prompt_keys._runs) == 3
    assert any(array("i", tokens)[0] == 77 for _, tokens in prompt_keys._runs)
