"""The setting `speculation` of an engine: who drafts tokens, and how many a step verifies.

`EngineConfig.speculation` is one. Knows no engine; called by `engine/config.py` and `engine/runtime.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fdasync.drafting.base import Drafter, DrafterLimits
from fdasync.drafting.plugins import make_drafter
from fdasync.errors import ConfigError
from fdasync.registry.mapping import check

MAX_DRAFTS = 64
_ONE_A_STEP = "leave config.speculation out for one token a step"
# the drafter that is none: the runner's own drafts are verified alone
RUNNERS_OWN = "none"


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several tokens a step. No token, log-prob or row depends on it.

    Attributes:
        drafter: entry-point name in `fdasync.drafters`; "none": the runner drafts by itself (multi-token prediction
            layers of the checkpoint).
        drafter_config: the drafter's own keys, decoded by it; unknown ones are refused by name.
        max_tokens: the most drafts of one sequence that a step verifies, 1 to 64. `EngineConfig.max_step_tokens` holds
            max_tokens + 1 of each sequence in a step.
        budget: drafts of the drafter are forwarded as far as they pay, by the measured price of a step's rows and each
            sequence's running acceptance; False: all of them.
    """

    drafter: Annotated[str, msgspec.Meta(min_length=1, extra={"hint": "'none': the runner drafts alone"})] = "ngram"
    drafter_config: dict[str, Any] = msgspec.field(default_factory=dict)
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFTS, extra={"hint": _ONE_A_STEP})] = 3
    budget: bool = True

    def validate(self) -> None:
        """Raise ConfigError naming the first field whose value is wrong."""
        check(self, error=ConfigError, root="config.speculation")
        if self.drafter == RUNNERS_OWN and self.drafter_config:
            raise ConfigError("config.speculation.drafter_config", "is set, and config.speculation.drafter is 'none'")
        try:
            msgspec.json.encode(self.drafter_config)
        except (TypeError, ValueError, OverflowError) as error:
            problem = f"holds what cannot stand in a trace: {error}"
            raise ConfigError("config.speculation.drafter_config", problem) from None

    @property
    def host_drafter(self) -> str:
        """Name of the drafter that runs in the engine; "": there is none."""
        return "" if self.drafter == RUNNERS_OWN else self.drafter

    def drafter_for(self, given: Drafter | None, *, depth: int, max_running: int) -> Drafter | None:
        """The drafter of an engine: the object that it was given, or the drafter named here; None: the runner drafts.
        Raises PluginError; ConfigError naming the key.

        Args:
            depth, max_running: most steps in flight, and sequences in a step.
        """
        if not self.host_drafter:
            if given is not None:
                raise ConfigError("drafter", "is given, and config.speculation.drafter is 'none'", hint="name it there")
            return None
        limits = DrafterLimits.of(self.max_tokens, depth, max_running)
        if given is None:
            return make_drafter(self.drafter, self.drafter_config, limits, root="config.speculation.drafter_config")
        maybe: object = given
        if not isinstance(maybe, Drafter):
            raise ConfigError("drafter", f"{given!r:.100} is no Drafter")
        if given.limits.path_tokens < limits.path_tokens or given.limits.max_running < limits.max_running:
            raise ConfigError("drafter", f"was made for {given.limits}", limit=f"{limits} at least")
        return given
