"""The drafts of steps: tells the drafter of sequences and their tokens, and asks it for each step; counts what the
runner drafts by itself. Pure.

A sequence begins to draft when its first token is known and it is to decode here, and ends with its result. In between
it may be preempted: the drafter keeps what it knows, and the sequence drafts again once it decodes again. All that is
told late, when the drafter is asked for paths (`held_text.py`). This module knows no queue and no block;
`fdasync.drafting` says which drafts pay. Called by `core.py` and `step_planner.py`, where the configuration names a
drafter, or the runner has one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fdasync.drafting import DraftCounters, DrafterLimits, DraftPlanner, OwnBudget, make_drafter
from fdasync.errors import InvariantBroken
from fdasync.scheduler.held_text import HeldText

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.drafting import Drafter
    from fdasync.events.actions import Drafts
    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence

#: of a drafter that is none
NO_DRAFTS = DraftCounters("", 0, 0, 0)


def drafter_limits(config: SchedulerConfig) -> DrafterLimits:
    """The limits of the drafter that the configuration names."""
    return DrafterLimits.of(config.max_run_tokens - 1, config.pipeline_depth, config.max_running)


class StepDrafts:
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
            self._held = HeldText(self._planner)
        self._own = DraftCounters(config.own_drafter, 0, 0, 0)
        # None: the runner drafts as many as it may
        self._own_budget = OwnBudget(config.max_run_tokens - 1) if config.own_drafter and config.weighs_drafts else None
        # of the steps in flight, whether the engine's drafter has paths in them
        self._with_paths: deque[bool] = deque()
        # where the runner drafts by itself, by live sequence: decode steps that gave tokens of it, the runner's drafts,
        # its accepted drafts
        self._begun: dict[int, tuple[int, int, int]] = {}
        # of the last plan: plans share the list while no sequence joins or leaves
        self._decodes: list[Sequence] = []
        self._keys: tuple[int, ...] = ()

    def begin(self, seq: Sequence) -> None:
        """The sequence has a token of its answer, and decodes. Does nothing where it has begun before."""
        if self._own.drafter:
            self._begun.setdefault(seq.key, (0, 0, 0))
        if self._planner is not None:
            self._held.begin(seq)

    def propose(self, decodes: list[Sequence], now: float) -> tuple[Drafts | None, int | None]:
        """Drafts for the step that is being planned, which decodes these; None: it has none. And how many the runner
        drafts behind it (`RunStep.own_drafts`). Called for every step."""
        drafts = None
        if self._planner is not None:
            if decodes is not self._decodes:
                self._decodes = decodes
                self._keys = tuple([seq.key for seq in decodes])
            drafts = self._planner.plan(self._keys, lambda: self._held.tell(now))
        if self._own_budget is None:
            return drafts, None
        self._with_paths.append(drafts is not None)
        return drafts, self._own_budget.plan(len(decodes))

    def done(self, decodes: list[Sequence], samplers: list[Sequence], event: StepDone, seconds: float | None) -> None:
        """The oldest step in flight completed.

        Args:
            decodes: as `propose` got them for this step.
            samplers: sequences whose last chunk it computed.
            seconds: what the step took, if it did nothing but decode.
        """
        if self._own.drafter:
            self._count_own(decodes, event, seconds)
        if self._planner is None:
            return
        keys = self._keys if decodes is self._decodes else tuple([seq.key for seq in decodes])
        follows = self._planner.follows
        self._held.step_done(samplers, is_told=follows)
        if not follows:
            # each step gave one token at most, but for the runner's own drafts, which are counted apart
            self._planner.passed(keys, seconds=seconds)
            return
        if samplers:
            keys += tuple([seq.key for seq in samplers])
        counts = event.counts
        if counts is not None and counts.count(1) == len(counts) == len(event.tokens):
            counts = None
        self._planner.done(keys, counts, event.tokens, seconds=seconds)

    def end(self, seq: Sequence, now: float) -> tuple[int, int, int]:
        """The sequence ended, wherever it stood; steps in flight may still name it. Returns `FinishRequest.drafts`."""
        own = self._begun.pop(seq.key, (0, 0, 0))
        if self._planner is None:
            return own
        steps, drafted, accepted = self._held.end(seq, now)
        return own[0] if self._own.drafter else steps, own[1] + drafted, own[2] + accepted

    @property
    def counters(self) -> DraftCounters:
        """Counters of the engine's drafter."""
        return NO_DRAFTS if self._planner is None else self._planner.counters

    @property
    def own_counters(self) -> DraftCounters:
        """Counters of the runner's own drafter."""
        return self._own

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise InvariantBroken where a sequence that is not live has not ended here."""
        begun = self._begun.keys() if self._planner is None else self._held.keys
        left = set(begun) - {seq.key for seq in live}
        if left:
            raise InvariantBroken(f"sequences {sorted(left)} have ended, and their drafts have not")

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
