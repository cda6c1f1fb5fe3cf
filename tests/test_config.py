"""Configuration: each bad value or key is refused by name (`config.py`)."""

from __future__ import annotations

import math

import msgspec
import pytest

from fdasync.config import EngineConfig, resolve
from fdasync.errors import BadInput, ConfigError
from fdasync.registry import Registry
from fdasync.runner.base import RunnerLimits
from fdasync.runner.oracle import SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from tests.helpers import make_capacity

LIMITS = RunnerLimits(max_running=4, max_step_tokens=8)


def test_the_defaults_are_fine():
    EngineConfig().validate()
    assert EngineConfig.from_mapping({}) == EngineConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running", 0), ("max_running", -1), ("max_running", (1 << 24) + 1),
        ("max_step_tokens", 0), ("max_requests", 0),
        ("max_context_tokens", 0), ("num_blocks", 0), ("num_blocks", -4),
        ("block_tokens", 0), ("block_tokens", 1), ("block_tokens", 3), ("block_tokens", 48), ("block_tokens", 8192),
        ("pipeline_depth", 0), ("pipeline_depth", 3), ("decode_reserve_blocks", -1), ("decode_reserve_blocks", 1025),
        ("inline_tokenise_chars", -1), ("trace_turns", -1),
        ("start_deadline_s", 0.0), ("step_deadline_s", -1.0), ("request_deadline_s", math.inf),
        ("prepare_deadline_s", math.nan), ("close_deadline_s", 1e10),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(field, value):
    for make in (lambda: EngineConfig.from_mapping({field: value}), lambda: EngineConfig(**{field: value}).validate()):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == f"config.{field}"
        assert field == "block_tokens" or caught.value.limit is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running", "many"), ("max_running", 1.5), ("max_running", None), ("max_running", True),
        ("block_tokens", "auto!"), ("num_blocks", 2.0), ("process", "thread"), ("routing", "yes"), ("routing", 1),
        ("model", 7), ("runner", None), ("prefix_cache", 1), ("step_deadline_s", "soon"), ("runner_config", [1]),
        ("seed", "x"),
    ],
)  # fmt: skip
def test_what_has_the_wrong_type_is_refused_by_name(field, value):
    for make in (lambda: EngineConfig.from_mapping({field: value}), lambda: EngineConfig(**{field: value}).validate()):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == f"config.{field}"


@pytest.mark.parametrize("key", ["max_runing", "Model", "gpu"])
def test_unknown_keys_are_named(key):
    with pytest.raises(ConfigError, match="is not a key that exists") as caught:
        EngineConfig.from_mapping({key: 1})
    assert caught.value.field == f"config.{key}"


@pytest.mark.parametrize("value", [2, 16, 4096])
def test_powers_of_two_are_block_sizes(value):
    assert EngineConfig.from_mapping({"block_tokens": value}).block_tokens == value


def test_limits_must_fit_each_other():
    with pytest.raises(ConfigError, match="max_running=300") as caught:
        EngineConfig(max_running=300, max_step_tokens=299).validate()
    assert caught.value.field == "config.max_step_tokens"
    EngineConfig(max_running=300, max_step_tokens=300).validate()
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_running=300, max_requests=299).validate()
    assert (caught.value.field, caught.value.limit) == ("config.max_requests", 300)


def test_config_errors_are_bad_input_and_value_errors():
    with pytest.raises(BadInput):
        EngineConfig(max_running=0).validate()
    with pytest.raises(ValueError, match=r"config\.max_running"):
        EngineConfig(max_running=0).validate()


# -- what follows from it


def test_auto_means_the_runner_decides():
    limits = EngineConfig().runner_limits()
    assert (limits.max_context_tokens, limits.block_tokens, limits.num_blocks) == (None, None, None)
    limits = EngineConfig(max_context_tokens=9, block_tokens=8, num_blocks=7, routing=False, model="m").runner_limits()
    assert (limits.max_context_tokens, limits.block_tokens, limits.num_blocks) == (9, 8, 7)
    assert (limits.capture, limits.model, limits.pipeline_depth) == (False, "m", 2)


def test_resolve_takes_sizes_from_the_runner_and_limits_from_the_config():
    config = EngineConfig(
        max_running=3, max_step_tokens=5, pipeline_depth=1, prefix_cache=False, decode_reserve_blocks=4, block_tokens=64
    )
    before = msgspec.structs.asdict(config)
    resolved = resolve(config, make_capacity(block_tokens=8, num_blocks=33))
    assert (resolved.block_tokens, resolved.num_blocks, resolved.capture) == (8, 33, True)
    assert (resolved.max_running, resolved.max_step_tokens, resolved.pipeline_depth) == (3, 5, 1)
    assert (resolved.prefix_cache, resolved.decode_reserve_blocks) == (False, 4)
    assert resolve(config, make_capacity(aux_specs=())).capture is False
    assert msgspec.structs.asdict(config) == before


def test_a_runner_without_memory_for_blocks_is_refused():
    with pytest.raises(ConfigError, match="no memory") as caught:
        resolve(EngineConfig(), make_capacity(num_blocks=0))
    assert caught.value.field == "config.num_blocks"


# -- a plugin's own keys


def test_a_plugins_config_is_decoded_by_its_own_type():
    runner = Registry().make_runner("synthetic", {"top_k": 3}, LIMITS)
    assert isinstance(runner, SyntheticRunner)
    assert runner.config == SyntheticConfig(top_k=3)
    assert runner.limits == LIMITS


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"topk": 3}, "runner_config.topk"),
        ({"top_k": "3"}, "runner_config.top_k"),
        ({"step_s": None}, "runner_config.step_s"),
    ],
)
def test_a_plugins_keys_are_named(values, field):
    with pytest.raises(ConfigError) as caught:
        Registry().make_runner("synthetic", values, LIMITS)
    assert caught.value.field == field


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    depth: int = 1


class Nested(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("values", "field"),
    [({"inner": {"deep": 1}}, "r.inner.deep"), ({"inner": {"depth": "x"}}, "r.inner.depth"), ({"inner": 3}, "r.inner")],
)
def test_nested_keys_are_named_with_their_path(values, field):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(values, Nested)
    assert ConfigError.of_validation(caught.value, "r").field == field
