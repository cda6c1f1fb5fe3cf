"""A request that goes from instance to instance goes on with drafts."""

from __future__ import annotations

import pytest

from fdasync import Instance, Router
from fdasync.testing import check_sample, oracle_of
from tests.engine.test_speculation_control import KINDS, PARAMS, config, drafter
from tests.engine.updates import PROMPT


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
async def test_a_hand_over_goes_on_with_drafts(kind, tmp_path):
    """The decode side drafts from the first token of its own on; the prefill side has nothing to draft."""
    prefill = config(role="prefill", host_blocks=32)
    decode = config(role="decode", host_blocks=32)
    names = [f"ipc://{tmp_path}/{name}" for name in ("decode", "prefill")]
    async with (
        Instance(decode, listen=names[0], drafter=drafter(kind, decode)) as there,
        Instance(prefill, listen=names[1], peers=names[:1], drafter=drafter(kind, prefill)) as here,
        Router(names) as router,
    ):
        result = await router.complete(PROMPT, PARAMS)
        assert [sample.finish_reason for sample in result.samples] == ["length", "length"]
        for sample in result.samples:
            check_sample(sample, PROMPT, PARAMS, oracle_of(decode))
            assert sample.drafts.steps <= 39
        drafted = sum(sample.drafts.drafted for sample in result.samples)
        assert drafted == there.engine.stats().scheduler.drafted_tokens
        assert there.engine.stats().scheduler.drafted_tokens
        assert here.engine.stats().scheduler.drafted_tokens == 0
        there.engine.check()
        here.engine.check()
