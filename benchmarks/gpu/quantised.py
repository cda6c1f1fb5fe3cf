"""A model whose experts stay as stored on a GPU, against the same one in bfloat16: speed, memory, and rows.

    python -m benchmarks gpu_quantised [--pairs 10] [--linears] [--json FILE] [--tiny]

24 of 48 layers of Qwen3-30B-A3B's shape, every width as published, in FP8 in blocks of 128 x 128, so that both models
fit 80 GB beside their KV. Weights are drawn on the device from one seed: the stored model's experts are those of the
other one, quantised by the published recipe. 64 contexts of 1,024 tokens, blocks of 16, greedy, routing recorded, two
steps in flight; steps are driven by hand as `gpu_serving` does. Both models are in memory, and stretches of decode take
turns.

`decode_tokens_per_s_64_bf16`, `_stored`; `stored_over_bf16_64`: the ratio of medians of stretches, with a bootstrap
95 % interval in the conditions. `prefill_tokens_per_s_bf16`, `_stored`, `prefill_stored_over_bf16`: steps of 8 prompts.
`weights_gb_bf16`, `_stored`.

Then the plain model gets what the stored values stand for, in place, and both play the same random tokens in paged
steps (64 sequences: chunks of 32, then 8 tokens one by one). `rows`, `differing_rows`: sets of experts, of all layers.
`positions`, `equal_logits`: those whose logits have the same bits; `equal_logits_drawn`: before that, where quantising
has changed the values.

`--linears`: the stored model's linear layers stay in FP8 too, whose products have sums of another order than the
library's: rows and logits may then differ, and the figures say how many do.

The exit status is 1 where a row differs without `--linears`. Needs a CUDA GPU with 80 GB; `--tiny` rehearses it in
Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.gpu.options import begin, parser_of
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from benchmarks.lib.arguments import at_least_one

if TYPE_CHECKING:
    import argparse

    from benchmarks.lib.parts import Parts

_LAYERS = 24
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_AIMS = {"stored_over_bf16_64": 1.4}
# sequences, tokens of their chunk, and tokens one by one, of the comparison
_PLAYED, _PLAYED_TINY = (64, 32, 8), (2, 3, 1)


def scales_of(args: argparse.Namespace) -> dict[str, Scale]:
    """The plain model's and the stored one's."""
    if args.tiny:
        scale = tiny()
        # a block of FP8
        config = scale.config | {"moe_intermediate_size": 128}
    else:
        scale = dataclasses.replace(large(DEFAULT_MODEL), sizes=(64,), pairs=args.pairs)
        config = MODELS[DEFAULT_MODEL].shape.cut(_LAYERS)
    stored = "stored_linears" if args.linears else "stored"

    def model(weights: str, **further: Any) -> Scale:
        runner = {"experts": "fused", "quantised_weights": weights}
        whole = {**config, **further, "torch_dtype": "bfloat16"}
        return dataclasses.replace(scale, config=whole, runner=runner, dtype="bfloat16")

    return {"bf16": model("dequantised"), "stored": model(stored, quantization_config=_FP8)}


async def measure(parts: Parts, scales: dict[str, Scale], folder: Path, linears: bool) -> None:
    """All figures; both models at once."""
    from benchmarks.gpu.decode import Way, add_ratio, opened, turns
    from benchmarks.gpu.kept import agreement, dequantise_into

    report = parts.report
    async with AsyncExitStack() as stack:
        rigs = {}
        for name, scale in scales.items():
            own = folder / name
            own.mkdir()
            rigs[name] = rig = await stack.enter_async_context(
                opened(parts, scale, write_folder(own, scale), suffix=f"_{name}")
            )
            report.conditions[f"notes_{name}"] = list(rig.capacity.notes)
            held = sum(tensor.nbytes for tensor in rig.step_model.model.state_dict().values())
            report.add(f"weights_gb_{name}", [held / 1e9])
        bf16, stored = (report.figures.get(f"prefill_tokens_per_s_{name}") for name in rigs)
        if bf16 and stored:
            report.add("prefill_stored_over_bf16", [stored / bf16])
        ways = {name: Way(rig.arms["on"]) for name, rig in rigs.items()}
        for count in reversed(scales["bf16"].sizes):
            rates = await turns(ways, count, scales["bf16"].pairs)
            for name, values in rates.items():
                report.add(f"decode_tokens_per_s_{count}_{name}", values)
            add_ratio(report, f"stored_over_bf16_{count}", rates["stored"], rates["bf16"])
            parts.save()
        played = _PLAYED_TINY if scales["bf16"].device == "cpu" else _PLAYED
        report.add("equal_logits_drawn", [agreement(rigs["bf16"], rigs["stored"], *played).equal_logits])
        dequantise_into(rigs["bf16"], rigs["stored"])
        found = agreement(rigs["bf16"], rigs["stored"], *played)
        for name, value in dataclasses.asdict(found).items():
            report.add(name, [value])
        if found.differing_rows and not linears:
            raise AssertionError(f"{found.differing_rows} of {found.rows} rows name other experts")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=at_least_one, default=10, help="stretches of each model")
    parser.add_argument("--linears", action="store_true", help="linear layers stay as stored too (FP8)")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    scales = scales_of(args)
    facts = {"linears": args.linears, "pairs": scales["bf16"].pairs, **scales["bf16"].facts}
    parts = begin("Experts that stay as stored", args, _AIMS, **facts)
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(parts.run("measure", measure, parts, scales, Path(name), args.linears))
    return parts.finish()
