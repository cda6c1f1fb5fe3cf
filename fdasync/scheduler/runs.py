"""Gives sequences the tokens of a step that may yield several tokens of one sequence. Pure.

The tokens of a sequence are its run (docs/design.md, rule 40). A run is cut behind the token that ends its sequence:
the stop id, or the last token of its length limit. Tokens behind the cut are overrun and only counted; their KV stays
in a block that is not sealed. So are all tokens of a later step that was in flight: they follow on tokens that the
sequence does not have. A run is empty where the block table that the step was planned with had no room left. This
module knows no blocks' identities and no queues.

Called by `results.py` for a `StepDone` with counts. Where `one_each` holds, the step is handled as one without counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import InvariantBroken
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.step_plan import StepPlan


class Runs(NamedTuple):
    """What a step gave its decodes; their sequences have the tokens that count.

    Attributes:
        due: sequences that have filled a block, that end, or that the planner has to look at; and how many tokens each
            got.
        emitted: place of each token that is wanted as it comes, and its sequence.
        dropped: tokens that do not count: overrun, and all tokens of sequences that had ended.
    """

    due: list[tuple[Sequence, int]]
    emitted: list[tuple[int, Sequence]]
    dropped: int


def take_runs(plan: StepPlan, num_samplers: int, event: StepDone, config: SchedulerConfig) -> Runs:
    """Give each sequence its tokens. Raises InvariantBroken where the counts do not fit the step. `num_samplers`:
    sequences behind the decodes whose last chunk was computed; each sampled one token."""
    decodes, full = plan.decodes, plan.full
    tokens, counts = event.tokens, event.counts or ()
    most, size = config.max_run_tokens, config.block_tokens
    good = len(counts) == len(decodes) + num_samplers and sum(counts) == len(tokens)
    if not good or any(count != 1 for count in counts[len(decodes) :]):
        raise InvariantBroken(
            f"step {event.step_id} returned {len(tokens)} tokens in runs of {counts} for {len(decodes)} sequences that "
            f"decode and {num_samplers} that begin to"
        )
    due: list[tuple[Sequence, int]] = []
    emitted: list[tuple[int, Sequence]] = []
    row = dropped = 0
    for seq, count in zip(decodes, counts, strict=False):
        known = seq.tokens
        length = len(known)
        kept = 0
        if not seq.is_cut:
            room = full.get(seq.key, len(seq.blocks) * size) - length + 1
            # behind its length limit there may be no room to go on, and no token is missed
            least = room > 0 and length < seq.max_len
            if not least <= count <= most or count > room:
                raise InvariantBroken(
                    f"step {event.step_id} returned {count} tokens of sequence {seq.key}: the most are {most}, and its "
                    f"blocks have room for {room}"
                )
            # at its length limit it may await a stop answer, while a step that was in flight went on behind its last
            # token
            if length < seq.max_len:
                if count == 1:
                    known.append(tokens[row])
                    kept = 1
                else:
                    kept = _take(seq, tokens[row : row + count])
        if kept and (length + kept >= seq.due or known[-1] in seq.stop_ids):
            due.append((seq, kept))
        if seq.emits:
            emitted += [(place, seq) for place in range(row, row + kept)]
        if kept < count or seq.state is State.ENDED:
            dropped += count if seq.state is State.ENDED else count - kept
        row += count
    return Runs(due, emitted, dropped)


def one_each(plan: StepPlan, num_samplers: int, event: StepDone, *, maybe_cut: bool) -> bool:
    """Whether a step with counts gave one token of each sequence, all had room for it, and none was cut before: then it
    equals a step without counts. `maybe_cut`: a step that was in flight when this one was planned gave runs, so some
    may have been cut."""
    decodes, counts = plan.decodes, event.counts or ()
    if plan.full or len(counts) != len(decodes) + num_samplers or counts.count(1) != len(counts):
        return False
    if len(event.tokens) != len(counts):
        return False
    return not maybe_cut or not any(s.is_cut or len(s.tokens) >= s.max_len for s in decodes)


def _take(seq: Sequence, run: tuple[int, ...]) -> int:
    """Append the tokens up to the one that ends the sequence; returns how many. The sequence has not ended before."""
    known, stop_ids, max_len, min_len = seq.tokens, seq.stop_ids, seq.max_len, seq.min_len
    for number, token in enumerate(run, 1):
        known.append(token)
        if len(known) >= max_len or (token in stop_ids and len(known) >= min_len):
            seq.is_cut = number < len(run)
            return number
    return len(run)
