"""What counting the chosen experts costs, at 6,000 tokens a second.

Steps of 128 decoding samples, 48 layers, top-8 of 128 experts. `counting_us_a_step` is the CPU time that counting adds
to a step once the first rows are counted, alone: steps with it less the same steps without. `engine_us_a_step` is what
the whole engine spends on a step (`benchmarks.engine_step`, results at the end, one step in flight). Their ratio is
`counting_share`; `counting_core_share` is the share of one core at 6,000 tokens a second. With a worker, which all but
the synthetic runner have, the engine spends none of it: the worker counts.

`whole_us_a_step` and `whole_share` are of a counter that looks at every row of every step: why it does not.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import uvloop

from benchmarks._report import Report, calibrate_us
from benchmarks.engine_step import measure, runner_alone
from fdasync.cache.picks import WHOLE_ROWS, PickShape, PickTable

SHAPE = PickShape(48, 8, 128)
RUNNING = 128
TOKENS_PER_S = 6000
AIM_SHARE = 0.01


def table() -> PickTable:
    """A counter that has its first rows behind it."""
    made = PickTable(SHAPE, memoryview(bytearray(SHAPE.nbytes)))
    rows = np.zeros((WHOLE_ROWS, SHAPE.layers, SHAPE.top_k), np.uint8)
    while made.counted < WHOLE_ROWS:
        made.add(rows)
    return made


def counting_us(steps: list[np.ndarray], count: int, *, whole: bool = False) -> float:
    """CPU microseconds of counting a step."""
    picks = table()
    began = time.process_time()
    for number in range(count):
        if whole:
            picks._counted = 0
        picks.add(steps[number % len(steps)])
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--steps", type=int, default=500, help="steps of the engine that are counted (default 500)")
    parser.add_argument("--runs", type=int, default=5, help="runs; medians are reported (default 5)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    steps = [
        rng.integers(0, SHAPE.num_experts, (RUNNING, SHAPE.layers, SHAPE.top_k)).astype(np.uint8) for _ in range(16)
    ]
    report = Report("Counting the chosen experts")
    report.conditions |= {"running": RUNNING, "tokens_per_s": TOKENS_PER_S, "steps": args.steps}
    counted, whole, engine, calibration = [], [], [], []
    for _ in range(args.runs):
        calibration.append(calibrate_us())
        counted.append(counting_us(steps, 100 * args.steps))
        whole.append(counting_us(steps, args.steps, whole=True))
        own_us = uvloop.run(runner_alone(RUNNING, args.steps))
        cost = uvloop.run(measure(RUNNING, args.steps, streams=False, depth=1, process="inline"))
        engine.append(cost.cpu_us - own_us)
    steps_per_s = TOKENS_PER_S / RUNNING
    report.add("counting_us_a_step", counted)
    report.add("engine_us_a_step", engine)
    pairs = list(zip(counted, whole, engine, strict=True))
    report.add("counting_share", [one / all_us for one, _, all_us in pairs], aim=AIM_SHARE)
    report.add("counting_core_share", [one * steps_per_s / 1e6 for one in counted])
    report.add("whole_us_a_step", whole)
    report.add("whole_share", [one / all_us for _, one, all_us in pairs])
    report.add("calibration_us", calibration)
    report.finish(args.json)


if __name__ == "__main__":
    main()
