"""Serving on a GPU: decode and prefill with capture off and on, one and two steps in flight, and how near to the floor.

    python -m benchmarks gpu_serving [--json FILE] [--model NAME] [--only a,b,c,d,e,f,g,h] [--startup]
                                     [--sizes 1,64,256] [--pairs 10] [--seconds 0.5] [--skew 1.0] [--quick] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the device (from one seed, the same in every process),
contexts of 1,024 tokens, blocks of 16, greedy. `--model` takes other shapes: `glm-4.5-air` with 20 of its 46 layers
(one dense), which fit 120 GB with the KV of 256 contexts, `deepseek-v2-lite` whole. Parts (all but g and h by default):

a   `decode_tokens_per_s_N_on`, `_off`: of N sequences, two steps in flight, from the futures of steps that are driven
    by hand: the device path with sampling and, when on, the rows' way into the host's arena; no scheduler, no
    processes, no replies. Both arms are on one loaded model, over one pool, with the same fused routers: off does not
    write the ids, stage them or copy them. `capture_on_over_off` (64; also _1, _64, _256) is the ratio of medians of
    interleaved stretches, with a bootstrap 95 % interval in the conditions. Contexts begin each stretch at 1,024 and
    grow; blocks are appended as they do. `prefill_tokens_per_s`: steps of 8 prompts of 1,024, capture on.
    `replies_over_none_N`: the whole engine, model in a worker, N requests at once: new tokens over the time to the last
    reply, with routing of prompt and output in every reply against without (it is captured in both);
    prompts but for their last block come from the prefix cache. `engine_over_runner_N`: the engine's tokens per
    second while all decode over `decode_tokens_per_s_N_on`.
b   `depth2_over_depth1_N`: two steps in flight against one, capture on, as above. `idle_share_depth2` and `_depth1`
    (64; _1, _64, _256): share of the device's time between the last kernel of a step and the first of the next, from a
    trace. Where the rest goes: tables on the way, by group and by kernel; in the conditions `profile_N_depthD`, and
    `kernels_N` with name, group, launches, us and share of each kernel; traced, so with the tracer's own cost
    (`untraced_us` beside it). `launches_per_step_N`: kernels, copies and fills. `kernels_prefill`, `prefill_step_ms`:
    the same of steps of 8 new prompts.
c   `ours_over_library_cb`: 64 prompts of 1,024 + 128 new tokens, sent at once, in new tokens per second with prefill in
    it; our engine with routing in the replies against the library's own continuous batching, at its own settings, in a
    process of its own. Context, not a claim: a failure there is reported in the conditions and is no error.
d   `floor_share_N`: the time that the bytes of a step would take at the rate of a large copy on the same device, over
    the measured step. Bytes: dense weights, shared experts and output head once, the experts that N tokens are expected
    to choose where routing is uniform, KV or latents of all contexts at their beginning. What was really chosen, by
    layer, and the share by it are in the conditions.
e   `decode_tokens_per_s_N_skewed`, `step_ms_N_skewed`: the arm "on" where the logits of each router have a fixed bias
    by expert, drawn once from a seed, `--skew` times as wide as their spread over tokens (`skew.py`).
    `experts_chosen_N_skewed`: distinct ones of a layer and step, counted in captured rows; `floor_share_N_skewed`
    counts those, `floor_N_skewed` in the conditions has them by layer.
f   `sampled_over_greedy_N`: temperature 1 with raw log-probs of the sampled tokens; `top_p_over_greedy_N`: the same
    with top-p 0.95; both against the arm "on" in turns, N above 1. Drawn weights make nearly uniform distributions,
    which is the most that top-p can have to keep.
g   (`--startup`) `startup_cold_s`, `startup_warm_s`: imports, `open` and `bind` of the runner in a fresh process, with
    an empty cache of compiled kernels (TRITON_CACHE_DIR) and with the one that the first start filled.
h   `fixed_over_default_N`, `prefill_fixed_over_default`: fixed numerics against the default's, in turns, on one loaded
    model over one pool; what an engine is refused with `numerics="fixed"` is not looked for here.

Every arm is warmed up as long as it is measured, and nothing is compiled or captured inside a stretch. Python's
collector is told to leave what was loaded alone. Figures are written to the JSON after every part; an error in one
part is reported there (`errors`), does not lose the others, and makes the exit status 1; `aims` in the conditions says
which aims of the default model were met. Needs a CUDA GPU with 120 GiB for the default; `--tiny` rehearses all but c,
without traces, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.gpu.scale import LEAST, Scale, large, tiny, write_folder
from benchmarks.lib.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.decode import Found
    from benchmarks.gpu.model import Rig

_PARTS = "abcdefgh"


class Run:
    """What all parts share: the report that is saved as it grows, and the errors so far."""

    def __init__(self, scale: Scale, parts: set[str], json_path: str | None) -> None:
        self.scale = scale
        self.parts = parts
        self.report = Report("Serving on a GPU")
        self.errors: dict[str, str] = {}
        self._json_path = json_path
        self._began = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def failed(self, part: str, error: BaseException) -> None:
        self.errors[part] = f"{type(error).__name__}: {error}"[:2000]
        traceback.print_exception(error)
        self.report.conditions["errors"] = self.errors
        self.save()

    def save(self) -> None:
        self.report.conditions["took_s"] = round(time.perf_counter() - self._began, 1)
        if self._json_path:
            found = {"figures": self.report.figures, "conditions": self.report.conditions}
            Path(self._json_path).write_text(json.dumps(found, indent=2) + "\n")

    def finish(self) -> None:
        self.report.conditions["aims"] = aims_of(self.scale, self.report.figures)
        self.save()
        self.report.finish(self._json_path)


def aims_of(scale: Scale, figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Of the figures that have one: the aim, and whether it was met."""
    found = {}
    for name, figure in figures.items():
        aim = scale.aim(name)
        if aim is not None:
            found[name] = {"figure": figure, "aim": aim, "met": figure >= aim if name in LEAST else figure <= aim}
    return found


