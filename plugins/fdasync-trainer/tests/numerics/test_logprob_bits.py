"""Log-probs of hidden states have the bits of the whole model's logits, whatever the chunks, within the context and
outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.logprobs import logprobs, logprobs_of_logits
from fdasync_transformers.fixed.finish import finish_of
from fdasync_transformers.model.head import decoder_of
from fdasync_transformers.sampling.token_logprobs import token_logprobs
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from logprob_cases import bits
from replay_helpers import checkpointed
from rollout_bits import batch_of, drawn, rollout_logits, served_in

CHUNKS = (1, 2, 15, 17, 1024)
# wide, with a bias, with a scale or a cap behind the head
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"hidden_size": 384}),
    ("phimoe", {"lm_head_bias": True}),
    ("cohere2_moe", {}),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_log_probs_of_hidden_states_are_those_of_the_models_logits(
    family: str, changes: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    model: Any = served_in(make_tiny_model(family, **changes), dtype).to(device)
    if changes.get("lm_head_bias"):
        torch.nn.init.normal_(model.lm_head.bias)
    arguments, _ = batch_of(drawn((37, 20, 1)), "right")
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    ids, real = arguments["input_ids"][:, 1:], arguments["attention_mask"][:, 1:].bool()
    decoder, finish = decoder_of(model), finish_of(model)
    assert decoder is not None

    def found(chunk_tokens: int) -> list[int]:
        values = logprobs(hidden[:, :-1], model.lm_head, ids, finish=finish, chunk_tokens=chunk_tokens)
        return bits(values[real])

    with torch.no_grad():
        with fixed_numerics(model):
            # before the model's forward pass, and behind it
            hidden = decoder(**arguments).last_hidden_state
            early = {chunk_tokens: found(chunk_tokens) for chunk_tokens in CHUNKS}
            wanted = bits(logprobs_of_logits(model(**arguments).logits[:, :-1], ids)[real])
            late = {chunk_tokens: found(chunk_tokens) for chunk_tokens in CHUNKS}
        outside = {chunk_tokens: found(chunk_tokens) for chunk_tokens in CHUNKS}
    assert early == late == outside == dict.fromkeys(CHUNKS, wanted)


def test_they_are_the_rollouts_under_checkpointing_too() -> None:
    """With gradients; they flow through the decoder."""
    (tokens,) = drawn((40,))
    wanted = token_logprobs(rollout_logits(make_tiny_model("qwen3_moe"), [tokens])[:-1], tokens[1:])
    model: Any = make_tiny_model("qwen3_moe").train()
    gradients = []
    for chunk_tokens in (2, 1024):
        checkpointed(model)
        model.zero_grad()
        with fixed_numerics(model):
            hidden = model.model(tokens[None]).last_hidden_state
            values = logprobs(hidden[:, :-1], model.lm_head, tokens[None, 1:], chunk_tokens=chunk_tokens)
            values.sum().backward()
        assert bits(values[0]) == bits(wanted)
        gradients.append([one.grad for one in model.parameters() if one.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
