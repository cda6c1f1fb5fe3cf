"""What stands behind the output layers of families, and log-probs through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_trainer.numerics.logprobs import logprobs
from fdasync_transformers.fixed.finish import finish_of
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.sampling.token_logprobs import token_logprobs
from fdasync_transformers.tiny.checkpoints import make_tiny_model

from fdasync.errors import BadInput

# scales, soft caps, a bias of the output layer, a part of a larger model, nothing
FAMILIES = {"granitemoe": True, "cohere2_moe": True, "inkling2_text": True, "phimoe": False, "qwen3_5_moe": False,
            "qwen3_moe": False}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_through_a_familys_own_code_are_those_of_its_logits(family: str) -> None:
    model: Any = make_tiny_model(family)
    head, kept = model.get_output_embeddings(), []
    own = head.forward

    def in_order(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(hidden)
        with FixedNumerics():
            result: torch.Tensor = own(hidden)
        return result

    head.forward = in_order
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    finish = finish_of(model)
    assert (finish is not None) == FAMILIES[family]
    targets = ids.roll(-1)
    found = logprobs(kept[0], head, targets, finish=finish, temperature=0.8)
    assert torch.equal(found[0], token_logprobs(logits[0], targets[0], temperature=0.8))
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_gradients_go_through_it() -> None:
    model: Any = make_tiny_model("inkling2_text")
    head, finish = model.get_output_embeddings(), finish_of(model)
    assert finish is not None
    hidden = torch.randn(6, head.weight.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.arange(6)
    logprobs(hidden, head, targets, finish=finish, chunk_tokens=2).sum().backward()
    mine, hidden.grad = hidden.grad, None
    torch.log_softmax(finish(head(hidden)), -1)[targets, targets].sum().backward()
    assert mine is not None
    assert torch.allclose(mine, hidden.grad, rtol=1e-4, atol=1e-6)


def test_a_model_that_hides_its_decoder_is_refused() -> None:
    with pytest.raises(BadInput, match="side by side"):
        finish_of(make_tiny_model("llama4"))
