"""The drafts of steps: tells the drafter of sequences and their tokens, and asks it for each step; counts what the
runner drafts by itself. Pure.

A sequence begins to draft when its first token is known and it is to decode here, and ends with its result. In between
it may be preempted: the drafter keeps what it knows, and the sequence drafts again once it decodes again. While the
drafter is switched off, since its drafts do not pay, tokens cost nothing here: they stand in the sequence anyway.
Before it is asked again it is told everything of those that live, at once, and of the latest of their groups that
ended; a drafter that outlasts sequences is told of each at its end. This module knows no queue and no block;
`fdasync.drafting` says which drafts pay. It is an attachment of the scheduler, where there is a drafter.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from fdasync.drafting import Beginning, DraftCounters, DrafterLimits, DraftPlanner, OwnBudget, make_drafter
from fdasync.errors import InvariantBroken
from fdasync.scheduler.state.attachment import Attachment, Holds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.drafting import Drafter
    from fdasync.events.actions import FinishReason
    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.state.step_plan import StepPlan

# latest sequences that ended untold: so many for each that may run
_OVER = 4


def drafter_limits(config: SchedulerConfig) -> DrafterLimits:
    """The limits of the drafter that the configuration names."""
    return DrafterLimits.of(config.max_run_tokens - 1, config.pipeline_depth, config.max_running)


class _Live:
    """A sequence that drafts.

    Attributes:
        seq: it.
        length: how many tokens it had when it began.
        is_told: the planner knows it.
        resumed: tokens that no decode step gave, the first ones after a preemption, and that the planner was not told.
    """

    __slots__ = ("is_told", "length", "resumed", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.length = len(seq.tokens)
        self.is_told = False
        self.resumed = 0

    def untold(self, known: int) -> tuple[list[int], int]:
        """Its tokens behind the first `known`, and how many decode steps gave them; from now on they count as told."""
        more = self.seq.tokens[known:]
        steps, self.resumed = len(more) - self.resumed, 0
        return more, steps

    def beginning(self) -> Beginning:
        """All of it; from now on it is told."""
        seq = self.seq
        tokens = array("i", seq.tokens).tobytes()
        steps = self.untold(self.length)[1]
        self.is_told = True
        cut = 4 * seq.prompt_len
        return Beginning(seq.key, seq.group, tokens[:cut], tokens[cut:], seq.max_len, seq.salt, steps)


class StepDrafts(Attachment):
    """See the module. Its methods raise PluginError where the drafter raises or breaks its contract; then the scheduler
    cannot go on.

    Args:
        config: names a drafter, the runner's own, or both.
        drafter: the engine's, made with `drafter_limits` or wider ones; None: it is made here if it has a name, which
            raises PluginError and ConfigError.
    """

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None) -> None:
        self._planner: DraftPlanner | None = None
        if config.drafter:
            if drafter is None:
                drafter = make_drafter(config.drafter, config.drafter_config, drafter_limits(config))
            self._planner = DraftPlanner(
                drafter,
                name=config.drafter,
                max_drafts=config.max_run_tokens - 1,
                depth=config.pipeline_depth,
                weighs=config.weighs_drafts,
            )
        self._own = DraftCounters(config.own_drafter, 0, 0, 0)
        # None: the runner drafts as many as it may
        self._own_budget = OwnBudget(config.max_run_tokens - 1) if config.own_drafter and config.weighs_drafts else None
        # sequences that draft, those among them that the planner does not know, and those that ended unknown to it
        self._live: dict[int, _Live] = {}
        self._untold: dict[int, _Live] = {}
        self._over: deque[Beginning] = deque(maxlen=_OVER * config.max_running)
        # steps have completed whose tokens the planner was not told
        self._lags = False
        # of the steps in flight, whether the engine's drafter has paths in them
        self._with_paths: deque[bool] = deque()
        # where the runner drafts by itself, by live sequence: decode steps that gave tokens of it, the runner's drafts,
        # its accepted drafts
        self._begun: dict[int, tuple[int, int, int]] = {}
        # of the last plan: plans share the list while no sequence joins or leaves
        self._decodes: list[Sequence] = []
        self._keys: tuple[int, ...] = ()

    def answers(self, seq: Sequence) -> None:
        """Does nothing where the sequence has begun before."""
        if self._own.drafter:
            self._begun.setdefault(seq.key, (0, 0, 0))
        if self._planner is not None and seq.key not in self._live:
            self._live[seq.key] = self._untold[seq.key] = _Live(seq)

    def planned(self, plan: StepPlan) -> None:
        """Drafts for the step, and how many the runner drafts behind it (`RunStep.own_drafts`)."""
        decodes = plan.decodes
        if self._planner is not None:
            if decodes is not self._decodes:
                self._decodes = decodes
                self._keys = tuple([seq.key for seq in decodes])
            plan.drafts = self._planner.plan(self._keys, self._tell)
        if self._own_budget is not None:
            self._with_paths.append(plan.drafts is not None)
            plan.own_drafts = self._own_budget.plan(len(decodes))

    def stepped(self, plan: StepPlan, samplers: list[Sequence], event: StepDone, seconds: float) -> None:
        decodes, decodes_s = plan.decodes, None if plan.chunks else seconds
        if self._own.drafter:
            self._count_own(decodes, event, decodes_s)
        if self._planner is None:
            return
        keys = self._keys if decodes is self._decodes else tuple([seq.key for seq in decodes])
        if samplers:
            keys += tuple([seq.key for seq in samplers])
        counts = event.counts
        if counts is not None and counts.count(1) == len(counts) == len(event.tokens):
            counts = None
        is_told = self._planner.done(keys, counts, event.tokens, seconds=decodes_s)
        self._lags |= not is_told
        for seq in samplers:
            live = self._live.get(seq.key)
            if live is not None and not (is_told and live.is_told):
                live.resumed += 1

    def ended(self, seq: Sequence, reason: FinishReason, keep: int) -> int:
        """It may end wherever it stands; steps in flight may still name it."""
        seq.drafts = own = self._begun.pop(seq.key, (0, 0, 0))
        live = self._live.pop(seq.key, None)
        if self._planner is None or live is None:
            return keep
        if live.is_told:
            steps, drafted, accepted = self._planner.tally(seq.key)
            # without a lag only a run that was cut has tokens there, which are not the sequence's own
            more, late_steps = live.untold(*self._planner.lengths((seq.key,))) if self._lags else ([], 0)
            if more:
                self._planner.take((seq.key,), [0], [len(more)], more)
            steps += late_steps
        else:
            del self._untold[seq.key]
            drafted = accepted = 0
            told = live.beginning()
            steps = told.steps
            if self._planner.outlasts:
                self._planner.begin([told], now=self.core.now)
            else:
                self._over.append(told)
        self._planner.end(seq.key, now=self.core.now)
        seq.drafts = own[0] if self._own.drafter else steps, own[1] + drafted, own[2] + accepted
        return keep

    def _tell(self) -> None:
        """Tell the planner everything of the sequences that live, and of those that ended beside them."""
        assert self._planner is not None
        if self._lags:
            self._lags = False
            known = [live for live in self._live.values() if live.is_told]
            lengths = self._planner.lengths(tuple([live.seq.key for live in known]))
            news = [
                (live.seq.key, *live.untold(length))
                for live, length in zip(known, lengths, strict=True)
                if len(live.seq.tokens) > length
            ]
            if news:
                keys, tokens, steps = zip(*news, strict=True)
                self._planner.take(keys, steps, [*map(len, tokens)], [token for some in tokens for token in some])
        if self._untold or self._over:
            groups = {live.seq.group for live in self._live.values()}
            over = [told for told in self._over if told.group in groups]
            if fresh := [*[live.beginning() for live in self._untold.values()], *over]:
                self._planner.begin(fresh, now=self.core.now)
            for told in over:
                self._planner.end(told.key, now=self.core.now)
            self._untold.clear()
            self._over.clear()

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for prefix, counted in (("", self._planner and self._planner.counters), ("own_", self._own)):
            if counted:
                words = ("drafter", "drafted_tokens", "accepted_tokens", "drafting_steps")
                found.update(zip([prefix + word for word in words], counted, strict=True))
        return found

    def check(self, live: Iterable[Sequence]) -> Holds:
        """Raise InvariantBroken where a sequence that is not live has not ended here."""
        begun = self._begun.keys() if self._planner is None else self._live.keys()
        left = set(begun) - {seq.key for seq in live}
        if left:
            raise InvariantBroken(f"sequences {sorted(left)} have ended, and their drafts have not")
        return Holds()

    def _count_own(self, decodes: list[Sequence], event: StepDone, seconds: float | None) -> None:
        """Count the runner's drafts of a step that completed. Raises InvariantBroken where it does not tell them."""
        counts, forwarded = event.counts, event.own_drafts
        if counts is None or forwarded is None or not len(counts) == len(forwarded) >= len(decodes):
            raise InvariantBroken(f"step {event.step_id} does not tell the drafts of {self._own.drafter}")
        total = right = 0
        begun = self._begun
        for seq, count, drafts in zip(decodes, counts, forwarded, strict=False):
            # a sequence may have ended since the step was planned
            if count and seq.key in begun:
                kept = min(drafts, count - 1)
                total, right = total + drafts, right + kept
                steps, drafted, accepted = begun[seq.key]
                begun[seq.key] = (steps + 1, drafted + drafts, accepted + kept)
        name, drafted, accepted, steps = self._own
        self._own = DraftCounters(name, drafted + total, accepted + right, steps + (total > 0))
        if self._own_budget is not None:
            if self._with_paths.popleft():
                seconds = None
            self._own_budget.done(forwarded[: len(decodes)], counts[: len(decodes)], seconds)
