"""Drafters by name (`plugins.py`)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fdasync.drafting import DrafterLimits, make_drafter
from fdasync.drafting.guard import GuardedDrafter
from fdasync.drafting.ngram import NgramDrafter
from fdasync.errors import ConfigError, PluginError
from fdasync.testing import DrafterTests

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


class Method(NgramDrafter):
    """`outlasts` looks like a question, and is a property."""

    def outlasts(self):  # type: ignore[override]
        return False

    def begin_all(self, *args, **more):
        raise KeyError("at a loss")


def odd():
    return Method(NgramDrafter.config_type(), LIMITS)


def test_what_is_wrong_is_told_by_its_name():
    guarded = GuardedDrafter(odd(), "odd")
    # no answer: nothing is kept from it
    assert guarded.outlasts is True
    with pytest.raises(PluginError, match="its begin_all raised KeyError"):
        guarded.call("begin_all", (1,), (1,), (b"",), (b"",), ("",), now=0.0)


def test_the_suite_finds_it():
    class Suite(DrafterTests):
        def make(self, limits):
            return odd()

    with pytest.raises(AssertionError, match="not a property"):
        Suite().test_what_does_not_outlast_its_prompt_is_forgotten()


class Cancels(NgramDrafter):
    """Lets out what a future that it looked at was cancelled with."""

    def _cancelled(self, *_, **__):
        raise asyncio.CancelledError

    begin_all = take = propose = end = _cancelled
    outlasts = property(_cancelled)


@pytest.mark.parametrize("name", ["begin_all", "outlasts", "take", "propose", "end"])
def test_a_cancellation_that_a_drafter_lets_out_is_its_own_error(name):
    guarded = GuardedDrafter(Cancels(NgramDrafter.config_type(), LIMITS), "own")
    one = np.ones(1, np.int32)
    calls = {
        "begin_all": lambda: guarded.call("begin_all", (1,), (1,), (b"",), (b"",), ("",), now=0.0),
        "outlasts": lambda: guarded.outlasts,
        "take": lambda: guarded.call("take", (1,), one, one),
        "propose": lambda: guarded.propose((1,), one),
        "end": lambda: guarded.call("end", 1, now=0.0),
    }
    with pytest.raises(PluginError, match=f"{name}.* raised CancelledError"):
        calls[name]()
