"""What a checkpoint's own multi-token prediction layer gives on a GPU, and what it costs where it is wrong.

    python -m benchmarks gpu_mtp [--json FILE] [--sizes 1,16,64,256] [--rounds 2] [--new-tokens 256] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with one such layer, weights drawn on the device; whole engines with the model in
their process, two steps in flight, routing in every reply, prompts of 1,024 from the prefix cache, up to 3 drafts of a
sequence in a step. Drawn weights agree with nothing, so they are made to: attention and experts of all layers count
little beside a token's embedding, and the layer takes the embedding nearly alone. How little says how often a draft is
right. Answers are greedy. Tokens per second while all decode, over an engine without the layer, with the same weights:

    mtp_LABEL_N    with the budget, N running; at each strength of the layers. In the conditions: the share of drafts
                   that were right, drafts and tokens of a sequence in a step
    mtp_wrong_N    with the budget, where no draft is right (aim 0.98)
    mtp_cost_N     without a budget, where no draft is right: what 3 drafts and their rows cost in every step
    mtp_kept_N     without drafts, and the layer's KV is kept all the same

Figures are written to the JSON after every size. Needs a CUDA GPU with 120 GiB; `--tiny` rehearses it in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.scale import Scale, large, tiny
from benchmarks.gpu.serving import Run
from benchmarks.gpu.speculation import Load, engine_config, seen
from fdasync import Engine
from fdasync.drafting import Speculation

if TYPE_CHECKING:
    import torch

    from fdasync.runner.base import Runner

_DRAFTS = 3
# of attention and experts, beside a token's embedding
_STRENGTHS = {"near": 0.0005, "half": 0.002, "far": 0.006}


class Arms:
    """Engines of one shape, one after the other."""

    def __init__(self, run: Run, folder: str, args: argparse.Namespace) -> None:
        self.run, self.folder, self.args = run, folder, args
        scale = run.scale
        self.loads = {size: Load(scale, size, args.new_tokens, temperature=0.0) for size in reversed(scale.sizes)}
        self.base: dict[int, float] = {}

    def engine(self, *, mtp: bool, drafts: int = 0, budget: bool = True) -> tuple[Engine, Any]:
        """An engine and its runner, in this process."""
        from fdasync_transformers import TransformersConfig, TransformersRunner

        scale = self.run.scale
        speculation = Speculation(drafter="none", max_tokens=drafts, budget=budget) if drafts else None
        config = engine_config(scale, self.folder, scale.sizes[-1], self.args.new_tokens, speculation)
        runner: Runner = TransformersRunner(
            TransformersConfig(**{**config.runner_config, "mtp": mtp}), config.runner_limits()
        )
        return Engine(config, runner=runner), runner

    async def rates(self, engine: Engine, label: str, aim: float | None = None) -> None:
        """Play all sizes; figures by `label`."""
        run, rounds = self.run, self.args.rounds
        for size, load in self.loads.items():
            # the first round fills the prefix cache, and shows the budget what drafts give
            played = [await load.play(engine) for _ in range(rounds + 1)][1:]
            if size not in self.base:
                self.base[size] = run.report.add(f"tokens_per_s_{size}_none", seen(played))
                run.save()
                continue
            run.report.add(f"mtp_{label}_{size}", [rate / self.base[size] for rate in seen(played)], aim=aim)
            last = played[-1]
            run.report.conditions[f"drafts_{label}_{size}"] = {
                "right": round(last.accepted / last.drafted, 3) if last.drafted else None,
                "drafts_per_step": round(last.drafted / last.steps / size, 3),
                "tokens_per_step": round(1 + last.accepted / last.steps / size, 3),
            }
            run.save()
        run.say(f"{label}: done")


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
        for name, parameter in model.named_parameters():
            if name.startswith("mtp.") and name.endswith("eh_proj.weight"):
                width = parameter.shape[0]
                parameter[:, :width] = torch.eye(width)
                parameter[:, width:] *= 0.02


async def measure(arms: Arms) -> None:
    strengths = list(_STRENGTHS.values())
    engine, runner = arms.engine(mtp=False)
    async with engine:
        weaken(runner.model, strengths[1])
        await arms.rates(engine, "none")
    engine, runner = arms.engine(mtp=True)
    async with engine:
        weaken(runner.model, strengths[1])
        await arms.rates(engine, "kept")
    engine, runner = arms.engine(mtp=True, drafts=_DRAFTS)
    async with engine:
        agree(runner.model)
        before = 1.0
        for label, strength in _STRENGTHS.items():
            weaken(runner.model, strength / before)
            before = strength
            await engine.reset_cache()
            await arms.rates(engine, label, aim=0.98)
        # the least likely token instead of the likeliest
        _flip(runner.model)
        await engine.reset_cache()
        await arms.rates(engine, "wrong", aim=0.98)
    engine, runner = arms.engine(mtp=True, drafts=_DRAFTS, budget=False)
    async with engine:
        agree(runner.model)
        weaken(runner.model, strengths[0])
        _flip(runner.model)
        await arms.rates(engine, "cost")


def _flip(model: torch.nn.Module) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("mtp.") and name.endswith("eh_proj.weight"):
                parameter.mul_(-1)


def write_folder(folder: Path, scale: Scale) -> str:
    """A checkpoint folder with a config and nothing else."""
    (folder / "config.json").write_text(json.dumps({**scale.config, "num_nextn_predict_layers": 1}))
    return str(folder)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every size")
    parser.add_argument("--sizes", metavar="N,N", default="1,16,64,256", help="(default 1,16,64,256)")
    parser.add_argument("--rounds", type=int, default=2, help="of each figure (default 2)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request (default 256)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.new_tokens < 1:
        parser.error("--rounds and --new-tokens are 1 at least")
    return args


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        args.rounds, args.new_tokens = 1, 24
    import torch

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA GPU, and torch sees none here; --tiny rehearses it on a CPU")
    scale = tiny() if args.tiny else large("qwen3-30b-a3b")
    sizes = scale.sizes if args.tiny else tuple(sorted({int(size) for size in args.sizes.split(",")}))
    scale = dataclasses.replace(scale, sizes=sizes)
    run = Run(scale, set(), args.json)
    run.report.title = "Multi-token prediction on a GPU"
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": scale.model,
        "sizes": scale.sizes,
        "context": scale.context,
        "new_tokens": args.new_tokens,
        "max_tokens": _DRAFTS,
        "strengths": _STRENGTHS,
        "rounds": args.rounds,
    }
    if args.tiny:
        run.report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), scale)
        try:
            uvloop.run(measure(Arms(run, folder, args)))
        except Exception as error:  # the figures so far count
            run.failed("measure", error)
    run.save()
    run.report.finish(args.json)
    if run.errors:
        raise SystemExit(1)