async def by_hand(run: Run, folder: str) -> None:
    """Parts a, b, d, e, f and h of the runner: one loaded model. Errors of one size leave the others."""
    from benchmarks.gpu import decode
    from benchmarks.gpu.model import Rig

    scale, parts = run.scale, run.parts
    ways = ["on", *(["off"] if "a" in parts else []), *(["depth1"] if "b" in parts else [])]
    arms = [*(way for way in ways if way != "depth1"), *(["fixed"] if "h" in parts else [])]
    rig = await Rig.open(scale, folder, arms, run.say, skew="e" in parts)
    try:
        await decode.begin(rig, run.report)
        run.say("prefilled")
        run.save()
        gc.collect()
        gc.freeze()
        found: dict[int, Found] = {}
        # from many to few: sequences leave, none joins
        for count in reversed(scale.sizes if parts & {"a", "b", "d"} else ()):
            found[count] = await decode.compare(rig, run.report, ways, count)
            run.say(f"{count} running: {found[count].step_s * 1e3:.3f} ms a step")
            run.save()
        rate = 0.0
        if parts & {"d", "e"}:
            rate = decode.copy_bytes_per_s(rig.device, scale.copy_nbytes)
            run.report.add("copy_gbps", [rate / 1e9])
        if "d" in parts:
            decode.floor(rig, run.report, found, rate)
        if "f" in parts:
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in reversed([size for size in scale.sizes if size > 1]):
                await decode.compare_samplers(rig, run.report, count)
                run.save()
        if "e" in parts:
            await skewed(run, rig, rate)
        if "h" in parts:
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in reversed(scale.sizes):
                await decode.compare_fixed(rig, run.report, count)
                run.save()
            await decode.compare_fixed_prefill(rig, run.report)
            run.save()
        if "b" in parts and rig.device.type == "cuda":
            # after all that is timed: a tracer that was there once may cost something for good
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in reversed(scale.sizes):
                await rig.arms["on"].shrink(count)
                try:
                    await profile(run, rig, count, found[count].step_s)
                except Exception as error:  # traces come from elsewhere, in forms that change
                    run.failed(f"profile_{count}", error)
                run.save()
            try:
                await profile_prefill(run, rig)
            except Exception as error:  # as above
                run.failed("profile_prefill", error)
            run.save()
    finally:
        gc.unfreeze()
        await rig.close()


