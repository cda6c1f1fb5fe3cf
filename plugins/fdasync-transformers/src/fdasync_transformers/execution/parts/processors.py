"""Logits processors of a step: the logits of sequences that ask for some are changed before they are sampled from.

They see the tokens that the device knows, also while the host does not: samples of the step before, and drafts. What
they make is a copy, so raw log-probs and what ranks compare are of the model's own logits. A request whose processor
fails ends, and its rows keep the model's logits until it has. Called as parts are (`step_part.py`), in the process that
samples; in front of `samples.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from fdasync.errors import BadInput
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.sampling.processors import ProcessedRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.events.actions import RunStep
    from fdasync.runner.base import StepOutput
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.parts.step_part import Arrays, StepWork, Tensors
    from fdasync_transformers.sampling.processors import LogitsProcessor

# what a plugin may raise and its request ends with; an interrupt of the process is none of it
_ANYTHING = (Exception, asyncio.CancelledError)
_MOST_CHARS = 1000


class _Asked(NamedTuple):
    """Names and settings of a sequence, in its order."""

    prompt_length: int
    chain: tuple[tuple[str, Any], ...]


class _Group(NamedTuple):
    """Rows that ask for one processor at one place of their chains."""

    name: str
    place: int
    rows: list[int]


class Chains(NamedTuple):
    """The rows of a step with processors.

    Attributes:
        samples: which of the step's samples each is.
        keys: the sequence of each.
        asked: what it asks for.
        groups: in the order in which they are asked.
        raised: problems by row, as they are found.
        failed: problems by sequence.
    """

    samples: list[int]
    keys: list[int]
    asked: list[_Asked]
    groups: list[_Group]
    raised: dict[int, str]
    failed: dict[int, str]


class Processors(StepPart[Chains]):
    """See the module."""

    name = "processors"

    def __init__(self, bound: Bound, lanes: DeviceLanes) -> None:
        self._bound = bound
        self._table: InputBatch = bound.table
        self._lanes = lanes
        self._asked: dict[int, _Asked] = {}
        # problems of sequences that were told, and that the step which is planned next tells
        self._told: set[int] = set()
        self._untold: dict[int, str] = {}

    def plan(self, work: StepWork) -> PartWork[Chains] | None:
        self._follow(work.step)
        batch = work.batch
        # in host memory
        keys = [self._table.keys[lane] for lane in batch.lanes[batch.sampled].tolist()] if len(work.rows) else []
        chosen = [number for number, key in enumerate(keys) if key in self._asked]
        failed, self._untold = self._untold, {}
        if not chosen and not failed:
            return None
        own = [keys[number] for number in chosen]
        asked = [self._asked[key] for key in own]
        plan = Chains(chosen, own, asked, _groups(asked), {}, failed)
        if not chosen:
            return PartWork(self, plan)
        samples = np.array(chosen, np.int64)
        entries = batch.sampled[samples]
        arrays: Arrays = {
            "samples": samples,
            "lanes": batch.lanes[entries],
            # where a row's first position stands among what is sent, by how tokens attend; and what is behind it
            "rows": work.rows[samples],
            "entries": entries,
            "counts": batch.counts[entries],
        }
        arrays |= {f"group{number}": np.array(group.rows, np.int64) for number, group in enumerate(plan.groups)}
        return PartWork(self, plan, arrays)

    def _follow(self, step: RunStep) -> None:
        """Take on the sequences that enter."""
        for key in step.leaves:
            self._asked.pop(key, None)
            self._told.discard(key)
            self._untold.pop(key, None)
        for start in step.starts:
            if not start.sampler.processors:
                continue
            chain, name = [], "processors"
            try:
                for name, settings in msgspec.json.decode(start.sampler.processors):
                    chain.append((name, self._bound.processors[name].read(settings)))
            except _ANYTHING as error:
                self._untold[start.key] = _words(name, error)
            else:
                self._asked[start.key] = _Asked(start.sampler.prompt_len, tuple(chain))

    def after(self, work: StepWork, own: PartWork[Chains]) -> Tensors:
        if work.passed is None or not own.plan.samples:
            return {}
        sent, logits = own.sent, self._bound.trim(work.passed.logits)
        at, counts = (sent["rows"], 1) if work.way == "decodes" else (sent["entries"], sent["counts"])
        lengths = work.sent["starts"].index_select(0, at) + counts
        plain = logits.index_select(0, sent["samples"])
        changed = plain.to(torch.float32, copy=True)
        for number, group in enumerate(own.plan.groups):
            chosen = sent[f"group{number}"]
            asked = [own.plan.asked[row] for row in group.rows]
            rows = ProcessedRows(
                changed.index_select(0, chosen),
                self._lanes.tokens,
                sent["lanes"].index_select(0, chosen),
                lengths.index_select(0, chosen),
                [one.prompt_length for one in asked],
                [one.chain[group.place][1] for one in asked],
            )
            made, failed = self._process(group.name, rows, chosen, changed)
            for row, problem in failed:
                own.plan.raised.setdefault(group.rows[row], problem)
            changed.index_copy_(0, chosen, made)
        narrow = changed.to(logits.dtype)
        # NaN wins a maximum, so the largest logit shows any bad one
        sound = torch.isfinite(narrow.amax(-1))
        work.processed = logits.index_copy(0, sent["samples"], narrow.where(sound[:, None], plain)), sent["samples"]
        return {"sound": sound}

    def _process(
        self, name: str, rows: ProcessedRows, chosen: torch.Tensor, changed: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        """Ask a processor for the `chosen` rows of `changed`: their logits, and the rows that it fails, which keep
        theirs, with the problem."""
        processor, logits = self._bound.processors[name], rows.logits
        try:
            _ask(processor, rows)
        except _ANYTHING:
            # which row it was is found out
            logits = changed.index_select(0, chosen)
        else:
            return logits, []
        failed = []
        for row in range(len(chosen)):
            alone = replace(rows, logits=logits.clone()).row(row)
            try:
                _ask(processor, alone)
            except _ANYTHING as error:
                failed.append((row, _words(name, error)))
            else:
                logits[row].copy_(alone.logits[0])
        return logits, failed

    def read(self, work: StepWork, own: PartWork[Chains], fetched: Mapping[str, Any], output: StepOutput) -> StepOutput:
        plan, failed = own.plan, own.plan.failed
        if plan.samples:
            # of a row behind a draft that was wrong nothing counts; in host memory, as all that was fetched
            stands = None if work.settled is None else set(work.settled.samples.tolist())
            for row, (sample, key, sound, asked) in enumerate(
                zip(plan.samples, plan.keys, fetched["sound"].tolist(), plan.asked, strict=True)
            ):
                if (row in plan.raised or not sound) and (stands is None or sample in stands):
                    names = ", ".join(name for name, _ in asked.chain)
                    unsound = f"{names}: NaN, +inf, or nothing finite among the logits"
                    failed.setdefault(key, plan.raised.get(row, unsound))
        new = tuple((key, problem) for key, problem in failed.items() if key not in self._told)
        self._told.update(failed)
        for key in failed:
            self._asked.pop(key, None)
        return msgspec.structs.replace(output, unprocessed=new) if new else output


def _ask(processor: LogitsProcessor, rows: ProcessedRows) -> None:
    """Raises what the processor does, and ValueError for logits of another shape."""
    logits, shape = rows.logits, rows.logits.shape
    processor.process(rows)
    if rows.logits is not logits or logits.shape != shape:
        raise ValueError(f"the logits became {tuple(rows.logits.shape)}; change them in place")


def _words(name: str, error: BaseException) -> str:
    """A problem that any message has room for, and any encoding."""
    try:
        said = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
    except Exception:  # an error may be broken, too
        said = type(error).__name__
    return f"{name}: {said}"[:_MOST_CHARS].encode("utf-8", "backslashreplace").decode()


def _groups(asked: list[_Asked]) -> list[_Group]:
    """Each processor is asked for all of its rows that have it at the same place of their chains."""
    found: dict[tuple[int, str], list[int]] = {}
    for row, one in enumerate(asked):
        for place, (name, _) in enumerate(one.chain):
            found.setdefault((place, name), []).append(row)
    return [_Group(name, place, found[place, name]) for place, name in sorted(found)]
