"""One family of the catalogue, made tiny, served in every way, and judged: what `families` does for each.

Each way is a cell, with engines of its own in this process:

    plain    mixed lengths and shared prefixes, greedy and sampled, chunked prompts beside decodes
    tight    the same on too few blocks: preemption with swaps, hits on the host, an abort
    store    two engines on one store of files, one after the other
    pd       a prefill and a decode instance
    replay   a rollout in bfloat16, and a float32 trainer's log-probs with live routers and with replay

A cell whose engines did not do what it is there for raises. Knows engines and instances by their public face.
"""

from __future__ import annotations

import traceback
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import uvloop
from fdasync_trainer import replay_routing
from fdasync_trainer.replay.force import find_routers, observed_routing
from fdasync_trainer.rows.mismatch import mismatch
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.tiny.families import FAMILIES
from fdasync_transformers.weights.quiet import no_progress_bars

import fdasync
from benchmarks.gpu import plays
from benchmarks.gpu.judge import Findings
from fdasync import Engine, Instance, SamplingParams
from fdasync.errors import UnsupportedModel
from tests.nightly.families.judge import FamilyJudge

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_transformers.tiny.families import TinyFamily

    from fdasync.result import Sample

# prompts are longer than every window of the catalogue, and than what an indexer keeps
SCALE = plays.Scale(
    size="", requests=6, prefix=(12, 20), own=(3, 24), output=(6, 14), long=24, block_tokens=4, tight=18, roomy=128,
    host=128, chunk=24, whole=128, max_running=4, graph_sizes=(1,),
)  # fmt: skip
# a prefix can be hit once a second request has shown it to be one
RECURRENT_SCALE = replace(SCALE, requests=12)
_SAMPLES = 4
# stores keep their states behind every second block: those of these small models take more bytes than whole prompts
_RECURRENT = {"state_every_tokens": 2 * SCALE.block_tokens}


class Outcome(msgspec.Struct, kw_only=True):
    """What was found of a family.

    Attributes:
        name: of the entry.
        served: an engine took it.
        reason: why no engine took it; "" where one did.
        error: class of that refusal.
        counts: exact, tied and wrong rows and tokens, missing rows, answers.
        kl_off, kl_on: K3 between rollout and trainer, in nats a token, without and with replay; None if not measured.
        replay_reason: why replay is refused; "" where it is not.
        failed: cells that raised, and what.
        worst: of what is wrong, in words.
        books: counters of the engines, by cell.
    """

    name: str
    served: bool = False
    reason: str = ""
    error: str = ""
    counts: dict[str, int] = {}
    kl_off: float | None = None
    kl_on: float | None = None
    replay_reason: str = ""
    failed: dict[str, str] = {}
    worst: list[str] = []
    books: dict[str, dict[str, float]] = {}

    @property
    def rows_wrong(self) -> int:
        """Rows that are wrong or missing."""
        return self.counts.get("wrong_rows", 0) + self.counts.get("missing_rows", 0)

    @property
    def tokens_wrong(self) -> int:
        return self.counts.get("wrong_tokens", 0)

    def false_reason(self, entry: TinyFamily) -> str:
        """What contradicts the catalogue: a refusal that should not be or is not true; "" if nothing does."""
        if self.served and entry.refused:
            return f"it is served, and the catalogue says that it is refused: {' or '.join(entry.refused)}"
        if not self.served and not self.failed:
            if not entry.refused:
                return f"it should be served: {self.error}: {self.reason}"
            if self.error != UnsupportedModel.__name__ or not _names(self.reason, entry.refused):
                return f"it does not say {' or '.join(entry.refused)}: {self.error}: {self.reason}"
        if self.replay_reason and not _names(self.replay_reason, entry.replay_refused):
            return f"replay: {self.replay_reason}"
        if self.kl_on is not None and entry.replay_refused:
            return f"its replay runs, and the catalogue says that it is refused: {' or '.join(entry.replay_refused)}"
        return ""


def _names(reason: str, words: tuple[str, ...]) -> bool:
    return any(word in reason.lower() for word in words)


def play_family(name: str, folder: Path, cells: tuple[str, ...] = ()) -> Outcome:
    """Make a family's checkpoint in a folder, serve it, and judge everything. Blocks until all is done.

    Args:
        name: of an entry of the catalogue.
        folder: an empty one.
        cells: names of `CELLS`; empty for all.
    """
    with no_progress_bars():
        reference = make_tiny_checkpoint(folder / "model", name)
    return uvloop.run(_play(name, reference, folder, cells or tuple(CELLS)))


