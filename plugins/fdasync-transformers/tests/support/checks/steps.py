"""A family in steps of a runner: tokens are those of `generate`, rows those of the routers, aux data the library's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from aux_reference import assert_weights, chosen, plain, routers_of, watched
from common_families import INDEXED, SERVED
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE as VOCAB
from step_driver import Driver
from structures import parted

if TYPE_CHECKING:
    from made import Made

PLAYED = parted([*SERVED, *INDEXED])
RECORDED = parted(
    [family for family in SERVED if family != "qwen3_dense"],
    also=("hunyuan_v1_moe",),
    ahead=("qwen3_moe", "longcat_flash"),
)
BOTH = ["routing_weights", "layer_norms"]


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, VOCAB, length).tolist() for length in lengths]


def generated(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


def selections(model: Any, tokens: list[int]) -> list[np.ndarray]:
    """Per MoE layer, the ids [n, k] that the routers return in one plain forward pass."""
    found: list[np.ndarray] = []

    def note(module: Any, args: Any, output: Any) -> None:
        ids = output[-1] if not output[-1].is_floating_point() else output[1].topk(module.top_k, dim=1).indices
        found.append(np.sort(ids.numpy(), axis=-1))

    hooks = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and hasattr(model.get_submodule(name.rpartition(".")[0]), "experts"):
            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


async def paged_steps_equal_generate(made: Made) -> None:
    model, driver = made.model(), await Driver.open(made.folder())
    asked = prompts(5, 17, 40)
    wanted = [generated(model, prompt, 16) for prompt in asked]
    # whole prompts at once; then in three chunks, joining while others decode
    whole = [driver.sequence(prompt, 16) for prompt in asked]
    await driver.run(whole)
    assert [seq.tokens for seq in whole] == wanted
    chunked = [driver.sequence(prompt, 16, arrival=2 * number) for number, prompt in enumerate(asked)]
    await driver.run(chunked, chunks=3)
    assert [seq.tokens for seq in chunked] == wanted
    if made.family != "qwen3_dense":
        for seq in (*whole, *chunked):
            check_rows(driver, seq, selections(model, (seq.prompt + seq.tokens)[:-1]))
    await driver.close()


def check_rows(driver: Driver, seq: Any, wanted: list[np.ndarray]) -> None:
    capacity = driver.capacity
    rows = driver.rows(seq)
    assert rows.dtype == np.uint8
    assert rows.shape == (len(seq.prompt) + len(seq.tokens) - 1, len(capacity.moe_layer_ids), capacity.top_k)
    assert len(wanted) == len(capacity.moe_layer_ids)
    for layer, ids in enumerate(wanted):
        k = (capacity.top_k_by_layer or (capacity.top_k,) * len(wanted))[layer]
        assert np.array_equal(np.sort(rows[:, layer, :k], axis=-1), ids)
        assert not rows[:, layer, k:].any()


def top_k_of(driver: Driver) -> list[int]:
    capacity = driver.capacity
    return list(capacity.top_k_by_layer or (capacity.top_k,) * len(capacity.moe_layer_ids))


async def weights_and_norms_are_the_librarys(made: Made) -> None:
    """Bit by bit what its routers returned in the same pass, and what a plain pass of the whole sequence gives."""
    model = made.model()
    driver = await Driver.open(made.folder(), config={"self_check": False, "aux": BOTH})
    specs = {spec.name: spec for spec in driver.capacity.aux_specs}
    assert list(specs) == ["routing", *BOTH]
    assert specs["routing_weights"].shape == specs["routing"].shape
    top_k = top_k_of(driver)
    one = driver.sequence([5, 99, 3, 7, 8, 21, 40], 5)
    with watched(routers_of(driver.runner.opened.model.step_model.model)) as seen:  # type: ignore[union-attr]
        await driver.run([one])
    ids, weights, norms = (driver.rows(one, name) for name in ("routing", *BOTH))
    for layer, (calls, k) in enumerate(zip(seen, top_k, strict=True)):
        pairs = [chosen(output, k) for output in calls]
        assert np.array_equal(ids[:, layer, :k], torch.cat([found for found, _ in pairs]).numpy())
        exact = torch.cat([found for _, found in pairs]).to(torch.float16).numpy()
        assert np.array_equal(weights[:, layer, :k], exact)
        assert exact.any()
    tokens = (one.prompt + one.tokens)[:-1]
    plain_ids, plain_weights, plain_norms = plain(model, tokens, top_k)
    assert_weights(weights, ids, plain_ids, plain_weights)
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, plain_norms, rtol=1e-4)
    await driver.close()
