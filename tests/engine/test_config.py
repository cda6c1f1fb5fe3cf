"""Configuration: each bad value or key is refused by name (`engine/config.py`)."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import pytest

from fdasync.engine.config import EngineConfig, host_blocks, resolve
from fdasync.errors import BadInput, ConfigError
from fdasync.registry.mapping import struct_of
from fdasync.runner.base import RunnerLimits
from fdasync.runner.plugins import make_runner
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from tests.support.helpers import make_capacity

LIMITS = RunnerLimits(max_running=4, max_step_tokens=8)


def test_a_mapping_in_the_place_of_a_struct_is_read_as_one():
    given = EngineConfig(speculation={"drafter": "ngram", "max_tokens": 2}, leases={"asks": 3})
    assert given == EngineConfig.from_mapping({"speculation": {"max_tokens": 2}, "leases": {"asks": 3}})
    given.validate()
    for field, value in (("speculation", {"drafters": "ngram"}), ("leases", {"ask": 3})):
        with pytest.raises(ConfigError, match=rf"^config.{field}.\w+: is not a key that exists"):
            EngineConfig(**{field: value})


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
        ("prepare_deadline_s", math.nan), ("close_deadline_s", 1e10), ("update_deadline_s", 0.0),
        ("host_blocks", -1), ("host_blocks", (1 << 22) + 1), ("fetch_min_tokens", -1), ("store_calls", 0),
        ("store_calls", 1025), ("store_deadline_s", 0.0), ("store_retry_s", 0.0), ("store_retry_s", math.inf),
        ("store_kill_s", 0.0), ("store_kill_s", math.nan),
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
        ("seed", "x"), ("host_blocks", "all"), ("host_blocks", 1.5), ("store", None), ("store_config", "x"),
        ("update_deadline_s", "soon"), ("store_required", 1), ("store_open_deadline_s", "1"),
        ("write_through", "some"), ("write_through", True), ("write_back", "yes"), ("fetch_min_tokens", 1.5),
        ("store_calls", "8"), ("store_kill_s", None), ("numerics", "exact"), ("numerics", True), ("numerics", None),
    ],
)  # fmt: skip
def test_what_has_the_wrong_type_is_refused_by_name(field, value):
    for make in (lambda: EngineConfig.from_mapping({field: value}), lambda: EngineConfig(**{field: value}).validate()):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == f"config.{field}"


@pytest.mark.parametrize(
    ("key", "hint"), [("max_runing", "did you mean 'max_running'?"), ("Model", "did you mean 'model'?"), ("cards", "")]
)
def test_unknown_keys_are_named(key, hint):
    with pytest.raises(ConfigError, match="is not a key that exists") as caught:
        EngineConfig.from_mapping({key: 1})
    assert (caught.value.field, caught.value.hint) == (f"config.{key}", hint)


def test_an_old_key_is_refused_and_the_error_names_the_new_one():
    with pytest.raises(ConfigError, match="is named 'store_kill_s' now") as caught:
        EngineConfig.from_mapping({"lease_kill_s": 30.0})
    assert caught.value.field == "config.lease_kill_s"
    EngineConfig.from_mapping({"store_kill_s": 30.0})


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


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({"store": "memory", "host_blocks": 0}, "host_blocks", "is 0, and a store is set"),
        ({"store": "memory", "prefix_cache": False}, "prefix_cache", "a store or a role is set"),
        ({"host_blocks": 8, "prefix_cache": False}, "prefix_cache", "a host tier"),
        ({"store_config": {"path": "x"}}, "store_config", "names no store"),
        ({"store_required": True}, "store_required", "names no store"),
    ],
)
def test_tiers_that_cannot_work_together_are_refused(values, field, problem):
    for make in (lambda: EngineConfig.from_mapping(values), lambda: EngineConfig(**values).validate()):
        with pytest.raises(ConfigError, match=problem) as caught:
            make()
        assert caught.value.field == f"config.{field}"


@pytest.mark.parametrize(
    "values",
    [
        {"store": "memory"}, {"store": "memory", "host_blocks": 1, "store_config": {"x": 1}}, {"host_blocks": 0},
        {"host_blocks": 0, "prefix_cache": False}, {"host_blocks": "auto", "prefix_cache": False},
        {"write_through": "off"}, {"write_through": "prompt", "write_back": False}, {"store_calls": 1},
    ],
)  # fmt: skip
def test_tiers_that_work_together_are_fine(values):
    assert EngineConfig.from_mapping(values).host_blocks == values.get("host_blocks", "auto")


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


def test_resolve_tells_the_scheduler_of_its_tiers():
    config = EngineConfig(
        store="memory", host_blocks=7, write_through="prompt", write_back=False, fetch_min_tokens=33, num_blocks=4
    )
    resolved = resolve(config, make_capacity(block_nbytes=1234), b"namespace")
    assert (resolved.num_host_blocks, resolved.store, resolved.block_nbytes) == (7, True, 1234)
    assert (resolved.write_through, resolved.write_back, resolved.fetch_min_tokens) == ("prompt", False, 33)
    assert resolved.namespace == b"namespace"
    assert resolve(EngineConfig(), make_capacity()).store is False


@pytest.mark.parametrize(
    ("store", "block_nbytes", "blocks"),
    [("", 4096, 0), ("memory", 4096, (1 << 30) // 8192), ("memory", 1 << 20, 1020), ("memory", 1 << 30, 16)],
)
def test_the_host_tier_holds_a_gibibyte_where_a_store_is_set_and_nothing_else_is_said(store, block_nbytes, blocks):
    # a page for the header goes with each block
    assert host_blocks(EngineConfig(store=store), make_capacity(block_nbytes=block_nbytes)) == blocks


def test_a_host_tier_beyond_this_machines_memory_is_refused():
    with pytest.raises(ConfigError, match="more than this machine's memory") as caught:
        resolve(EngineConfig(host_blocks=1 << 22), make_capacity(block_nbytes=1 << 30))
    assert caught.value.field == "config.host_blocks"
    assert 0 < caught.value.limit < 1 << 22


@pytest.mark.parametrize(("num_blocks", "problem"), [((1 << 22) + 1, "the runner offers"), (1 << 22, None)])
def test_a_runner_with_too_many_blocks_is_refused(num_blocks, problem):
    capacity = make_capacity(num_blocks=num_blocks)
    if problem is None:
        assert resolve(EngineConfig(), capacity).num_blocks == num_blocks
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        resolve(EngineConfig(), capacity)
    assert caught.value.field == "config.num_blocks"


def test_a_runner_without_memory_for_blocks_is_refused():
    with pytest.raises(ConfigError, match="no memory") as caught:
        resolve(EngineConfig(), make_capacity(num_blocks=0))
    assert caught.value.field == "config.num_blocks"


# -- a plugin's own keys


def test_a_plugins_config_is_decoded_by_its_own_type():
    runner = make_runner("synthetic", {"top_k": 3}, LIMITS)
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
        make_runner("synthetic", values, LIMITS)
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
    with pytest.raises(ConfigError) as caught:
        struct_of(Nested, values, error=ConfigError, root="r")
    assert caught.value.field == field
    assert "$" not in str(caught.value)


class Named(msgspec.Struct, forbid_unknown_fields=True):
    sizes: dict[str, int] = {}
    colours: tuple[Literal["red", "green"], ...] = ()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sizes": {1: 1}}, "r.sizes: Expected `str`, got `int` for a key"),
        ({"sizes": {"a": "b"}}, "r.sizes[a]: Expected `int`, got `str`"),
        ({"colours": ["red", "blue"]}, "r.colours[1]: Invalid enum value 'blue' (limit: 'red' or 'green')"),
        ({1: 1}, "r: 1 is no name of a field"),
        ([("sizes", {})], "r: a mapping is needed, not list"),
        ({"size": {}}, "r.size: is not a key that exists; did you mean 'sizes'?"),
    ],
)
def test_whatever_a_mapping_is_no_path_of_the_decoder_is_told(values, text):
    with pytest.raises(BadInput) as caught:
        struct_of(Named, values, root="r")
    assert str(caught.value) == text
