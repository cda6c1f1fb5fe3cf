"""Serving on a GPU: decode and prefill with capture off and on, one and two steps in flight, and how near to the floor.

    python -m benchmarks gpu_serving [--json FILE] [--model NAME] [--only a,b,d,f,h] [--sizes 1,64,256] [--pairs 10]
                                     [--quick] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the device (from one seed, the same in every process),
contexts of 1,024 tokens, blocks of 16, greedy. `--model` takes other shapes: `glm-4.5-air` with 20 of its 46 layers
(one dense), which fit 120 GB with the KV of 256 contexts, `deepseek-v2-lite` whole. Parts (all but h by default):

a   `decode_tokens_per_s_N_on`, `_off`: of N sequences, two steps in flight, from the futures of steps that are driven
    by hand: the device path with sampling and, when on, the rows' way into the host's arena; no scheduler, no
    processes, no replies. Both arms are on one loaded model, over one pool, with the same fused routers: off does not
    write the ids, stage them or copy them. `capture_on_over_off_N` is the ratio of medians of interleaved stretches,
    with a bootstrap 95 % interval in the conditions. Contexts begin each stretch at 1,024 and grow; blocks are
    appended as they do. `prefill_tokens_per_s`: steps of 8 prompts of 1,024, capture on.
    `replies_over_none_N`: the whole engine, model in a worker, N requests at once: new tokens over the time to the last
    reply, with routing of prompt and output in every reply against without (it is captured in both);
    prompts but for their last block come from the prefix cache. `engine_over_runner_N`: the engine's tokens per
    second while all decode over `decode_tokens_per_s_N_on`.
b   `depth2_over_depth1_N`: two steps in flight against one, capture on, as above. `idle_share_depth2_N`: share of the
    device's time between the last kernel of a step and the first of the next, from a trace; in the conditions
    `trace_N`, with the length of a step traced and untraced.
d   `floor_share_N`: the time that the bytes of a step would take at the rate of a large copy on the same device, over
    the measured step. Bytes: dense weights, shared experts and output head once, the experts that N tokens are expected
    to choose where routing is uniform, KV or latents of all contexts at their beginning. In the conditions `floor_N`:
    how many experts were expected, and how many were chosen, by the captured rows. Parts a and b have it too.
f   `sampled_over_greedy_N`: temperature 1 with raw log-probs of the sampled tokens; `top_p_over_greedy_N`: the same
    with top-p 0.95; both against the arm "on" in turns, N above 1. Drawn weights make nearly uniform distributions,
    which is the most that top-p can have to keep.
h   `fixed_over_default_N`, `prefill_fixed_over_default`: fixed numerics against the default's, in turns, on one loaded
    model over one pool; what an engine is refused with `numerics="fixed"` is not looked for here.

Figures are written to the JSON after every part; an error in one part is reported there (`failed`), does not lose the
others, and makes the exit status 1. Needs a CUDA GPU with 120 GiB for the default; `--tiny` rehearses it without
traces. Parts c, e and g are kept at the tag `benchmarks-whole`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.gpu.options import begin, parser_of, sizes_of
from benchmarks.gpu.scale import AIMS, Scale, large, tiny, write_folder
from benchmarks.lib.arguments import at_least_one, names_of

if TYPE_CHECKING:
    import argparse

    from benchmarks.gpu.model import Rig
    from benchmarks.lib.parts import Parts


async def by_hand(parts: Parts, scale: Scale, folder: str, only: set[str]) -> None:
    """All parts but for the engine: one loaded model."""
    from benchmarks.gpu import decode

    report = parts.report
    arms = ["on", *(["off"] if "a" in only else []), *(["fixed"] if "h" in only else [])]
    async with decode.opened(parts, scale, folder, arms) as rig:
        rate = decode.copy_bytes_per_s(rig, report)
        others = [*(["off"] if "a" in only else []), *(["depth1"] if "b" in only else [])]
        step_s = {}
        # from many to few: sequences leave, none joins
        falling = scale.sizes[::-1]
        for count in falling if only & {"a", "b", "d"} else ():
            step_s[count] = await decode.compare(rig, report, count, rate, others)
            parts.save()
        if "f" in only:
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in falling:
                if count > 1:
                    await decode.compare_samplers(rig, report, count)
                    parts.save()
        if "h" in only:
            await rig.arms["on"].grow(scale.sizes[-1])
            for count in falling:
                await decode.compare_fixed(rig, report, count)
                parts.save()
            await decode.compare_fixed_prefill(rig, report)
        if "b" in only and rig.device.type == "cuda":
            # after all that is timed: a tracer that was there once may cost something for good
            await rig.arms["on"].grow(scale.sizes[-1])
            await parts.run("traces", traces, parts, rig, step_s)


async def traces(parts: Parts, rig: Rig, step_s: dict[int, float]) -> None:
    """Idle shares of all sizes, from many to few."""
    from benchmarks.gpu.profile import idle_of, trace

    scale, arm = rig.scale, rig.arms["on"]
    await trace(arm, 2, 4)  # the first trace of a process costs seconds, and its steps are slow
    for count, untraced_s in step_s.items():
        await arm.shrink(count)
        steps = min(scale.most_steps - 8, max(scale.traced_steps + 4, round(scale.traced_s / untraced_s)))
        found = idle_of(await trace(arm, 2, steps), scale.traced_steps)
        parts.report.add(f"idle_share_depth2_{count}", [found.share])
        parts.report.conditions[f"trace_{count}"] = {
            "steps": found.steps,
            "step_us": round(found.step_us, 1),
            "untraced_us": round(untraced_s * 1e6, 1),
        }
        parts.save()


async def measure(parts: Parts, scale: Scale, folder: str, only: set[str]) -> None:
    """All parts that were asked for, one after the other; each gives back the device."""
    from benchmarks.gpu import engine

    await parts.run("by hand", by_hand, parts, scale, folder, only)
    if "a" in only:
        await parts.run("engine", engine.measure, parts, scale, folder)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL, help="whose shape it has")
    parser.add_argument("--only", type=names_of("abdfh"), default="a,b,d,f", help="parts")
    parser.add_argument("--sizes", type=sizes_of, metavar="N,N", help="running sequences (default 1,64,256)")
    parser.add_argument("--pairs", type=at_least_one, help="stretches of each arm (default 10)")
    parser.add_argument("--quick", action="store_true", help="3 pairs of 0.2 s, one pair of the engine: a look")
    return parser.parse_args(arguments)


def scale_of(args: argparse.Namespace) -> Scale:
    changes: dict[str, Any] = {}
    if args.quick:
        changes |= {"pairs": 3, "side_pairs": 2, "seconds": 0.2, "engine_pairs": 1}
    if args.sizes:
        changes["sizes"] = args.sizes
    if args.pairs is not None:
        changes |= {"pairs": args.pairs, "side_pairs": min(args.pairs, Scale.side_pairs)}
    return dataclasses.replace((tiny if args.tiny else large)(args.model), **changes)


def main() -> int:
    args = parse()
    scale = scale_of(args)
    stretches: dict[str, Any] = {"pairs": scale.pairs, "stretch_s": scale.seconds}
    parts = begin("Serving on a GPU", args, AIMS.get(scale.model), parts=sorted(args.only), **stretches, **scale.facts)
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(measure(parts, scale, write_folder(Path(name), scale), args.only))
    return parts.finish()
