"""Plays of `gpu_exact`, one after the other, and what their judges find.

One after the other: plays in this process block its loop, which routers do not like, and groups of ranks lock GPUs.
Knows no options. Called by `exact.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers import make_random_checkpoint

from benchmarks.gpu import plays
from benchmarks.gpu.half import HalfJudge
from benchmarks.gpu.judge import Findings, Judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.gpu.kinds import Kind
    from benchmarks.lib.parts import Parts

# weights of each version in the plays
_WEIGHTS = {0: "first", 1: "other", 2: "first"}
_LIMIT_S = 150.0
# of the checkpoints' weights; with wide ones roundings grow from layer to layer, and any row could be a tie
_STD, _CALM_STD = 0.3, 0.1
_FIGURES = (
    *("exact_rows", "tied_rows", "wrong_rows", "missing_rows"),
    *("exact_tokens", "tied_tokens", "wrong_tokens", "answers"),
)


async def play_all(
    parts: Parts,
    scale: plays.Scale,
    folder: Path,
    families: Sequence[str],
    kinds: Mapping[str, Kind],
    runner: Mapping[str, Any],
) -> None:
    """Play all kinds with all families. `runner`: keys of `runner_config` for all engines."""
    parts.report.conditions |= {"scale": str(scale), "parts": {}, "bf16": {}}
    if runner["device"] == "cpu":
        # threads of torch wait for the slowest of them
        torch.set_num_threads(1)
    totals = {False: Findings(), True: Findings()}
    for family in families:
        for bf16 in sorted({kind.bf16 for kind in kinds.values()}):
            own = folder / f"{family}{'_bf16' if bf16 else ''}"
            made = await parts.run(own.name, _make, parts, scale, own, family, bf16, runner)
            for name, kind in kinds.items():
                if made is not None and kind.bf16 == bf16:
                    await parts.run(f"{family} {name}", _one, parts, family, name, kind, *made, totals[bf16])


async def _make(
    parts: Parts, scale: plays.Scale, folder: Path, family: str, bf16: bool, runner: Mapping[str, Any]
) -> tuple[plays.Play, Judge]:
    """Two checkpoints of a family in a dtype, and who judges them."""
    std = _CALM_STD if bf16 else _STD
    folders = {
        name: make_random_checkpoint(folder / name, family, seed=seed, size=scale.size, std=std)
        for seed, name in enumerate(("first", "other"))
    }
    runner = {**runner, "dtype": "bfloat16" if bf16 else "float32"}
    play = plays.Play(scale, folders["first"], folders["other"], folder, runner)
    device = torch.device(runner["device"])
    if not bf16:
        return play, Judge(folders, _WEIGHTS, device, torch.float32)
    judge = HalfJudge(folders, _WEIGHTS, device, torch.bfloat16)
    judge.calibrate()
    tolerance = {str(layer): round(value, 4) for layer, value in judge.tolerance.items()}
    parts.report.conditions["bf16"][family] = {"tolerance": tolerance, "reference_differs": round(judge.own_share, 4)}
    return play, judge


async def _one(
    parts: Parts, family: str, name: str, kind: Kind, play: plays.Play, judge: Judge, total: Findings
) -> None:
    """Play, judge, and tell; raises AssertionError where something is wrong or missing."""
    scratch = play.scratch / name
    scratch.mkdir()
    async with asyncio.timeout(_LIMIT_S):
        played = await getattr(plays, kind.play)(replace(play, scratch=scratch), **kind.values)
    found = judge.judge(played.answers)
    total.add(found)
    parts.report.conditions["parts"][f"{family} {name}"] = {**found.counts, **played.books, "worst": found.worst}
    for figure in _FIGURES:
        parts.report.figures[f"bf16_{figure}" if kind.bf16 else figure] = total.counts[figure]
    if found.wrong:
        raise AssertionError(f"wrong or missing: {dict(found.counts)}; {found.worst[:3]}")
