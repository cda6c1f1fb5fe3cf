"""The drafts of steps: tells the drafter of sequences and their tokens, and asks it for each step. Pure.

A sequence begins to draft when its first token is known and it is to decode here, and ends with its result. In between
it may be preempted: the drafter keeps what it knows, and the sequence drafts again once it decodes again. This module
knows no queue and no block; `fdasync.drafting` says which drafts pay. Called by `core.py` and `step_planner.py`, where
the configuration names a drafter.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fdasync.drafting import DrafterLimits, DraftPlanner, make_drafter
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.drafting import DraftCounters, Drafter
    from fdasync.events.actions import Drafts
    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence


def drafter_limits(config: SchedulerConfig) -> DrafterLimits:
    """The limits of the drafter that the configuration names."""
    return DrafterLimits.of(config.max_run_tokens - 1, config.pipeline_depth, config.max_running)


class StepDrafts:
    """See the module. Its methods raise PluginError where the drafter raises or breaks its contract; then the scheduler
    cannot go on.

    Args:
        config: names a drafter.
        drafter: that one, made with `drafter_limits` or wider ones; None: it is made here, which raises PluginError and
            ConfigError.
    """

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None) -> None:
        if drafter is None:
            drafter = make_drafter(config.drafter, config.drafter_config, drafter_limits(config))
        self._planner = DraftPlanner(
            drafter,
            name=config.drafter,
            max_drafts=config.max_run_tokens - 1,
            depth=config.pipeline_depth,
            weighs=config.weighs_drafts,
        )
        self._begun: set[int] = set()
        # of the last plan: plans share the list while no sequence joins or leaves
        self._decodes: list[Sequence] = []
        self._keys: tuple[int, ...] = ()

    def begin(self, seq: Sequence, now: float) -> None:
        """The sequence has a token of its answer, and decodes. Does nothing where it has begun before."""
        if seq.key in self._begun:
            return
        self._begun.add(seq.key)
        tokens = array("i", seq.tokens).tobytes()
        cut = 4 * seq.prompt_len
        self._planner.begin(seq.key, seq.group, tokens[:cut], tokens[cut:], limit=seq.max_len, salt=seq.salt, now=now)

    def propose(self, decodes: list[Sequence]) -> Drafts | None:
        """Drafts for the step that is being planned, which decodes these; None: it has none. Called for every step."""
        if decodes is not self._decodes:
            self._decodes = decodes
            self._keys = tuple([seq.key for seq in decodes])
        return self._planner.plan(self._keys)

    def done(self, decodes: list[Sequence], samplers: list[Sequence], event: StepDone, seconds: float | None) -> None:
        """The oldest step in flight completed.

        Args:
            decodes: as `propose` got them for this step.
            samplers: sequences whose last chunk it computed.
            seconds: what the step took, if it did nothing but decode.
        """
        keys = self._keys if decodes is self._decodes else tuple([seq.key for seq in decodes])
        if samplers:
            keys += tuple([seq.key for seq in samplers])
        self._planner.done(keys, event.counts, event.tokens, seconds=seconds)

    def end(self, seq: Sequence, now: float) -> tuple[int, int, int]:
        """The sequence ended, wherever it stood; steps in flight may still name it. Returns `FinishRequest.drafts`."""
        if seq.key not in self._begun:
            return (0, 0, 0)
        self._begun.remove(seq.key)
        return self._planner.end(seq.key, now=now)

    @property
    def counters(self) -> DraftCounters:
        """See `DraftCounters`."""
        return self._planner.counters

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise InvariantBroken where a sequence that is not live has not ended here."""
        left = self._begun.difference([seq.key for seq in live])
        if left:
            raise InvariantBroken(f"sequences {sorted(left)} have ended, and their drafts have not")
