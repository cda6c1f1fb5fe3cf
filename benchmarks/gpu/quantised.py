"""A model whose experts stay as stored on a GPU, against the same one in bfloat16: speed, memory, rows and log-probs.

    python -m benchmarks gpu_quantised [--model qwen3-30b-a3b] [--layers N] [--sizes 64] [--pairs 10] [--seconds 0.5]
                                       [--linears] [--json FILE] [--tiny]

`qwen3-30b-a3b`: FP8 in blocks of 128 x 128, 24 of 48 layers unless `--layers` says otherwise, so that both models fit
80 GB beside their KV. `gpt-oss-120b`: MXFP4, 6 of 36 layers. Every width is as published. Weights are drawn on the
device from one seed: the stored model's experts are those of the other one, quantised by the published recipe.
Contexts of 1,024 tokens, blocks of 16, greedy, routing recorded, two steps in flight; steps are driven by hand as
`gpu_serving` does. Both models are in memory, and stretches of decode take turns.

`decode_tokens_per_s_N_bf16`, `_stored`; `stored_over_bf16_N`: the ratio of medians of stretches, with a bootstrap 95 %
interval in the conditions; the aim at 64 of the default model is 1.4. `prefill_tokens_per_s_bf16`, `_stored`,
`prefill_stored_over_bf16`: steps of 8 prompts. `weights_gb_bf16`, `_stored`. `floor_share_N_stored`: the time that a
step's bytes take at the rate of a large copy, over the step; the experts that are expected where routing is uniform.

Then the plain model gets what the stored values stand for, in place, and both play the same random tokens in paged
steps (64 sequences: chunks of 32, then 8 tokens one by one). `rows`, `differing_rows`: sets of experts, of all layers.
`positions`, `equal_logits`: those whose logits have the same bits. `kl`: of the dequantised model's distributions from
the stored one's, in nats; `worst_logprob`: the largest difference of a log-prob above 1e-6. `kl_from_bf16`,
`differing_rows_from_bf16`: the same against the drawn weights before that, which says what quantising costs a model of
random weights, and nothing of a trained one.

`--linears`: the stored model's linear layers stay in FP8 too, whose products have sums of another order than the
library's: rows and log-probs may then differ, and the figures say by how much. `q_proj_us_N_bf16`, `_stored`,
`o_proj_us_N_...`: one product of N rows, of all layers in turns.

The exit status is 1 where a row differs without `--linears`. Needs a CUDA GPU with 80 GB; `--tiny` rehearses it in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.scale import Scale, write_folder
from benchmarks.gpu.serving import Run
from benchmarks.lib.published_shapes import SHAPES
from benchmarks.lib.published_shapes import tiny as small_config

if TYPE_CHECKING:
    import asyncio

    from benchmarks.gpu.model import Rig

#: layers that are kept unless others are asked for, and what the checkpoint says of its quantisation
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3-30B-A3B",
        24,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "gpt-oss-120b": ("gpt-oss-120b", 6, SHAPES["gpt-oss-120b"].quantised),
}
_DEFAULT = "qwen3-30b-a3b"
_AIM = 1.4
_ARMS = ("bf16", "stored")
# rows of the products that are timed by themselves
_PRODUCTS = (1, 16, 64, 128, 256, 512)
# sequences, tokens of their chunk, and tokens one by one, of the comparison
_PLAYED, _PLAYED_TINY = (64, 32, 8), (2, 3, 1)


@dataclasses.dataclass(frozen=True)
class Half(Scale):
    """Of one of both models.

    Attributes:
        weights: the runner's choice.
    """

    weights: str = "dequantised"

    def runner_config(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        return super().runner_config(sizes) | {"experts": "fused", "quantised_weights": self.weights}


def scales_of(args: argparse.Namespace) -> tuple[Half, Half]:
    """The plain model's and the stored one's."""
    name, layers, quantisation = MODELS[args.model]
    shape = SHAPES[name]
    config = shape.cut(args.layers or (shape.least_layers if args.tiny else layers))
    common: dict[str, Any] = {"model": args.model, "pairs": args.pairs, "seconds": args.seconds}
    if args.tiny:
        config = small_config(config)
        # a block of FP8
        config |= {"moe_intermediate_size": 128, "num_experts": 8} if args.model == _DEFAULT else {}
        common |= {"device": "cpu", "block_tokens": 8, "context": 16, "most_steps": 12, "prefill_prompts": 1}
        common |= {"pairs": 1, "seconds": 0.0, "lead": 1, "trial": 2, "copy_nbytes": 1 << 20}
    config |= {"torch_dtype": "bfloat16"}
    sizes = (1, 2) if args.tiny else tuple(sorted({int(size) for size in args.sizes.split(",")}))
    common |= {"sizes": sizes}
    plain = Half(config=config, **common)
    weights = "stored_linears" if args.linears else "stored"
    return plain, Half(config=config | {"quantization_config": quantisation}, weights=weights, **common)


async def measure(run: Run, scales: tuple[Half, Half], folders: tuple[str, str], played: tuple[int, int, int]) -> None:
    """All figures; both models at once."""
    from benchmarks.gpu import decode
    from benchmarks.gpu.kept import agreement, dequantise_into, product_us
    from benchmarks.gpu.model import Rig

    report = run.report
    rigs: dict[str, Rig] = {}
    try:
        for arm, scale, folder in zip(_ARMS, scales, folders, strict=True):
            rigs[arm] = rig = await Rig.open(scale, folder, ("on",), run.say)
            report.conditions[f"notes_{arm}"] = list(rig.capacity.notes)
            held = sum(tensor.nbytes for tensor in rig.step_model.model.state_dict().values())
            report.add(f"weights_gb_{arm}", [held / 1e9])
        await _prefill(run, rigs)
        gc.collect()
        gc.freeze()
        rate = decode.copy_bytes_per_s(rigs["stored"].device, scales[0].copy_nbytes)
        report.add("copy_gbps", [rate / 1e9])
        for count in reversed(scales[0].sizes):
            await _decode(run, rigs, count, rate)
            run.save()
        if scales[1].weights == "stored_linears" and rigs["stored"].device.type == "cuda":
            for name in ("q_proj", "o_proj"):
                for count in _PRODUCTS:
                    for arm, took in zip(_ARMS, product_us(rigs["bf16"], rigs["stored"], name, count), strict=True):
                        report.add(f"{name}_us_{count}_{arm}", [took])
        bf16 = agreement(rigs["bf16"], rigs["stored"], *played)
        report.add("kl_from_bf16", [bf16.kl])
        report.add("differing_rows_from_bf16", [bf16.differing_rows])
        dequantise_into(rigs["bf16"].step_model.model, rigs["stored"].step_model.model)
        if rigs["bf16"].device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        found = agreement(rigs["bf16"], rigs["stored"], *played)
        for name, value in dataclasses.asdict(found).items():
            report.add(name, [value])
        if found.differing_rows and scales[1].weights == "stored":
            raise AssertionError(f"{found.differing_rows} of {found.rows} rows name other experts")
    finally:
        gc.unfreeze()
        for rig in rigs.values():
            await rig.close()


async def _prefill(run: Run, rigs: dict[str, Rig]) -> None:
    """Prefill all sequences of both, each timed alone; the first two steps warm up."""
    from benchmarks.gpu.decode import add_ratio

    rates: dict[str, list[float]] = {}
    for arm, rig in rigs.items():
        scale, on = rig.scale, rig.arms["on"]
        on.select()
        flights: deque[asyncio.Future[Any]] = deque()
        ends: list[tuple[float, int]] = []
        for first in range(0, scale.sizes[-1], scale.prefill_prompts):
            if len(flights) == 2:
                await flights.popleft()
                ends.append((time.perf_counter(), scale.prefill_prompts))
            flights.append(on.prefill(range(first, min(first + scale.prefill_prompts, scale.sizes[-1])), 0))
        while flights:
            await flights.popleft()
            ends.append((time.perf_counter(), scale.prefill_prompts))
        if len(ends) > 3:
            prompts = sum(count for _, count in ends[2:])
            rates[arm] = [prompts * scale.context / (ends[-1][0] - ends[1][0])]
            run.report.add(f"prefill_tokens_per_s_{arm}", rates[arm])
    if rates:
        add_ratio(run.report, "prefill_stored_over_bf16", rates["stored"], rates["bf16"])


async def _decode(run: Run, rigs: dict[str, Rig], count: int, rate: float) -> None:
    """Stretches of both in turns at so many sequences."""
    from benchmarks.gpu.decode import add_ratio, stretch

    scale, report = run.scale, run.report
    steps = {}
    for arm, rig in rigs.items():
        await rig.arms["on"].shrink(count)
        await stretch(rig.arms["on"], 2, scale.lead, scale.trial)
        took = await stretch(rig.arms["on"], 2, scale.lead, scale.trial)
        most = scale.most_steps - scale.lead - 1
        steps[arm] = min(most, max(scale.trial, round(scale.seconds * scale.trial / max(took, 1e-9))))
    rates: dict[str, list[float]] = {arm: [] for arm in rigs}
    for turn in range(scale.pairs):
        for arm in rigs if turn % 2 == 0 else reversed(list(rigs)):
            took = await stretch(rigs[arm].arms["on"], 2, scale.lead, steps[arm])
            rates[arm].append(count * steps[arm] / took)
    for arm, values in rates.items():
        report.add(f"decode_tokens_per_s_{count}_{arm}", values)
        step_s = count / sorted(values)[len(values) // 2]
        report.add(f"floor_share_{count}_{arm}", [rigs[arm].bytes.step(count, scale.context) / rate / step_s])
    aim = _AIM if (count, scale.model, scale.device) == (64, _DEFAULT, "cuda") else None
    add_ratio(report, f"stored_over_bf16_{count}", rates["stored"], rates["bf16"], aim)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, as they come")
    parser.add_argument("--model", choices=sorted(MODELS), default=_DEFAULT, help=f"(default {_DEFAULT})")
    parser.add_argument("--layers", type=int, help="that are kept")
    parser.add_argument("--sizes", metavar="N,N", default="64", help="running sequences (default 64)")
    parser.add_argument("--pairs", type=int, default=10, help="stretches of each model (default 10)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one stretch (default 0.5)")
    parser.add_argument("--linears", action="store_true", help="linear layers stay as stored too (FP8)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import transformers

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA GPU, and torch sees none here; --tiny rehearses it on a CPU")
    scales = scales_of(args)
    run = Run(scales[0], set(), args.json)
    run.report.title = "Experts that stay as stored"
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": args.model,
        "layers": scales[0].config["num_hidden_layers"],
        "sizes": scales[0].sizes,
        "context": scales[0].context,
        "pairs": scales[0].pairs,
        "quantised_weights": scales[1].weights,
    }
    if args.tiny:
        run.report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        folders = []
        for arm, scale in zip(_ARMS, scales, strict=True):
            folder = Path(name) / arm
            folder.mkdir()
            folders.append(write_folder(folder, scale))
        try:
            uvloop.run(measure(run, scales, (folders[0], folders[1]), _PLAYED_TINY if args.tiny else _PLAYED))
        except Exception as error:  # what was measured before counts
            run.failed("measure", error)
    run.finish()
    if run.errors:
        sys.exit(1)
