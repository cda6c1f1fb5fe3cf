"""Takes what a step gave: tokens for their sequences, blocks that are complete, rows that can be copied. Pure.

A step may yield several tokens of one sequence, its run (docs/design.md, rule 40). A run is cut behind the token that
ends its sequence: the stop id, or the last token of its length limit. Tokens behind the cut are overrun and only
counted; their KV stays in a block that is not sealed. So are all tokens of a later step that was in flight: they follow
on tokens that the sequence does not have. A run is empty where the block table that the step was planned with had no
room left.

This module knows no events but `StepDone`, and ends no sequence: `core.py`, which calls it, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.identity import block_key
from fdasync.errors import InvariantBroken
from fdasync.events.actions import EmitTokens
from fdasync.scheduler.state.attachment import Attachment, asked
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.step_plan import StepPlan
    from fdasync.scheduler.stats import Counters
    from fdasync.scheduler.step_planner import StepPlanner
    from fdasync.scheduler.tiers.parts import Parts

# A decoding sequence asks for its rows once in so many blocks: asking costs more than copying a block's rows. What is
# left is asked for when the sequence ends or gives up its blocks, so this bounds the rows that are copied at once.
_ROW_BLOCKS = 8


class StepResults:
    """See the module.

    Args:
        planner: looks at the sequences that are due.
        complete: called with a sequence that has all its tokens, the reason, and the token that ended it, if one did.

    Attributes:
        emits: tokens that are wanted as they come; `core.py` takes them.
    """

    def __init__(self, parts: Parts, planner: StepPlanner, counters: Counters, complete: Callable[..., None]) -> None:
        self._config = parts.config
        self._index = parts.index
        self._queues = parts.queues
        self._store_planner = parts.store_planner
        self._writes = parts.writes
        self._spans = parts.spans
        self._planner = planner
        self._counters = counters
        self.emits: list[EmitTokens] = []
        self._complete = complete
        self._step_ended_at = 0.0
        # the last step that gave runs of tokens
        self._runs_step = -parts.config.pipeline_depth

    def bind(self, attachments: list[Attachment]) -> None:
        """Ask these from now on."""
        self._stepped = asked(Attachment.stepped, attachments)
        self._sealed = asked(Attachment.sealed, attachments)
        self._answers = asked(Attachment.answers, attachments)

    def take(self, plan: StepPlan, event: StepDone) -> None:
        """The oldest step in flight is done. Raises InvariantBroken where its tokens do not fit it."""
        tokens = event.tokens
        samplers = [chunk.seq for chunk in plan.chunks if chunk.last]
        # (sequence, how many tokens its decode gave) of sequences that are due, or may have ended
        attention: list[tuple[Sequence, int]] = []
        maybe_cut = plan.step_id - self._runs_step < self._config.pipeline_depth
        if event.counts is not None and not one_each(plan, len(samplers), event, maybe_cut=maybe_cut):
            self._runs_step = plan.step_id
            rows = self._take_runs(plan, len(samplers), event, attention)
        elif len(tokens) != len(plan.decodes) + len(samplers):
            raise InvariantBroken(
                f"step {event.step_id} returned {len(tokens)} tokens for {len(plan.decodes) + len(samplers)} sequences"
            )
        else:
            # the hot loop: the cost of a token when nothing else happens
            may_stop = not plan.stop_ids.isdisjoint(tokens)
            for seq, token in zip(plan.decodes, tokens, strict=False):
                known = seq.tokens
                known.append(token)
                if len(known) >= seq.due or (may_stop and token in seq.stop_ids):
                    attention.append((seq, 1))
            rows = [pair for pair in plan.emitters if pair[1].emits]
            if self._queues.is_draining:
                self._counters.dropped += sum(1 for seq in plan.decodes if seq.state is State.ENDED)
        seconds = self._measure(plan, event.at)
        for stepped in self._stepped:
            stepped(plan, samplers, event, seconds)
        for chunk in plan.chunks:
            self._chunk_done(chunk.seq, chunk.start, chunk.stop)
        first = len(tokens) - len(samplers)
        for row, seq in enumerate(samplers, first):
            seq.tokens.append(tokens[row])
            seq.decoding = True
            attention.append((seq, 0))
            if seq.emits:
                rows.append((row, seq))
            self._counters.dropped += seq.state is State.ENDED
        if rows:
            keys = tuple([seq.key for _, seq in rows])
            self.emits.append(
                EmitTokens(plan.step_id, keys, tuple([tokens[row] for row, _ in rows]), tuple([row for row, _ in rows]))
            )
        due, size = self._planner.due, self._config.block_tokens
        for seq, count in attention:
            length, last = len(seq.tokens), seq.tokens[-1]
            if (length - 1) % size < count:
                self._seal_decoded(seq, count)
            if length >= seq.max_len or last in seq.stop_ids:
                self.took(seq, last)
            if length < seq.near:
                # it has just sealed a block, and has room for more
                seq.due = min(seq.near, length - (length - 1) % size + size)
            elif seq.state is State.DECODE:
                due[seq.key] = seq
        for answers in self._answers:
            for seq in samplers:
                # its last token may have been planned already
                if seq.state is State.DECODE or (seq.state is State.TAIL and len(seq.tokens) < seq.max_len):
                    answers(seq)
        self._queues.step_done(plan.step_id)

    def _take_runs(
        self, plan: StepPlan, num_samplers: int, event: StepDone, attention: list[tuple[Sequence, int]]
    ) -> list[tuple[int, Sequence]]:
        """Give the decodes their runs, and extend `attention`; returns the place of each token that is wanted as it
        comes, and its sequence. `num_samplers` sequences behind the decodes sampled one token each."""
        decodes, full = plan.decodes, plan.full
        tokens, counts = event.tokens, event.counts or ()
        most, size = self._config.max_run_tokens, self._config.block_tokens
        good = len(counts) == len(decodes) + num_samplers and sum(counts) == len(tokens)
        if not good or any(count != 1 for count in counts[len(decodes) :]):
            raise InvariantBroken(
                f"step {event.step_id} returned {len(tokens)} tokens in runs of {counts} for {len(decodes)} sequences "
                f"that decode and {num_samplers} that begin to"
            )
        emitted: list[tuple[int, Sequence]] = []
        row = 0
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
                        f"step {event.step_id} returned {count} tokens of sequence {seq.key}: the most are {most}, and "
                        f"its blocks have room for {room}"
                    )
                # at its length limit it may await a stop answer, while a step in flight went on behind its last token
                if length < seq.max_len:
                    if count == 1:
                        known.append(tokens[row])
                        kept = 1
                    else:
                        kept = _take(seq, tokens[row : row + count])
            if kept and (length + kept >= seq.due or known[-1] in seq.stop_ids):
                attention.append((seq, kept))
            if seq.emits:
                emitted += [(place, seq) for place in range(row, row + kept)]
            if kept < count or seq.state is State.ENDED:
                self._counters.dropped += count if seq.state is State.ENDED else count - kept
            row += count
        return emitted

    def _measure(self, plan: StepPlan, now: float) -> float:
        """Returns the seconds that the step took. Measures how fast prefill is, for the store's cost model, from steps
        that are mostly prefill."""
        started, self._step_ended_at = max(plan.planned_at, self._step_ended_at), now
        if plan.chunks and self._store_planner.enabled:
            tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
            if tokens >= self._config.block_tokens and tokens > len(plan.decodes) and now > started:
                self._store_planner.rates.prefilled(tokens, now - started)
        return now - started

    def took(self, seq: Sequence, token: int) -> None:
        """The sequence got this token: it may be its last one."""
        if token in seq.stop_ids and len(seq.tokens) >= seq.min_len:
            self._complete(seq, "stop", token)
        if len(seq.tokens) >= seq.max_len and seq.state is not State.ENDED:
            self._complete(seq, "length")

    def _chunk_done(self, seq: Sequence, start: int, stop: int) -> None:
        size = self._config.block_tokens
        for number in range(start // size, stop // size):
            self._index.seal(seq.blocks[number])
            for sealed in self._sealed:
                sealed(seq, number, seq.keys[number] if self._index.enabled and seq.indexed else None)
            if self._writes.through:
                self._writes.write_through(seq, number)
        seq.computed_prefill = stop
        seq.scored(stop)
        if seq.state is not State.ENDED:
            # rows of sealed blocks, and of hits that this step was the first to read
            seq.take_rows(stop // size * size, size, self._spans)

    def _seal_decoded(self, seq: Sequence, count: int) -> None:
        """The last step forwarded `count` tokens of `seq`: seal the blocks that they filled."""
        size = self._config.block_tokens
        stop = len(seq.tokens) - 1
        is_shared = self._index.enabled and seq.indexed
        for number in range((stop - count) // size, stop // size):
            key = None
            if is_shared:
                parent = seq.keys[number - 1] if number else seq.root
                key = block_key(parent, seq.tokens[number * size : (number + 1) * size])
                seq.keys.append(key)
            self._index.seal(seq.blocks[number], key)
            for sealed in self._sealed:
                sealed(seq, number, key)
            if self._writes.through:
                self._writes.write_through(seq, number)
            # apart by the key, so that sequences that began together do not ask in the same step
            if (number + seq.key) % _ROW_BLOCKS == 0 and seq.state is not State.ENDED:
                seq.take_rows((number + 1) * size, size, self._spans)


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