async def skewed(run: Run, rig: Rig, rate: float) -> None:
    """Part e, on the arm "on"; the weights are afterwards what they were."""
    from benchmarks.gpu import decode

    await rig.arms["on"].grow(run.scale.sizes[-1])
    await rig.set_skew(True)
    found: dict[int, Found] = {}
    for count in reversed(run.scale.sizes):
        found[count] = await decode.skewed(rig, run.report, count)
        run.say(f"{count} running, skewed: {found[count].step_s * 1e3:.3f} ms a step")
    decode.skewed_floor(rig, run.report, found, rate)
    assert rig.skew is not None
    run.report.conditions["skew"] = {
        "strength": run.scale.skew,
        "spread_of_logits": [round(value, 3) for value in rig.skew.logits],
        "spread_of_bias_over_tokens": [round(value, 3) for value in rig.skew.spread],
    }
    await rig.set_skew(False)
    run.save()


async def profile(run: Run, rig: Rig, count: int, step_s: float) -> None:
    """Idle shares and tables of one size."""
    from benchmarks.gpu import profile as profiling

    arm, report, scale = rig.arms["on"], run.report, run.scale
    if count == scale.sizes[-1]:
        await profiling.trace(arm, 2, 4)  # the first trace of a process costs seconds, and its steps are slow
    steps = min(scale.most_steps - 8, max(scale.traced_steps + 4, round(scale.traced_s / step_s)))
    found = {}
    for depth in (2, 1):
        events = await profiling.trace(arm, depth, steps)
        found[depth] = broken = profiling.break_down(events, scale.traced_steps)
        report.conditions[f"profile_{count}_depth{depth}"] = {
            "steps": broken.steps,
            "step_us": round(broken.step_us, 1),
            "untraced_us": round(step_s * 1e6, 1) if depth == 2 else None,
            "idle_us": round(broken.idle_us, 2),
            "shares": {name: round(share, 5) for name, share in broken.shares.items()},
            "launches": round(broken.launches, 1),
        }
        idle = broken.shares[profiling.IDLE]
        for name in (f"idle_share_depth{depth}_{count}", *([f"idle_share_depth{depth}"] if count == 64 else [])):
            report.add(name, [idle], aim=scale.aim(name))
    report.add(f"launches_per_step_{count}", [found[2].launches])
    report.conditions[f"kernels_{count}"] = profiling.table_of(found[2])
    profiling.show(count, found)
    profiling.show_kernels(f"a decode step of {count}", found[2])


async def profile_prefill(run: Run, rig: Rig) -> None:
    """A table of the kernels of steps with new prompts alone; needs the device's room for six of them."""
    from benchmarks.gpu import profile as profiling

    arm, prompts = rig.arms["on"], run.scale.prefill_prompts
    steps = (run.scale.sizes[-1] - arm.running) // prompts
    broken = profiling.break_down(await profiling.trace_prefills(arm, prompts, min(steps, 8)))
    run.report.conditions["kernels_prefill"] = profiling.table_of(broken)
    run.report.add("prefill_step_ms", [broken.step_us / 1e3])
    profiling.show_kernels(f"a step of {prompts} prompts of {run.scale.context}", broken)


