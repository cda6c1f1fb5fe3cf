"""Paged attention against what the machine can do: bytes of KV for decode, products for prefill; needs a CUDA GPU.

Heads of Qwen3-30B-A3B (32 query heads, 4 kv heads of 128, bf16) in a pool of shares: a block is 16 tokens of 48 layers,
1.5 MiB, one kv head of all layers after the other, and a sequence's blocks are scattered. Decode is timed inside a CUDA
graph of all 48 layers, so that no layer finds its KV in the L2 cache because it was just read. Medians of interleaved
rounds; the first warms up.

    limit_copy_gbps        of one large copy on the device, read plus written
    limit_sdpa_tflops_*    torch's own attention over contiguous keys and values, as many queries of as many sequences;
                           limit_flash_tflops_* its flash attention, which it takes where cuDNN's is missing
    decode_us_SxN          one layer's decode of S sequences of N tokens; decode_gbps_* of KV read, decode_share_* of
                           the copy's rate
    prefill_us_SxN         one layer's prefill of S prompts of N tokens, SxN@C: of N tokens each after C cached ones;
                           prefill_tflops_* of the products that the mask leaves, prefill_share_* of torch's own,
                           prefill_flash_share_* of its flash attention
    store_us_N             one layer's new keys and values of N tokens, inside a graph
    latent16_*, latent128_* one latent (MLA) layer's decode by 16 and by 128 heads, likewise: gbps of latents read
                           once, tflops of both products, share of the floor, the longer of reading at the copy's rate
                           and multiplying at limit_product_tflops, which is torch's own of large matrices

With --strides only decodes, prefills and stores are timed, in pairs: *_us_* as above, *_beside_us_* with all heads of a
token side by side, as pools had them before, and *_ratio_*, the first over the second, round by round.

With --rows only decodes with 4 rows a sequence (drafts) of 2,048 tokens are timed: rows_us_SxN of S sequences in tiles,
rows_single_us_* with a program for each row, rows_ratio_* of both.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from fdasync_kernels.attention.tile import Launch
from torch.nn.attention import SDPBackend

from benchmarks._gpu_attention_rig import DIM, HEADS, KV_HEADS, Rig, Sizes
from benchmarks._gpu_latents import measure_latents
from benchmarks._gpu_rows import measure_rows
from benchmarks._gpu_strides import measure_strides
from benchmarks._report import Report

if TYPE_CHECKING:
    from collections.abc import Callable


DECODE_SWEEP = [
    Launch(16, keys, warps, stages)
    for keys, warps, stages in (
        (32, 2, 4), (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 3), (128, 4, 3), (128, 8, 3),
    )
]  # fmt: skip
# what torch chooses among
TORCHS_OWN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
SPLIT_SWEEP = (1, 2, 4, 8, 16, 32, 64)
# of the kernel that is not for Hopper alone
PREFILL_SWEEP = [
    Launch(rows, keys, warps, stages, registers)
    for rows, keys, warps, stages, registers in (
        (64, 64, 4, 2, None), (64, 64, 4, 3, None), (128, 32, 8, 3, 128), (128, 64, 8, 2, None), (128, 64, 8, 2, 128),
        (128, 64, 8, 3, None), (128, 128, 8, 2, None),
    )
]  # fmt: skip


# of decodes with several rows a sequence
ROWS_OF = tuple((count, 2048) for count in (1, 16, 64, 256))
REHEARSAL = Sizes(2, ((1, 40), (3, 40)), ((1, 0, 40), (2, 20, 3)), 1, (1, 8), ((1, 40), (3, 40)), 1 << 20)


def decode_bytes(sequences: int, length: int) -> int:
    return sequences * length * KV_HEADS * DIM * 2 * 2


def prefill_flops(sequences: int, cached: int, length: int) -> float:
    """Of the products that a causal mask leaves."""
    return 4.0 * sequences * HEADS * DIM * (length * cached + length * (length + 1) / 2)


def name_of(sequences: int, cached: int, length: int) -> str:
    return f"{sequences}x{length}" + (f"@{cached}" if cached else "")


def measure(rig: Rig, rounds: int, report: Report) -> None:
    sizes = rig.sizes
    works: dict[str, tuple[Callable[[], object], int, int]] = {}
    source = torch.empty(sizes.copy_nbytes // 2, dtype=torch.uint8, device=rig.device)
    target = torch.empty_like(source)
    works["copy"] = (lambda: target.copy_(source), 1, 3)
    for count, length in sizes.decodes:
        works[f"decode_{count}x{length}"] = (rig.decode(count, length), sizes.layers, 1)
    for case in sizes.prefills:
        works[f"prefill_{name_of(*case)}"] = (rig.prefill(*case), sizes.prefill_layers, 1)
        works[f"sdpa_{name_of(*case)}"] = (rig.sdpa(*case, TORCHS_OWN), sizes.prefill_layers, 1)
        works[f"flash_{name_of(*case)}"] = (rig.sdpa(*case, TORCHS_OWN[1:2]), sizes.prefill_layers, 1)
    for count in sizes.stores:
        works[f"store_{count}"] = (rig.store(count), sizes.layers, 1)
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, (run, layers, repeats) in works.items():
            us = rig.ms(run, repeats) * 1e3 / layers
            if number:
                times[name].append(us)
    copied = report.add("limit_copy_gbps", [sizes.copy_nbytes / us / 1e3 for us in times["copy"]])
    for count, length in sizes.decodes:
        took = times[f"decode_{count}x{length}"]
        report.add(f"decode_us_{count}x{length}", took)
        speed = report.add(f"decode_gbps_{count}x{length}", [decode_bytes(count, length) / us / 1e3 for us in took])
        report.add(f"decode_share_{count}x{length}", [speed / copied])
    for case in sizes.prefills:
        name, flops = name_of(*case), prefill_flops(*case)
        took = times[f"prefill_{name}"]
        report.add(f"prefill_us_{name}", took)
        speed = report.add(f"prefill_tflops_{name}", [flops / us / 1e6 for us in took])
        for limit, share in (("sdpa", "prefill_share"), ("flash", "prefill_flash_share")):
            reached = report.add(f"limit_{limit}_tflops_{name}", [flops / us / 1e6 for us in times[f"{limit}_{name}"]])
            report.add(f"{share}_{name}", [speed / reached], aim=0.8)
    for count in sizes.stores:
        report.add(f"store_us_{count}", times[f"store_{count}"])
    measure_latents(rig, rounds, copied, report)


def best_of(rig: Rig, run: Callable[[], object], layers: int) -> float:
    """Microseconds of a layer; the device is warm."""
    return statistics.median(rig.ms(run) for _ in range(3)) * 1e3 / layers


def sweep(rig: Rig, budget_s: float, report: Report) -> None:
    """Every launch of the lists above for every size, after what the table chooses; stops when the budget is spent."""
    began = time.perf_counter()
    sizes = rig.sizes
    found: dict[str, list[tuple[float, str]]] = {}

    def note(case: str, name: str, us: float) -> None:
        found.setdefault(case, []).append((us, name))
        report.conditions[f"sweep {case} {name}"] = round(us, 2)

    def spent() -> bool:
        return time.perf_counter() - began > budget_s

    for case in sizes.prefills:
        note(f"prefill {name_of(*case)}", "table", best_of(rig, rig.prefill(*case), sizes.prefill_layers))
    for launch in PREFILL_SWEEP:
        for case in sizes.prefills:
            if not spent():
                us = best_of(rig, rig.prefill(*case, launch), sizes.prefill_layers)
                note(f"prefill {name_of(*case)}", str(launch), us)
    for count, length in sizes.decodes:
        note(f"decode {count}x{length}", "table", best_of(rig, rig.decode(count, length), sizes.layers))
    for launch in DECODE_SWEEP:
        for count, length in sizes.decodes:
            for splits in SPLIT_SWEEP:
                # more splits than tiles of keys do nothing, and the workspace has room for 256 in all
                if splits > 1 and (splits > math.ceil(length / launch.keys) or count * splits > 256):
                    continue
                if not spent():
                    us = best_of(rig, rig.decode(count, length, launch, splits), sizes.layers)
                    note(f"decode {count}x{length}", f"{launch} splits={splits}", us)
    for case, results in found.items():
        print(f"{case}: {results[0][0]:.1f} us as it is", file=sys.stderr)
        for us, name in sorted(results)[:6]:
            print(f"    {us:9.1f}  {name}", file=sys.stderr)
    report.conditions["sweep_s"] = round(time.perf_counter() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of everything (default 9)")
    parser.add_argument("--decodes", action="store_true", help="only decodes, of KV and of latents")
    parser.add_argument("--strides", action="store_true", help="only pairs with all heads of a token side by side")
    parser.add_argument("--rows", action="store_true", help="only decodes with 4 rows a sequence, in tiles and not")
    parser.add_argument("--sweep", action="store_true", help="try other launches and splits as well")
    parser.add_argument("--sweep-s", type=float, default=60.0, help="seconds that the sweep may take (default 60)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU: shows that it runs, no figures")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("gpu_attention needs a CUDA GPU, and torch sees none")
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", torch.cuda.current_device())
    report = Report("paged attention, one layer of Qwen3-30B-A3B's heads")
    report.conditions["torch"] = torch.__version__
    report.conditions["gpu"] = "rehearsal" if options.rehearse else torch.cuda.get_device_name(device)
    sizes = REHEARSAL if options.rehearse else Sizes()
    if options.rows:
        sizes = replace(sizes, decodes=sizes.decodes if options.rehearse else ROWS_OF)
    rig = Rig(device, replace(sizes, prefills=(), stores=()) if options.decodes or options.rows else sizes)
    if options.rows:
        measure_rows(rig, options.rounds, (HEADS, DIM), report)
    elif options.strides:
        measure_strides(rig, options.rounds, report)
    else:
        measure(rig, options.rounds, report)
    if options.sweep:
        sweep(rig, options.sweep_s, report)
    report.finish(options.json_path)


if __name__ == "__main__":
    main()
