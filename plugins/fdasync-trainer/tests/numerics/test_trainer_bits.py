"""A trainer's forward pass with fixed numerics has the rollout's bits, whatever its batch; all is undone after it."""

from __future__ import annotations

import pytest
import torch
from common_families import SERVED
from fdasync_trainer import fixed_numerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from rollout_bits import batch_of, drawn, rollout_logits, served_in
from structures import in_turn

LENGTHS = (75, 20, 3)
QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "phimoe")
PLACES = ("left", "right", "packed")


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn(SERVED, QUICK))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_real_token_has_the_rollouts_logits(family: str, dtype: torch.dtype) -> None:
    sequences = drawn(LENGTHS)
    wanted = rollout_logits(served_in(make_tiny_model(family), dtype), sequences)
    model = served_in(make_tiny_model(family), dtype)
    if family != "phimoe":  # which samples experts in training
        model.train()
    with fixed_numerics(model):
        for layout in PLACES:
            arguments, real = batch_of(sequences, layout)
            logits = model(**arguments).logits.flatten(0, 1)[real]
            assert torch.equal(logits, wanted), layout


def test_without_it_the_bits_are_others_and_with_the_context_closed_they_are_so_again() -> None:
    sequences = drawn(LENGTHS)
    wanted = rollout_logits(make_tiny_model("qwen3_moe"), sequences)
    model = make_tiny_model("qwen3_moe")
    arguments, real = batch_of(sequences, "right")
    with torch.no_grad():
        before = model(**arguments).logits
        with fixed_numerics(model):
            within = model(**arguments).logits
        after = model(**arguments).logits
    assert torch.equal(within.flatten(0, 1)[real], wanted)
    assert not torch.equal(before.flatten(0, 1)[real], wanted)
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "deepseek_v2"])
def test_nothing_is_left_on_the_model(family: str) -> None:
    model = make_tiny_model(family)
    model.set_attn_implementation("eager")

    def state() -> list[object]:
        parts = [
            (type(part), part.training, sorted(vars(part)), len(part._forward_pre_hooks), len(part._forward_hooks))
            for part in model.modules()
        ]
        flags = [getattr(part, "attn_temperature_tuning", None) for part in model.modules()]
        return [parts, flags, model.config._attn_implementation, model.config._experts_implementation]

    model.model.layers[1].train()
    before = state()
    numerics = fixed_numerics(model).apply()
    assert numerics.is_open
    assert state() != before
    numerics.undo()
    numerics.undo()
    assert not numerics.is_open
    assert state() == before
    with pytest.raises(ZeroDivisionError), numerics:
        raise ZeroDivisionError
    assert state() == before


def test_micro_batches_and_the_decoder_alone_have_the_same_bits() -> None:
    sequences = drawn((40, 17, 9))
    model = make_tiny_model("qwen3_moe")
    with torch.no_grad(), fixed_numerics(model):
        arguments, real = batch_of(sequences, "left")
        whole = model(**arguments).logits.flatten(0, 1)[real]
        alone = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
        embedded = model(inputs_embeds=model.get_input_embeddings()(sequences[0][None])).logits[0]
        hidden = model(**arguments, output_hidden_states=True).hidden_states[-1]
        decoder = model.model(arguments["input_ids"], attention_mask=arguments["attention_mask"]).last_hidden_state
    assert torch.equal(whole, alone)
    assert torch.equal(whole[:40], embedded)
    assert torch.equal(hidden, decoder)


def test_padding_changes_no_bit_and_a_batch_of_it_alone_passes() -> None:
    model = make_tiny_model("gpt_oss")
    arguments, real = batch_of(drawn((30, 12)), "left")
    with torch.no_grad(), fixed_numerics(model):
        first = model(**arguments).logits.flatten(0, 1)[real]
        other = {**arguments, "input_ids": torch.where(arguments["attention_mask"] == 1, arguments["input_ids"], 7)}
        assert torch.equal(first, model(**other).logits.flatten(0, 1)[real])
        nothing = {**arguments, "attention_mask": torch.zeros_like(arguments["attention_mask"])}
        assert model(**nothing).logits.isfinite().all()


def test_losses_of_the_library_are_computed_from_these_logits() -> None:
    model = make_tiny_model("mixtral").train()
    arguments, _ = batch_of(drawn((30, 12)), "left")
    labels = arguments["input_ids"].masked_fill(arguments["attention_mask"] == 0, -100)
    with fixed_numerics(model):
        logits = model(**arguments).logits
        output = model(**arguments, labels=labels, output_router_logits=True)
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    aux = model.router_aux_loss_coef * output.aux_loss
    assert output.aux_loss > 0
    assert torch.allclose(output.loss, wanted + aux)
    assert torch.equal(output.logits, logits)


def test_opening_it_runs_the_model_once_and_draws_nothing() -> None:
    model = make_tiny_model("phimoe").train()
    calls: list[object] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    numerics = fixed_numerics(model)
    for _ in range(3):
        with numerics:
            pass
    assert len(calls) == 1
    assert torch.equal(state, torch.get_rng_state())


def test_the_whole_of_llama4_is_mended_as_its_text_half_is() -> None:
    sequences = drawn((40, 9))
    whole, text = make_tiny_model("llama4"), make_tiny_model("llama4_text")
    text.load_state_dict(
        {
            name.replace("language_model.model.", "model.")
            .replace("model.language_model.", "model.")
            .replace("language_model.lm_head", "lm_head"): tensor
            for name, tensor in whole.state_dict().items()
            if "vision" not in name and "projector" not in name
        }
    )
    wanted = rollout_logits(text, sequences)
    arguments, real = batch_of(sequences, "left")
    with torch.no_grad(), fixed_numerics(whole):
        assert torch.equal(whole(**arguments).logits.flatten(0, 1)[real], wanted)
