"""Makes a runner's aux producers from their entry points, and tries them. Knows none but the routing by name.

Called by `opened_runner.py`, and by `examine.py` for their sizes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import ROUTING
from fdasync.errors import ConfigError, PluginError
from fdasync.registry.registry import AUX, Registry
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.capture.aux_producer import AuxProducer, NotRecorded
from fdasync_transformers.start.capacity import fresh_prefills

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.capture.aux_producer import AuxSource
    from fdasync_transformers.start.open_model import Opened

# of the trial's pass: enough that rows of a whole pass are not those of a token
_TRIAL_TOKENS = 3


def make_aux(asked: Sequence[str], source: AuxSource, *, fixed: bool = False) -> AuxData:
    """The producers of the routing, where it is captured, and of these names (`TransformersConfig.aux`), not attached.

    Raises ConfigError, which names the producer: it is not installed, is no producer, cannot be of this model, or does
    not promise fixed numerics (`fixed`); or a name comes twice.
    """
    names = [*([] if source.moe is None else [ROUTING]), *asked]
    if len(set(names)) != len(names):
        raise ConfigError("runner_config.aux", f"{list(asked)} names a datum twice, or the captured routing")
    made = []
    for name in names:
        try:
            kind = Registry().load(AUX, name, AuxProducer)
            made.append(kind(name, source))
        except PluginError as error:
            raise ConfigError("runner_config.aux", f"{name!r}: {error.problem}") from error
        except Exception as error:  # a plugin may raise anything
            raise ConfigError("runner_config.aux", NotRecorded(name, error).problem) from error
        if fixed and not kind.fixed:
            problem = f"{name!r} does not promise fixed numerics"
            raise ConfigError("runner_config.aux", problem, hint='leave it out, or use numerics="default"')
    return AuxData(made)


def try_aux(aux: AuxData, opened: Opened, max_step_tokens: int) -> None:
    """Record a small pass of the model, which is not bound yet; nothing is attached afterwards.

    Raises ConfigError for a producer that raises, or whose rows are not as it said."""
    step_model = opened.step_model
    count = min(_TRIAL_TOKENS, max_step_tokens, opened.max_context_tokens)
    try:
        aux.attach(count)
        step_model.aux = aux
        batch, table, pool = fresh_prefills(step_model, [count], opened.block_tokens)
        step_model.run(batch, table, pool, np.arange(1)).cpu()
    except NotRecorded as error:
        raise ConfigError("runner_config.aux", error.problem) from error
    finally:
        step_model.aux = AuxData()
        aux.close()
