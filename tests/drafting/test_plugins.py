"""Drafters by name (`plugins.py`)."""

from __future__ import annotations

import pytest

from fdasync.drafting import DrafterLimits, make_drafter
from fdasync.drafting.ngram import NgramDrafter
from fdasync.errors import ConfigError, PluginError

LIMITS = DrafterLimits(path_tokens=7, max_running=8)


def test_ngram_is_made_by_its_name_with_its_settings():
    drafter = make_drafter("ngram", {"orders": [3, 2], "limit_nbytes": 1 << 20}, LIMITS)
    assert type(drafter) is NgramDrafter
    assert (drafter.config.orders, drafter.limits) == ((3, 2), LIMITS)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"order": [2]}, "drafter_config.order"),
        ({"orders": [2, 3]}, "drafter_config.orders"),
        ({"orders": [0]}, "drafter_config.orders"),
        ({"keep_s": "long"}, "drafter_config.keep_s"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(config, field):
    with pytest.raises(ConfigError) as caught:
        make_drafter("ngram", config, LIMITS)
    assert caught.value.field.startswith(field)


def test_a_name_that_is_not_installed_is_told():
    with pytest.raises(PluginError, match="ngram"):
        make_drafter("nobody", {}, LIMITS)
