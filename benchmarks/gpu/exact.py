"""Tokens and routing rows of whole engines on a GPU, held against the library's own eager forward pass on the same GPU.

    python -m benchmarks gpu_exact [--json FILE] [--quick] [--families NAME,...] [--parts NAME,...] [--tp N]
                                   [--kernels auto] [--tiny]

Small random checkpoints of three families, in float32 and in bfloat16. Each part is one play (`plays.py`):

    tight      shared prefixes, chunked prefill, preemption with swaps, hits on the host, an abort; two steps in flight
    plain      the same with one step in flight, whole prefills, and the library's own routers
    store      a second engine on the file store of the first
    update     new weights while requests run, with mode "abort" and mode "keep"
    worker     as tight, in a worker process, with the library's own routers
    pd_shm     a prefill and a decode instance, over shared memory; an abort
    pd_tcp     the same over tcp, one step in flight
    pd_device  the same from device to device
    bf16_tight, bf16_plain, bf16_worker
    ranks, ranks_update, ranks_store, bf16_ranks
               with `--tp N` alone: as tight, update and store, over N ranks with a GPU each; what they write to the
               store one process reads

`exact_rows`, `tied_rows`, `wrong_rows`, `missing_rows`, the same of tokens: as `fdasync_trainer.verify` has it. In
float32 a tie is within 1e-5 of the boundary of the selection, over the largest score. `bf16_exact_rows` and so on: in
bfloat16 the reference takes over the engine's rows, so that one swapped expert does not change all that follows; what
remains is the rounding of the router's input, which is measured (`half.py`): a row is tied if shifts of its logits by a
tolerance of their spread make it the choice. The conditions have each family's tolerances, and the share of rows that
the reference alone chooses otherwise in float32; and of each play what was found and what the engines' books say.

Wrong rows, wrong tokens and missing rows must be 0; the exit status says whether they are, and whether every part did
what it is there for. `--tiny` rehearses it with the smallest models.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.kinds import kinds
from benchmarks.gpu.options import begin, parser_of
from benchmarks.lib.arguments import at_least_one, names_of

if TYPE_CHECKING:
    import argparse

FAMILIES = ("qwen3_moe", "ernie4_5_moe", "glm4_moe")
_QUICK = {"tight", "update", "store", "pd_shm", "bf16_tight", "ranks", "bf16_ranks"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one family, a smaller model, fewer plays")
    parser.add_argument("--families", type=names_of(FAMILIES), help=f"(default: {','.join(FAMILIES)})")
    parser.add_argument("--parts", type=names_of(kinds(2)), help="plays (default: all)")
    parser.add_argument("--tp", type=at_least_one, default=1, help="ranks of the groups that play, a GPU each")
    parser.add_argument("--kernels", default="auto", choices=["auto", "triton", "torch"], help="of the engines")
    args = parser.parse_args(arguments)
    few = args.quick or args.tiny
    args.parts = args.parts or (_QUICK if few else set(kinds(2))) & set(kinds(args.tp))
    if args.parts - set(kinds(args.tp)):
        parser.error(f"--parts {','.join(args.parts)} without --tp")
    args.families = [name for name in FAMILIES if name in (args.families or FAMILIES[: 1 if few else None])]
    return args


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all parts ran and nothing is wrong."""
    args = parse(arguments)
    parts = begin("Exactness on the device", args, gpus=args.tp)
    # they import triton
    from benchmarks.gpu.plays import SCALES
    from benchmarks.gpu.verdicts import play_all

    chosen = {name: kind for name, kind in kinds(args.tp).items() if name in args.parts}
    scale = SCALES["tiny" if args.tiny else "quick" if args.quick else "default"]
    runner: dict[str, Any] = {"device": "cuda", "kernels": args.kernels}
    if args.tiny:
        kernels = "triton" if args.kernels == "auto" else args.kernels
        runner = {"device": "cpu", "kernels": kernels, "num_threads": 1, "self_check": False}
    with tempfile.TemporaryDirectory(prefix="fdasync-exact-") as folder:
        uvloop.run(play_all(parts, scale, Path(folder), args.families, chosen, runner))
    return parts.finish()
