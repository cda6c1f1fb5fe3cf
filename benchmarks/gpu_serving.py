"""Serving on a GPU: decode and prefill with capture off and on, one and two steps in flight, and how near to the floor.

    python -m benchmarks.gpu_serving [--json FILE] [--only a,b,c,d] [--sizes 1,64,256] [--pairs 10] [--seconds 0.5]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the device (from one seed, the same in every process),
contexts of 1,024 tokens, blocks of 16, greedy. Parts:

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
    trace. Where the rest goes: tables on the way, `profile_N_depthD` in the conditions; traced, so with the
    tracer's own cost (`untraced_us` beside it).
c   `ours_over_library_cb`: 64 prompts of 1,024 + 128 new tokens, sent at once, in new tokens per second with prefill in
    it; our engine with routing in the replies against the library's own continuous batching, at its own settings, in a
    process of its own. Context, not a claim: a failure there is reported in the conditions and is no error.
d   `floor_share_N`: the time that the bytes of a step would take at the rate of a large copy on the same device, over
    the measured step. Bytes: dense weights and output head once, the experts that N tokens are expected to choose
    where routing is uniform, KV of all contexts at their beginning. What was really chosen is in the conditions.

Every arm is warmed up as long as it is measured, and nothing is compiled or captured inside a stretch. Python's
collector is told to leave what was loaded alone. Figures are written to the JSON after every part; an error in one
part is reported there (`errors`), does not lose the others, and makes the exit status 1. Needs a CUDA GPU with 120 GiB
for the default; `--tiny` rehearses a, b without traces, and d in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks._report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._gpu_model import Rig
    from benchmarks._gpu_scale import Scale

# of the library's process: loading, and three rounds of a few seconds each
_LIBRARY_LOAD_S = 60.0
_LIBRARY_ROUNDS_S = 60.0
_IDLE_AIM = 0.01


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
        self.save()
        self.report.finish(self._json_path)


async def by_hand(run: Run, folder: str) -> None:
    """Parts a, b and d of the runner: one loaded model. Errors of one size leave the others."""
    from benchmarks import _gpu_decode as decode
    from benchmarks._gpu_model import Rig

    scale, report = run.scale, run.report
    ways = ["on", *(["off"] if "a" in run.parts else []), *(["depth1"] if "b" in run.parts else [])]
    rig = await Rig.open(scale, folder, [way for way in ways if way != "depth1"], run.say)
    try:
        await decode.begin(rig, report)
        run.say("prefilled")
        run.save()
        gc.collect()
        gc.freeze()
        steps_s: dict[int, float] = {}
        # from many to few: sequences leave, none joins
        for count in reversed(scale.sizes):
            steps_s[count] = await decode.compare(rig, report, ways, count)
            run.say(f"{count} running: {steps_s[count] * 1e3:.3f} ms a step")
            run.save()
        if "d" in run.parts:
            decode.floor(rig, report, steps_s)
            run.save()
        if "b" in run.parts:
            # after all that is timed: a tracer that was there once may cost something for good
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in reversed(scale.sizes):
                await rig.arms["on"].shrink(count)
                if rig.device.type != "cuda":
                    continue
                try:
                    await profile(run, rig, count, steps_s[count])
                except Exception as error:  # traces come from elsewhere, in forms that change
                    run.failed(f"profile_{count}", error)
                run.save()
    finally:
        gc.unfreeze()
        await rig.close()


async def profile(run: Run, rig: Rig, count: int, step_s: float) -> None:
    """Idle shares and tables of one size."""
    from benchmarks import _gpu_profile as profiling

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
            "kernels": {name: round(share, 5) for name, share in broken.kernels},
        }
        idle = broken.shares[profiling.IDLE]
        aim = _IDLE_AIM if depth == 2 else None
        report.add(f"idle_share_depth{depth}_{count}", [idle], aim=aim)
        if count == 64:
            report.add(f"idle_share_depth{depth}", [idle], aim=aim)
    profiling.show(count, found)


def library(run: Run, folder: str, ours: float | None) -> None:
    """Part c's other side, in a process of its own; whatever goes wrong there is a condition."""
    requests, new_tokens = run.scale.library
    out = Path(folder) / "library.json"
    command = [sys.executable, "-m", "benchmarks._gpu_library", folder, str(requests), str(new_tokens), str(out)]
    if run.scale.device == "cpu":
        command += ["--device", "cpu"]
    problem = ""
    try:
        limit_s = _LIBRARY_LOAD_S + _LIBRARY_ROUNDS_S
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit_s, check=False)
        if done.returncode:
            problem = f"exit status {done.returncode}: {done.stderr[-3000:]}"
    except subprocess.TimeoutExpired as error:
        # bytes, whatever was asked for
        text = bytes(error.stderr or b"").decode(errors="replace")
        problem = f"stopped after {error.timeout:.0f} s: {text[-1500:]}"
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rates": [], "notes": {}}
    run.report.conditions["library"] = {**found["notes"], "rates": [round(rate, 1) for rate in found["rates"]]}
    if problem:
        run.report.conditions["library"]["problem"] = problem
        run.say(f"the library: {problem}")
    rates = found["rates"][1:] or found["rates"]
    if rates:
        theirs = run.report.add("library_new_tokens_per_s", rates)
        if ours is not None:
            run.report.add("ours_over_library_cb", [ours / theirs])


def measure(run: Run, folder: str) -> None:
    """All parts that were asked for, one after the other; each gives back the device."""
    from benchmarks import _gpu_engine

    ours: float | None = None

    async def engine() -> None:
        nonlocal ours
        wants = {"replies": "a" in run.parts, "library": "c" in run.parts}
        ours = await _gpu_engine.measure(run.scale, folder, run.report, **wants, save=run.save)

    stages: list[tuple[str, set[str], Callable[[], None]]] = [
        ("by hand", {"a", "b", "d"}, lambda: uvloop.run(by_hand(run, folder))),
        ("engine", {"a", "c"}, lambda: uvloop.run(engine())),
        ("library", {"c"}, lambda: library(run, folder, ours)),
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every part")
    parser.add_argument("--only", metavar="PARTS", default="a,b,c,d", help="of a,b,c,d (default: all)")
    parser.add_argument("--sizes", metavar="N,N", help="running sequences (default 1,64,256)")
    parser.add_argument("--pairs", type=int, help="stretches of each arm (default 10)")
    parser.add_argument("--seconds", type=float, help="of one stretch (default 0.5)")
    parser.add_argument("--quick", action="store_true", help="3 pairs of 0.2 s, one pair of the engine: a look")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args()
    args.parts = {part.strip() for part in args.only.split(",") if part.strip()}
    if not args.parts or args.parts - set("abcd"):
        parser.error(f"--only names {args.only!r}, parts are a, b, c and d")
    return args


def scale_of(args: argparse.Namespace) -> Scale:
    from benchmarks._gpu_scale import Scale, tiny

    changes: dict[str, Any] = {}
    if args.quick:
        changes |= {"pairs": 3, "seconds": 0.2, "engine_pairs": 1}
    if args.sizes:
        changes["sizes"] = tuple(sorted({int(size) for size in args.sizes.split(",")}))
    if args.pairs is not None:
        changes["pairs"] = args.pairs
    if args.seconds is not None:
        changes["seconds"] = args.seconds
    return dataclasses.replace(tiny() if args.tiny else Scale(), **changes)


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

    from benchmarks._gpu_scale import write_folder

    scale = scale_of(args)
    run = Run(scale, args.parts, args.json)
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
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


if __name__ == "__main__":
    main()