async def _play(name: str, reference: Any, folder: Path, cells: tuple[str, ...]) -> Outcome:
    outcome = Outcome(name=name)
    runner = {"device": "cpu", "dtype": "float32", "num_threads": 1, "self_check": False}
    recurrent = FAMILIES[name].recurrent
    play = plays.Play(
        RECURRENT_SCALE if recurrent else SCALE,
        folder / "model",
        folder / "model",
        folder,
        runner,
        _RECURRENT if recurrent else {},
    )
    try:
        async with Engine(play.config(process="inline", runner_config={**runner, "self_check": True})):
            outcome.served = True
    except Exception as error:
        outcome.reason = error.reason if isinstance(error, UnsupportedModel) else str(error)
        outcome.error = type(error).__name__
        return outcome
    judge, found = FamilyJudge(reference), Findings()
    for cell in cells:
        try:
            if cell == "replay":
                await replayed(play, reference, outcome)
                continue
            played = await CELLS[cell](play)
            found.add(judge.judge(played.answers))
            outcome.books[cell] = played.books
        except Exception as error:
            traceback.print_exc()
            outcome.failed[cell] = f"{type(error).__name__}: {error}"
    outcome.counts = dict(found.counts)
    outcome.worst = found.worst
    return outcome


async def plain(play: plays.Play) -> plays.Played:
    """Chunked prompts beside decodes, on enough blocks."""
    played = plays.Played()
    async with Engine(play.config(process="inline", num_blocks=play.scale.roomy)) as engine:
        played.answers = await plays.burst(engine, play.jobs(0))
        engine.check()
        played.books = plays.demand(engine.stats().scheduler, steps=1, hit_tokens=1)
    return played


async def tight(play: plays.Play) -> plays.Played:
    return await plays.tight(play, process="inline")


async def apart(play: plays.Play) -> plays.Played:
    """A prefill and a decode instance in this process, and a router."""
    played = plays.Played()
    async with AsyncExitStack() as stack:
        addresses = []
        for role in ("prefill", "decode"):
            config = play.config(process="inline", num_blocks=play.scale.roomy, role=role)
            instance = Instance(config, listen=f"ipc://{play.scratch}/{role}", name=role)
            addresses.append((await stack.enter_async_context(instance)).address)
        router = await stack.enter_async_context(fdasync.connect(addresses))
        played.answers = await plays.burst(router, play.jobs(7))
        played.books = {"received_blocks": await plays.received(router)}
    return played


async def replayed(play: plays.Play, reference: Any, outcome: Outcome) -> None:
    """K3 between a rollout in bfloat16 and the reference, without and with replay."""
    runner = {**play.runner, "dtype": "bfloat16"}
    params = SamplingParams(n=_SAMPLES, max_tokens=16, temperature=1.0, ignore_eos=True, logprobs="raw", seed=1)
    samples: list[tuple[list[int], Sample]] = []
    async with Engine(play.config(process="inline", num_blocks=play.scale.roomy, runner_config=runner)) as engine:
        for job in play.jobs(9):
            result = await engine.complete(job.prompt, params)
            samples += [([*job.prompt, *sample.token_ids], sample) for sample in result.samples]
    rollout = [np.asarray(sample.raw_logprobs, np.float64) for _, sample in samples]
    outcome.kl_off = mismatch(rollout, _recomputed(reference, samples)).k3
    try:
        with replay_routing(reference, [sample.routing for _, sample in samples]) as replay:
            again = _recomputed(reference, samples, replayed=True)
    except UnsupportedModel as error:
        outcome.replay_reason = error.reason
        return
    if replay.replayed_tokens != sum(len(ids) - 1 for ids, _ in samples):
        raise AssertionError(f"{replay.replayed_tokens} tokens were replayed")
    outcome.kl_on = mismatch(rollout, again).k3


def _recomputed(model: Any, samples: list[tuple[list[int], Sample]], *, replayed: bool = False) -> list[Any]:
    """Log-probs of each sample's tokens, of one padded batch; raises where experts are not those of the rows."""
    width = max(len(ids) for ids, _ in samples)
    table, mask = np.zeros((2, len(samples), width), np.int64)
    for row, (ids, _) in enumerate(samples):
        table[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    seen: dict[int, torch.Tensor] = {}
    with torch.no_grad(), observed_routing(model, seen):
        logits = model(input_ids=torch.from_numpy(table), attention_mask=torch.from_numpy(mask), use_cache=False).logits
    chances = logits.double().log_softmax(-1)
    found = []
    for row, (ids, sample) in enumerate(samples):
        stop = len(ids) - 1
        targets = torch.tensor(ids[-len(sample.token_ids) :])
        first = len(ids) - len(sample.token_ids) - 1
        found.append(chances[row, first:stop].gather(1, targets.unsqueeze(1)).squeeze(1).numpy())
        for index, layer in enumerate(find_routers(model) if replayed else ()):
            own = seen[layer].view(*table.shape, -1)[row, :stop].numpy()
            wanted = sample.routing.array[:, index, : own.shape[-1]]
            if not np.array_equal(np.sort(own, -1), np.sort(wanted.astype(np.int64), -1)):
                raise AssertionError(f"layer {layer} of sample {row} computed other experts than the rollout's")
    return found


CELLS: dict[str, Any] = {"plain": plain, "tight": tight, "store": plays.stored, "pd": apart, "replay": replayed}
