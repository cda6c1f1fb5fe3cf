"""Tokens and routing rows of whole engines on a GPU, held against the library's own eager forward pass on the same GPU.

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

Rows and tokens are exact, tied or wrong, as `fdasync_trainer.verify` has it. In float32 a tie is within 1e-5 of
the boundary of the selection, over the largest score. In bfloat16 the reference takes over the engine's rows, so that
one swapped expert does not change all that follows; what remains is the rounding of the router's input, which is
measured (`half.py`): a row is tied if shifts of its logits by `bf16_tolerance` of their spread make it the choice
(that figure is the largest of all layers and families; each has its own). `bf16_differs` is the share of rows that are
not exact, beside the share of rows that the reference alone chooses otherwise in float32, `bf16_reference_differs`.

wrong_rows, wrong_tokens, missing_rows and bf16_wrong_rows must be 0; the exit status says whether they are, and whether
every part did what it is there for.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvloop
from fdasync_transformers import make_random_checkpoint

from benchmarks.gpu import plays
from benchmarks.gpu.half import HalfJudge
from benchmarks.gpu.judge import Findings, Judge
from benchmarks.gpu.parts import Parts, describe_device
from benchmarks.lib.report import Report

FAMILIES = ("qwen3_moe", "ernie4_5_moe", "glm4_moe")
# weights of each version in the plays
WEIGHTS = {0: "first", 1: "other", 2: "first"}
_LIMIT_S = 150.0
# of the checkpoints' weights; with wide ones roundings grow from layer to layer, and any row could be a tie
_STD, _CALM_STD = 0.3, 0.1

Maker = Callable[[plays.Play], Coroutine[Any, Any, plays.Played]]


@dataclass(frozen=True)
class Kind:
    """A play by name. `apart`: in processes of its own, so that several run at a time."""

    make: Maker
    apart: bool = False
    bf16: bool = False


def kinds(scale: plays.Scale, ranks: int = 1) -> dict[str, Kind]:
    inline = {"process": "inline"}
    plain = {**inline, "fused": False, "pipeline_depth": 1, "max_step_tokens": scale.whole}
    worker = {"process": "worker", "fused": False}
    # one after the other: a group locks its GPUs
    group = {"process": "worker", "tensor_parallel": ranks}
    of_ranks = {
        "ranks": Kind(lambda play: plays.tight(play, **group)),
        "ranks_update": Kind(lambda play: plays.updated(play, **group)),
        "ranks_store": Kind(lambda play: plays.stored(play, **group)),
        "bf16_ranks": Kind(lambda play: plays.tight(play, **group), bf16=True),
    }
    return (of_ranks if ranks > 1 else {}) | {
        "tight": Kind(lambda play: plays.tight(play, **inline)),
        "plain": Kind(lambda play: plays.tight(play, **plain)),
        "store": Kind(lambda play: plays.stored(play)),
        "update": Kind(lambda play: plays.updated(play, **inline)),
        "worker": Kind(lambda play: plays.tight(play, **worker), apart=True),
        "pd_shm": Kind(lambda play: plays.apart(play, "shm"), apart=True),
        "pd_tcp": Kind(lambda play: plays.apart(play, "tcp", pipeline_depth=1), apart=True),
        "pd_device": Kind(lambda play: plays.apart(play, "device"), apart=True),
        "bf16_tight": Kind(lambda play: plays.tight(play, **inline), bf16=True),
        "bf16_plain": Kind(lambda play: plays.tight(play, **plain), bf16=True),
        "bf16_worker": Kind(lambda play: plays.tight(play, **worker), apart=True, bf16=True),
    }


class Exact:
    """All plays of one run, and what they found.

    Args:
        only: names of plays; empty: all.
        runner: keys of `runner_config` for all engines.
        at_once: plays in processes of their own that run at a time.
        ranks: of the groups that play; 1: none do.
    """

    def __init__(
        self,
        parts: Parts,
        report: Report,
        folder: Path,
        *,
        scale: plays.Scale,
        families: tuple[str, ...],
        only: tuple[str, ...],
        runner: dict[str, Any],
        at_once: int,
        ranks: int = 1,
    ) -> None:
        self.found: dict[tuple[str, bool], Findings] = {}
        self.wrong = 0
        self._parts = parts
        self._report = report
        self._folder = folder
        self._scale = scale
        self._families = families
        self._kinds = {name: kind for name, kind in kinds(scale, ranks).items() if not only or name in only}
        self._runner = runner
        self._at_once = at_once
        self._device = torch.device(runner["device"])
        self._plays: dict[tuple[str, bool], plays.Play] = {}
        self._judges: dict[tuple[str, bool], Judge] = {}
        report.conditions["parts"] = {}

    async def run(self) -> None:
        for family in self._families:
            await self._parts.run(f"{family} checkpoints", lambda family=family: self._make(family))
        # those in this process block its loop, which routers do not like: one after the other, and first
        for family in self._families:
            for name, kind in self._kinds.items():
                if not kind.apart and (family, kind.bf16) in self._plays:
                    await self._part(family, name, kind)
        places = asyncio.Semaphore(self._at_once)

        async def placed(family: str, name: str, kind: Kind) -> tuple[str, str, Kind, Any]:
            async with places:
                play = self._play(family, name, kind)
                return family, name, kind, await self._parts.run(f"{family} {name}", lambda: self._limited(play, kind))

        # the reference's passes would block the loop too: judged when all are in
        pending = [
            placed(family, name, kind)
            for family in self._families
            for name, kind in self._kinds.items()
            if kind.apart and (family, kind.bf16) in self._plays
        ]
        for family, name, kind, played in await asyncio.gather(*pending):
            if played is not None:
                await self._parts.run(
                    f"{family} {name} judged",
                    lambda family=family, name=name, kind=kind, played=played: self._judge(family, name, kind, played),
                )

    async def _make(self, family: str) -> None:
        """Two checkpoints of a family for either dtype, and who judges them."""
        for half in sorted({kind.bf16 for kind in self._kinds.values()}):
            folders = {
                name: make_random_checkpoint(
                    self._folder / family / f"{name}{'_calm' if half else ''}",
                    family,
                    seed=seed,
                    size=self._scale.size,
                    std=_CALM_STD if half else _STD,
                )
                for seed, name in enumerate(("first", "other"))
            }
            dtype = torch.bfloat16 if half else torch.float32
            runner = {**self._runner, "dtype": "bfloat16" if half else "float32"}
            scratch = self._folder / family
            self._plays[family, half] = plays.Play(self._scale, folders["first"], folders["other"], scratch, runner)
            if not half:
                self._judges[family, half] = Judge(folders, WEIGHTS, self._device, dtype)
                continue
            judge = self._judges[family, half] = HalfJudge(folders, WEIGHTS, self._device, dtype)
            judge.calibrate()
            tolerance = {str(layer): round(value, 4) for layer, value in judge.tolerance.items()}
            self._report.conditions.setdefault("bf16_tolerance", {})[family] = tolerance
            self._parts.say(f"{family}: tolerances {tolerance}, the reference's own share {judge.own_share:.3f}")

    def _play(self, family: str, name: str, kind: Kind) -> plays.Play:
        play = self._plays[family, kind.bf16]
        scratch = play.scratch / name
        scratch.mkdir()
        return replace(play, scratch=scratch)

    async def _limited(self, play: plays.Play, kind: Kind) -> plays.Played:
        async with asyncio.timeout(_LIMIT_S):
            return await kind.make(play)

    async def _part(self, family: str, name: str, kind: Kind) -> None:
        async def both() -> None:
            played = await self._limited(self._play(family, name, kind), kind)
            await self._judge(family, name, kind, played)

        await self._parts.run(f"{family} {name}", both)
        # an engine's pool and graphs go with it
        gc.collect()

    async def _judge(self, family: str, name: str, kind: Kind, played: plays.Played) -> None:
        found = self._judges[family, kind.bf16].judge(played.answers)
        self.found.setdefault((family, kind.bf16), Findings()).add(found)
        self._report.conditions["parts"][f"{family} {name}"] = {**found.counts, **played.books, "worst": found.worst}
        self._parts.say(f"{family} {name}: {dict(found.counts)}")
        self._count()
        if found.wrong:
            self.wrong += found.wrong
            raise AssertionError(f"wrong or missing: {dict(found.counts)}; {found.worst[:3]}")

    def _count(self) -> None:
        """The figures so far."""
        figures = self._report.figures
        for half, prefix in ((False, ""), (True, "bf16_")):
            total = Findings()
            for (family, its), found in self.found.items():
                if its == half:
                    total.add(found)
                    self._put(f"{prefix}{{}}_{family}", found)
            if total.counts["answers"]:
                self._put(f"{prefix}{{}}", total)
            if half and total.counts["answers"]:
                judges = [judge for judge in self._judges.values() if isinstance(judge, HalfJudge)]
                figures["bf16_tolerance"] = round(max(max(judge.tolerance.values()) for judge in judges), 4)
                figures["bf16_reference_differs"] = round(max(judge.own_share for judge in judges), 4)
                counts = total.counts
                figures["bf16_differs"] = round(1 - counts["exact_rows"] / max(figures["bf16_rows"], 1), 4)
                distances = sorted(total.tied_distances) or [0.0]
                figures["bf16_tied_over_tolerance_median"] = round(statistics.median(distances), 4)
                figures["bf16_tied_over_tolerance_max"] = round(distances[-1], 4)

    def _put(self, name: str, found: Findings) -> None:
        counts = found.counts
        for kind in ("exact_rows", "tied_rows", "wrong_rows", "missing_rows"):
            self._report.figures[name.format(kind)] = counts[kind]
        for kind in ("exact_tokens", "tied_tokens", "wrong_tokens", "answers"):
            self._report.figures[name.format(kind)] = counts[kind]
        self._report.figures[name.format("rows")] = sum(counts[f"{kind}_rows"] for kind in ("exact", "tied", "wrong"))


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all parts ran and nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one family, a smaller model, fewer plays")
    parser.add_argument("--families", help=f"comma-separated (default: {','.join(FAMILIES)})")
    parser.add_argument("--parts", default="", help="comma-separated plays (default: all)")
    parser.add_argument("--scale", choices=sorted(plays.SCALES), help="how much is asked (default: by --quick)")
    parser.add_argument("--device", default="cuda", help='"cpu" is a rehearsal')
    parser.add_argument("--kernels", default="auto", choices=["auto", "triton", "torch"], help="of the engines")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the groups that play, a GPU each (default: none)")
    parser.add_argument("--at-once", type=int, default=0, help="plays in processes at a time (default: by the cores)")
    parser.add_argument("--json", dest="json_path", help="write the figures here, after every part")
    options = parser.parse_args(arguments)
    report = Report("exactness on the device")
    describe_device(report, options.device)
    scale = plays.SCALES[options.scale or ("quick" if options.quick else "default")]
    names = tuple(options.parts.split(",")) if options.parts else ()
    if options.quick and not names:
        names = ("tight", "update", "store", "pd_shm", "bf16_tight")
        names += ("ranks", "bf16_ranks") if options.tp > 1 else ()
    if options.tp > 1 and options.device == "cuda" and torch.cuda.device_count() < options.tp:
        parser.error(f"--tp {options.tp}: {torch.cuda.device_count()} GPUs are here")
    known = kinds(scale, options.tp)
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"no such parts: {', '.join(unknown)}; there are {', '.join(known)}; --tp N has more")
    families = tuple(options.families.split(",")) if options.families else FAMILIES[: 1 if options.quick else None]
    runner: dict[str, Any] = {"device": options.device, "kernels": options.kernels}
    if options.device == "cpu":
        # threads of torch wait for the slowest of them
        torch.set_num_threads(1)
        runner |= {"num_threads": 1, "self_check": False}
    report.conditions["scale"] = str(scale)
    parts = Parts(report, options.json_path)
    with tempfile.TemporaryDirectory(prefix="fdasync-exact-") as folder:
        exact = Exact(
            parts, report, Path(folder), scale=scale, families=families, only=names, runner=runner,
            at_once=options.at_once or max(1, len(os.sched_getaffinity(0)) // 2), ranks=options.tp,
        )  # fmt: skip
        uvloop.run(exact.run())
    return parts.finish()