def measure(run: Run, folder: str) -> None:
    """All parts that were asked for, one after the other; each gives back the device."""
    from benchmarks.gpu import children as _gpu_children
    from benchmarks.gpu import engine as _gpu_engine

    ours: float | None = None

    async def engine() -> None:
        nonlocal ours
        wants = {"replies": "a" in run.parts, "library": "c" in run.parts}
        ours = await _gpu_engine.measure(run.scale, folder, run.report, **wants, save=run.save)

    def library() -> None:
        problem = _gpu_children.library(run.scale, run.report, folder, ours)
        if problem:
            run.say(f"the library: {problem}")

    stages: list[tuple[str, set[str], Callable[[], None]]] = [
        ("by hand", {"a", "b", "d", "e", "f", "h"}, lambda: uvloop.run(by_hand(run, folder))),
        ("engine", {"a", "c"}, lambda: uvloop.run(engine())),
        ("library", {"c"}, library),
        ("start-up", {"g"}, lambda: _gpu_children.startup(run.scale, run.report, folder)),
    ]
    for name, parts, stage in stages:
        if not parts & run.parts:
            continue
        run.say(f"stage: {name}")
        try:
            stage()
        except Exception as error:  # whatever it is, the figures of the others count
            run.failed(name, error)
        run.say(f"{_free() / 1e9:.2f} GB are still held on the device")
        run.save()


def _free() -> int:
    """Give back what nobody holds; bytes that are held by this process all the same."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the device is not usable in this process any more: {error}", file=sys.stderr, flush=True)
    return int(torch.cuda.memory_allocated())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every part")
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL, help=f"(default {DEFAULT_MODEL})")
    parser.add_argument("--only", metavar="PARTS", default="a,b,c,d,e,f", help="of a to h (default: all but g and h)")
    parser.add_argument("--startup", action="store_true", help="part g too")
    parser.add_argument("--sizes", metavar="N,N", help="running sequences (default 1,64,256)")
    parser.add_argument("--pairs", type=int, help="stretches of each arm (default 10)")
    parser.add_argument("--seconds", type=float, help="of one stretch (default 0.5)")
    parser.add_argument("--skew", type=float, help="width of the routers' bias over the spread of their logits (1)")
    parser.add_argument("--quick", action="store_true", help="3 pairs of 0.2 s, one pair of the engine: a look")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    args.parts = {part.strip() for part in args.only.split(",") if part.strip()}
    if not args.parts or args.parts - set(_PARTS):
        parser.error(f"--only names {args.only!r}, parts are a to h")
    if args.startup:
        args.parts.add("g")
    return args


def scale_of(args: argparse.Namespace) -> Scale:
    changes: dict[str, Any] = {}
    if args.quick:
        changes |= {"pairs": 3, "side_pairs": 2, "seconds": 0.2, "engine_pairs": 1}
    if args.sizes:
        changes["sizes"] = tuple(sorted({int(size) for size in args.sizes.split(",")}))
    if args.pairs is not None:
        changes |= {"pairs": args.pairs, "side_pairs": min(args.pairs, Scale.side_pairs)}
    if args.seconds is not None:
        changes["seconds"] = args.seconds
    if args.skew is not None:
        changes["skew"] = args.skew
    return dataclasses.replace((tiny if args.tiny else large)(args.model), **changes)


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        args.parts -= {"c"}
    import torch

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA GPU, and torch sees none here; --tiny rehearses it on a CPU")
    import transformers

    scale = scale_of(args)
    run = Run(scale, args.parts, args.json)
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": scale.model,
        "layers": scale.config["num_hidden_layers"],
        "parts": sorted(args.parts),
        "sizes": scale.sizes,
        "context": scale.context,
        "dtype": scale.dtype,
        "pairs": scale.pairs,
        "stretch_s": scale.seconds,
    }
    if args.tiny:
        # a step is done before its launch returns: even the ratio of depths is of what the clock sees, not of work
        run.report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        measure(run, write_folder(Path(name), scale))
    run.finish()
    if run.errors:
        for part, error in run.errors.items():
            print(f"error in {part}: {error}", file=sys.stderr)
        raise SystemExit(1)
