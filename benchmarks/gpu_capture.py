"""What recording the expert routing costs a step on the device: `python -m benchmarks.gpu_capture [--json FILE]`.

A step's routing of 48 layers, 128 experts, top-8, in one CUDA graph: our router kernel without and with the
capture write, and the library's operations (softmax, topk, renormalise, cast) without and with a copy of the ids.
Logits are made beforehand, so that the router is all that is timed; then once more with each layer's linear
(hidden 2048), which is what a step has. bfloat16. All ways in turn, so that the clock's drift hits them alike; a
ratio is of two neighbours. Also how long the used rows take to pinned host memory, and what the buffer holds beside a
table of all requests. Needs a CUDA GPU; about 40 s.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.router.route import route, write_ids
from torch.nn import functional

from benchmarks._report import Report
from fdasync.cache.aux import AuxSpec
from fdasync.gpu.capture import CaptureBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, EXPERTS, TOP_K, HIDDEN = 48, 128, 8, 2048
SIZES = (1, 64, 256, 8192)
WAYS = ("router", "router_capture", "library", "library_copy")
SPEC = AuxSpec("routing", (LAYERS, TOP_K), "uint8")
# a table that is kept for every request's whole context instead of for a step
TABLE_REQUESTS, TABLE_TOKENS = 256, 32_768
# device time of one measurement, so that the events' own resolution is nothing
SPAN_US = 10_000.0


class Step:
    """The routing of one step in each way, as CUDA graphs."""

    def __init__(self, tokens: int, hidden: torch.Tensor, weights: torch.Tensor, *, linear: bool) -> None:
        self.tokens = tokens
        self.device = hidden.device
        self.hidden = hidden[:tokens]
        self.weights = weights
        self.linear = linear
        self.logits = torch.stack([functional.linear(self.hidden, weight) for weight in weights])
        self.captures = {way: CaptureBuffer(tokens, SPEC, self.device, copy=write_ids) for way in WAYS}
        self.kept: dict[str, Any] = {}
        self.graphs = {way: self._graph(way) for way in WAYS}
        self.replays = {way: max(3, min(500, int(SPAN_US / self.time_us(way, 20)))) for way in WAYS}

    def _layer(self, way: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = functional.linear(self.hidden, self.weights[row]) if self.linear else self.logits[row]
        capture = self.captures[way]
        if way.startswith("router"):
            place = capture.claim(row, self.tokens, TOP_K) if way == "router_capture" else None
            return route(logits, TOP_K, weights_dtype=logits.dtype, capture=place)
        scores = functional.softmax(logits, dtype=torch.float, dim=-1)
        weights, ids = torch.topk(scores, TOP_K, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        if way == "library_copy":
            capture.buffer[: self.tokens, row, :TOP_K] = ids
        return weights.to(logits.dtype), ids

    def _whole(self, way: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.captures[way].begin()
        return [self._layer(way, row) for row in range(LAYERS)]

    def _graph(self, way: str) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._whole(way)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.kept[way] = self._whole(way)
        return graph

    def time_us(self, way: str, replays: int | None = None) -> float:
        """Microseconds of a step on the device."""
        graph = self.graphs[way]
        count = replays or self.replays[way]
        return elapsed_us(graph.replay, count)

    def check(self) -> None:
        """Both ways that record must have recorded equal choices, and our router what it returned."""
        for way in WAYS:
            self.graphs[way].replay()
        ours, theirs = (self.captures[way].buffer.long().transpose(0, 1) for way in ("router_capture", "library_copy"))
        if not torch.equal(self.logits.gather(2, ours), self.logits.gather(2, theirs)):
            raise SystemExit(f"{self.tokens} tokens: the router chooses other experts than the library")
        returned = torch.stack([ids for _, ids in self.kept["router_capture"]])
        if not torch.equal(returned, ours):
            raise SystemExit(f"{self.tokens} tokens: other ids were recorded than were returned")


def elapsed_us(call: Callable[[], object], count: int) -> float:
    """Device microseconds of one call, over `count` of them in a row."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    started.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) * 1e3 / count


def measure_routing(report: Report, rounds: int, device: torch.device) -> None:
    seeded = torch.Generator(device).manual_seed(0)
    hidden = torch.randn((max(SIZES), HIDDEN), generator=seeded, device=device).to(torch.bfloat16)
    weights = torch.randn((LAYERS, EXPERTS, HIDDEN), generator=seeded, device=device).mul(HIDDEN**-0.5)
    weights = weights.to(torch.bfloat16)
    for linear in (False, True):
        prefix = "linear_" if linear else ""
        for tokens in SIZES:
            step = Step(tokens, hidden, weights, linear=linear)
            if not linear:
                step.check()
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds):
                # each way follows another one in turn
                for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
                    times[way].append(step.time_us(way))
            for way in WAYS:
                report.add(f"{prefix}{way}_us_{tokens}", times[way])
            for name, way, base, aim in (
                ("capture_over_no_capture", "router_capture", "router", 1.01),
                ("copy_over_no_copy", "library_copy", "library", None),
                ("router_over_library", "router_capture", "library", None),
            ):
                ratios = [one / other for one, other in zip(times[way], times[base], strict=True)]
                report.add(f"{prefix}{name}_{tokens}", ratios, aim=aim if tokens == 256 else None)


def measure_copy_out(report: Report, rounds: int, device: torch.device) -> None:
    buffer = CaptureBuffer(max(SIZES), SPEC, device, copy=write_ids)
    host = torch.empty(buffer.buffer.shape, dtype=torch.uint8, pin_memory=True)
    for tokens in SIZES:
        staged = buffer.stage(tokens)
        place = host[:tokens]

        def copy_out(place: torch.Tensor = place, staged: torch.Tensor = staged) -> None:
            place.copy_(staged, non_blocking=True)

        report.add(f"d2h_us_{tokens}", [elapsed_us(copy_out, 50) for _ in range(rounds)])
        report.add(
            f"stage_us_{tokens}", [elapsed_us(lambda tokens=tokens: buffer.stage(tokens), 50) for _ in range(rounds)]
        )
    table = TABLE_REQUESTS * TABLE_TOKENS * SPEC.token_nbytes
    report.figures["buffer_mb"] = round(buffer.nbytes / 1e6, 3)
    report.figures["request_table_mb"] = round(table / 1e6, 3)
    report.conditions |= {
        "buffer": f"{max(SIZES)} tokens of a step",
        "request_table": f"{TABLE_REQUESTS} requests of {TABLE_TOKENS} tokens",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each way (default 12)")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures kernels on a CUDA GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    report = Report("Recording the expert routing, on the device")
    report.conditions |= {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "layers": LAYERS,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "hidden": HIDDEN,
        "dtype": "bfloat16",
        "rounds": options.rounds,
    }
    with torch.inference_mode():
        measure_routing(report, options.rounds, device)
        measure_copy_out(report, options.rounds, device)
    times = [report.figures[f"router_capture_us_{tokens}"] for tokens in SIZES]
    report.conditions["router_us_per_layer_median_of_sizes"] = round(statistics.median(times) / LAYERS, 3)
    report.finish(options.json_path)


if __name__ == "__main__":
    main()
