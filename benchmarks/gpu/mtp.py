"""What a checkpoint's own multi-token prediction layer gives on a GPU, and what it costs where it is wrong.

    python -m benchmarks gpu_mtp [--json FILE] [--sizes 1,16,64,256] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with one such layer, weights drawn on the device; whole engines with the model in
their process, two steps in flight, routing in every reply, prompts of 1,024 from the prefix cache, 256 new tokens, up
to 3 drafts of a sequence in a step. Drawn weights agree with nothing, so they are made to: attention and experts of all
layers count little beside a token's embedding, and the layer takes the embedding nearly alone. How little says how
often a draft is right. Answers are greedy. Tokens per second while all decode, over an engine without the layer, with
the same weights:

    mtp_LABEL_N    with the budget, N running; at each strength of the layers ("near", "half", "far"). In the
                   conditions: the share of drafts that were right, drafts and tokens of a sequence in a step
    mtp_wrong_N    with the budget, where no draft is right
    mtp_cost_N     without a budget, where no draft is right: what 3 drafts and their rows cost in every step
    mtp_kept_N     without drafts, and the layer's KV is kept all the same

Figures are written to the JSON after every size. Needs a CUDA GPU with 120 GiB; `--tiny` rehearses it in Triton's
interpreter.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL
from benchmarks.gpu.options import begin, parser_of, sizes_of
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from fdasync import Engine
from fdasync.drafting import Speculation

if TYPE_CHECKING:
    import argparse

    import torch

    from benchmarks.lib.parts import Parts

_DRAFTS = 3
# of attention and experts, beside a token's embedding
_STRENGTHS = {"near": 0.0005, "half": 0.002, "far": 0.006}
_AIM = 0.98


class Arms:
    """Engines of one shape, one after the other."""

    def __init__(self, parts: Parts, scale: Scale, folder: str) -> None:
        self._parts, self._scale, self._folder = parts, scale, folder
        self._new_tokens, self._rounds = (12, 1) if scale.device == "cpu" else (256, 2)
        self._base: dict[int, float] = {}

    def engine(self, *, mtp: bool, drafts: int = 0, budget: bool = True) -> tuple[Engine, Any]:
        """An engine and its runner, in this process."""
        from fdasync_transformers import TransformersConfig, TransformersRunner

        from benchmarks.gpu.engine import engine_config

        scale = self._scale
        config = engine_config(
            scale, self._folder, scale.sizes[-1], self._new_tokens,
            runner_config={**scale.runner_config(None), "mtp": mtp},
            speculation=Speculation(drafter="none", max_tokens=drafts, budget=budget) if drafts else None,
        )  # fmt: skip
        runner = TransformersRunner(TransformersConfig(**config.runner_config), config.runner_limits())
        return Engine(config, runner=runner), runner

    async def rates(self, engine: Engine, label: str, aim: float | None = None) -> None:
        """Play all sizes; figures by `label`. Raises RuntimeError where no round was long enough to see a rate."""
        from benchmarks.gpu.engine import accepted_tokens, greedy, one_round

        scale, report = self._scale, self._parts.report
        for size in reversed(scale.sizes):
            prompts, params, rates = scale.prompts(size), greedy(self._new_tokens), []
            # the first round fills the prefix cache, and shows the budget what drafts give
            for _ in range(self._rounds + 1):
                before = engine.stats().scheduler
                rates.append((await one_round(engine, prompts, params, routing=True, steady=True))[1])
            after = engine.stats().scheduler
            rates = [rate for rate in rates[1:] if rate]
            if not rates:
                raise RuntimeError(f"no round of {size} was long enough to see a rate")
            if size not in self._base:
                self._base[size] = report.add(f"tokens_per_s_{size}_none", rates)
                continue
            report.add(f"mtp_{label}_{size}", [rate / self._base[size] for rate in rates], aim=aim)
            steps = (after.steps - before.steps) * size
            drafted = after.own_drafted_tokens - before.own_drafted_tokens
            accepted = accepted_tokens(after) - accepted_tokens(before)
            report.conditions[f"drafts_{label}_{size}"] = {
                "right": round(accepted / drafted, 3) if drafted else None,
                "drafts_per_step": round(drafted / steps, 3),
                "tokens_per_step": round(1 + accepted / steps, 3),
            }
            self._parts.save()


def weaken(model: torch.nn.Module, factor: float) -> None:
    """Multiply what attention and experts of all layers give."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(factor)


def agree(model: torch.nn.Module) -> None:
    """Have the prediction layer take a token's embedding nearly alone."""
    import torch

    with torch.no_grad():
        for parameter in _inputs_of_the_layer(model):
            width = parameter.shape[0]
            parameter[:, :width] = torch.eye(width)
            parameter[:, width:] *= 0.02


def flip(model: torch.nn.Module) -> None:
    """Have the prediction layer predict the least likely token instead of the likeliest."""
    import torch

    with torch.no_grad():
        for parameter in _inputs_of_the_layer(model):
            parameter.mul_(-1)


def _inputs_of_the_layer(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith("mtp.") and name.endswith("eh_proj.weight")
    ]


async def measure(arms: Arms) -> None:
    strengths = list(_STRENGTHS.values())
    for label, mtp in (("none", False), ("kept", True)):
        engine, runner = arms.engine(mtp=mtp)
        async with engine:
            weaken(runner.model, strengths[1])
            await arms.rates(engine, label)
    engine, runner = arms.engine(mtp=True, drafts=_DRAFTS)
    async with engine:
        agree(runner.model)
        before = 1.0
        for label, strength in _STRENGTHS.items():
            weaken(runner.model, strength / before)
            before = strength
            await engine.reset_cache()
            await arms.rates(engine, label, aim=_AIM)
        flip(runner.model)
        await engine.reset_cache()
        await arms.rates(engine, "wrong", aim=_AIM)
    engine, runner = arms.engine(mtp=True, drafts=_DRAFTS, budget=False)
    async with engine:
        agree(runner.model)
        weaken(runner.model, strengths[0])
        flip(runner.model)
        await arms.rates(engine, "cost")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=sizes_of, metavar="N,N", default="1,16,64,256", help="running sequences")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    scale = tiny() if args.tiny else dataclasses.replace(large(DEFAULT_MODEL), sizes=args.sizes)
    scale = dataclasses.replace(scale, config={**scale.config, "num_nextn_predict_layers": 1})
    parts = begin("Multi-token prediction on a GPU", args, strengths=_STRENGTHS, **scale.facts)
    with tempfile.TemporaryDirectory() as name:
        arms = Arms(parts, scale, write_folder(Path(name), scale))
        uvloop.run(parts.run("measure", measure, arms))
    return parts.finish()
