"""What annotations declare is what is refused: every bound and word of settings and of sampling parameters, of plain
values and of structs that Python made (`registry/mapping.py`)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import pytest

from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig, resolve
from fdasync.errors import BadInput, ConfigError
from fdasync.registry.mapping import check, hints_of, of_text, struct_of
from fdasync.request import SamplingParams
from fdasync.runner.plugins import make_runner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.scheduler import LeaseRules, SchedulerConfig
from tests.support.bounds import outside, unbounded
from tests.support.helpers import make_capacity


@pytest.mark.parametrize(("field", "value"), outside(EngineConfig))
def test_settings_of_an_engine(field: str, value: Any) -> None:
    for make in (lambda: EngineConfig.from_mapping({field: value}), EngineConfig(**{field: value}).validate):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == f"config.{field}"
        assert caught.value.limit


INSIDE = [("leases", LeaseRules, *case) for case in outside(LeaseRules)] + [
    ("speculation", Speculation, *case) for case in outside(Speculation)
]


@pytest.mark.parametrize(("key", "kind", "field", "value"), INSIDE)
def test_settings_inside_of_them(key: str, kind: type[msgspec.Struct], field: str, value: Any) -> None:
    made: Any = {key: kind(**{field: value})}
    for make in (lambda: EngineConfig.from_mapping({key: {field: value}}), EngineConfig(**made).validate):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == f"config.{key}.{field}"
        assert caught.value.limit


@pytest.mark.parametrize(("field", "value"), outside(SamplingParams))
def test_sampling_parameters(field: str, value: Any) -> None:
    for make in (
        lambda: SamplingParams.from_mapping({field: value}),
        lambda: SamplingParams(**{field: value}).validated(vocab_size=1 << 20),
    ):
        with pytest.raises(BadInput) as caught:
            make()
        assert caught.value.field == field
        assert caught.value.limit


def test_every_number_has_bounds() -> None:
    assert unbounded(SamplingParams) == set()
    assert unbounded(EngineConfig) == {"seed"}
    assert unbounded(LeaseRules) == unbounded(Speculation) == set()


class Inner(msgspec.Struct, frozen=True):
    size: Annotated[int, msgspec.Meta(ge=1, extra={"hint": "leave it out"})] = 1
    text: Annotated[str, msgspec.Meta(pattern="^a+$")] = "a"


class Outer(msgspec.Struct):
    inner: Inner = Inner()
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    names: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=3)], ...], msgspec.Meta(max_length=2)] = ()
    sizes: dict[str, Annotated[int, msgspec.Meta(ge=1, le=9)]] = {}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Outer(inner=Inner(size=0)), "r.inner.size: 0 is too small (limit: at least 1); leave it out"),
        (Outer(inner=Inner(text="b")), "r.inner.text: Expected `str` matching regex '^a+$'"),
        (Outer(share=1), "r.share: 1 is out of range (limit: above 0, below 1)"),
        (Outer(names=("a", "bbbb")), "r.names[1]: has 4 characters (limit: up to 3)"),
        (Outer(names=("a", "b", "c")), "r.names: has 3 entries (limit: up to 2)"),
        (Outer(sizes={"a": 1, "b": 10}), "r.sizes[b]: 10 is out of range (limit: 1 to 9)"),
    ],
)
def test_the_error_names_the_part_its_value_the_limit_and_the_way_out(made: Outer, text: str) -> None:
    plain = {
        name: msgspec.structs.asdict(value) if isinstance(value, Inner) else value
        for name, value in msgspec.structs.asdict(made).items()
    }
    for refuse in (lambda: check(made, root="r"), lambda: struct_of(Outer, plain, root="r")):
        with pytest.raises(BadInput) as caught:
            refuse()
        assert str(caught.value) == text


class Open(msgspec.Struct, frozen=True):
    plain: float = 0.0
    above: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    maybe: Annotated[float, msgspec.Meta(le=9)] | None = None


class Around(msgspec.Struct, frozen=True):
    inner: Open = Open()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["plain", "above", "maybe"])
def test_a_number_is_finite_whatever_bounds_say(field: str, value: float) -> None:
    made, plain = Around(Open(**{field: value})), {"inner": {field: value}}
    for refuse in (lambda: check(made, root="r"), lambda: struct_of(Around, plain, root="r")):
        with pytest.raises(BadInput) as caught:
            refuse()
        assert (caught.value.field, caught.value.limit is None) == (f"r.inner.{field}", False)
    with pytest.raises(BadInput, match=r"^x: "):
        of_text(hints_of(Open)[field], str(value), "x")


@pytest.mark.parametrize(("field", "value"), outside(SyntheticConfig))
def test_costs_of_the_synthetic_model(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^runner_config.{field}: .*limit"):
        make_runner("synthetic", {field: value}, EngineConfig().runner_limits())
    assert not {name for name in unbounded(SyntheticConfig) if name.endswith("_s") or name == "jitter"}


@pytest.mark.parametrize("key", ["leases", "speculation"])
@pytest.mark.parametrize("value", [range(3), [], 3, SchedulerConfig])
def test_a_struct_made_in_python_holds_structs_where_it_declares_them(key: str, value: Any) -> None:
    made: Any = {key: value}
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**made).validate()
    assert caught.value.field == f"config.{key}"
    wanted = {"leases": "LeaseRules", "speculation": "Speculation"}[key]
    assert caught.value.problem == f"{value!r:.100} is no {wanted}"
    assert EngineConfig.from_mapping({"leases": {"asks": 5}, "speculation": None}).leases == LeaseRules(asks=5)


# what `resolve` decides; `fetch_nbytes_per_s` and `lookup_s` are guesses of the scheduler's own
DECIDED = {
    "namespace", "capture", "recurrent", "store", "kv_events", "num_host_blocks", "num_host_snapshots",
    "decode_reserve_blocks", "state_every_tokens", "snapshot_nbytes", "prefill_tokens_per_s", "own_drafter", "drafter",
    "drafter_config", "weighs_drafts", "fetch_nbytes_per_s", "lookup_s",
}  # fmt: skip


def test_the_scheduler_is_told_what_the_runner_and_the_configuration_say() -> None:
    config = EngineConfig(
        max_running=3, max_step_tokens=7, pipeline_depth=1, prefix_cache=False, write_through="off", write_back=False,
        fetch_min_tokens=5, policy="shortest-prompt-first", policy_config={"a": 1}, leases=LeaseRules(asks=2),
        weight_version=4, block_tokens=64, num_blocks=9,
    )  # fmt: skip
    capacity = make_capacity(block_tokens=8, num_blocks=33, block_nbytes=77, weights_id="ab", max_run_tokens=2)
    told = resolve(config, capacity)
    for name in set(SchedulerConfig.__struct_fields__) - DECIDED:
        source = capacity if hasattr(capacity, name) else config
        assert getattr(told, name) == getattr(source, name), name
    assert told.weight_version == "4"
    limits = config.runner_limits()
    assert (limits.max_running, limits.block_tokens, limits.max_context_tokens) == (3, 64, None)
