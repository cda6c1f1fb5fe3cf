"""The routing matrix (docs/design.md, rules 25, 26): every token and every row is the oracle's, whatever the engine is
made of.

`make test` plays every pair of values of all dimensions; `make test-all` every cell that runs in virtual time, and
every three values where a real store is behind the engine, or where there are several instances (`matrix_pd.py`). A
cell's name tells its values, and names a test that plays it alone:
`pytest 'tests/system/test_matrix.py::test_virtual_cell[cache=on,tier=host,...]'`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import ConfigError
from fdasync.testing import run_sim, synthetic_config
from fdasync.testing.stores.latency import Latency
from fdasync.testing.stores.wrapper import Wrapper
from tests.system.covering import all_cells, combinations_of
from tests.system.matrix import (
    DIMENSIONS,
    REAL,
    every_cell,
    impossible,
    name_of,
    pd_cells,
    quick_cells,
    real_cells,
    virtual_cells,
)
from tests.system.matrix_pd import PdPlay
from tests.system.matrix_play import Play

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.covering import Cell

# of mooncake's client: no call of a busy machine is late
PATIENT = {"probe_timeout_s": 60.0, "rpc_timeout_s": 120.0, "transfer_timeout_s": 120}
# what only cells with several instances have
SEVERAL = (("pd", "shm"), ("pd", "tcp"), ("pd", "device"), ("hit", "yes"), ("dies", "prefill"), ("dies", "decode"))
QUICK = {name_of(cell) for cell in quick_cells()}


def how_plain(cell: Cell) -> tuple[bool, bool]:
    """Cells that lose blocks to another tier, with steps that overlap, come first."""
    return cell["preempt"] not in ("swap", "writeback"), cell["depth"] != "2"


def marked(cells: list[Cell]) -> list[Any]:
    """One parameter for each cell; those beyond `make test` are slow."""
    return [
        pytest.param(cell, id=name_of(cell), marks=() if name_of(cell) in QUICK else pytest.mark.nightly)
        for cell in cells
    ]


@contextmanager
def told_how_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """What fails says how to play this cell alone."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"this cell alone: pytest '{request.node.nodeid}'")
        raise


class Outliving(Wrapper):
    """A store that the second engine opens again."""

    async def aclose(self) -> None:
        """It stays open."""


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("cell", marked(sorted(virtual_cells(), key=how_plain)))
def test_virtual_cell(cell: Cell, request: pytest.FixtureRequest) -> None:
    store = None
    if cell["tier"] == "memory":
        store = Outliving(Latency(MemoryStore(MemoryConfig()), call_s=0.0005))
    with told_how_again(request):
        run_sim(Play(cell, store=store).run())


@pytest.mark.ci
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("cell", marked(real_cells("file")))
async def test_file_cell(cell: Cell, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with told_how_again(request):
        await Play(cell, store_config={"path": str(tmp_path / "blocks"), "max_nbytes": 64 << 20}).run()


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    """A network that has only loopback, and a real pool in it: its master, and who lends it memory."""
    try:
        from fdasync_mooncake import testing
    except ImportError as error:
        pytest.skip(f"plugins/fdasync-mooncake is not installed: {error}")
    if reason := testing.why_not():
        pytest.skip(reason)
    with testing.in_loopback_namespace(), testing.MasterProcess() as master, testing.MemoryProcess(master, 256 << 20):
        yield master


@pytest.mark.ci
@pytest.mark.parametrize("cell", marked(real_cells("mooncake")))
async def test_mooncake_cell(cell: Cell, network: Any, request: pytest.FixtureRequest) -> None:
    # every cell is a fleet of its own
    prefix = "".join(value[0] for value in cell.values())
    with told_how_again(request):
        await Play(cell, store_config={"master": network.address, "prefix": prefix, **PATIENT}).run()


@pytest.mark.ci
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("cell", marked(pd_cells()))
def test_pd_cell(cell: Cell, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with told_how_again(request):
        uvloop.run(PdPlay(cell, tmp_path).run())


# -- the matrix itself --------------------------------------------------------------------------------


@pytest.mark.ci
def test_every_pair_of_values_is_played_or_impossible() -> None:
    played = set().union(*[combinations_of(cell, 2) for cell in quick_cells()])
    there = {
        ((one, value), (other, its))
        for one, other in combinations(DIMENSIONS, 2)
        for value, its in {(cell[one], cell[other]) for cell in every_cell()}
    }
    pairs = {
        ((one, value), (other, its))
        for one, other in combinations(DIMENSIONS, 2)
        for value in DIMENSIONS[one]
        for its in DIMENSIONS[other]
    }
    assert played == there
    without_instances = [("cache", "off"), ("preempt", "recompute")]
    without_instances += [("tier", tier) for tier in ("device", "memory", "mooncake")]
    assert pairs - there == {
        (("cache", "off"), ("tier", "host")),
        (("cache", "off"), ("tier", "memory")),
        (("cache", "off"), ("tier", "file")),
        (("cache", "off"), ("tier", "mooncake")),
        (("cache", "off"), ("preempt", "swap")),
        (("cache", "off"), ("preempt", "writeback")),
        (("tier", "device"), ("preempt", "swap")),
        (("tier", "device"), ("preempt", "writeback")),
        (("tier", "host"), ("preempt", "writeback")),
        *((("tier", tier), ("preempt", "recompute")) for tier in ("host", "memory", "file", "mooncake")),
        # one engine alone
        (("tp", "2x4"), ("pd", "mixed")),
        (("pd", "mixed"), ("hit", "yes")),
        (("pd", "mixed"), ("dies", "prefill")),
        (("pd", "mixed"), ("dies", "decode")),
        # several instances
        *((one, several) for one in without_instances for several in SEVERAL),
        *((one, ("tp", "2x4")) for one in without_instances),
        *((("tp", "4"), several) for several in SEVERAL),
    }


@pytest.mark.ci
def test_every_cell_that_cannot_be_has_a_reason() -> None:
    every = all_cells(DIMENSIONS, bool, ())
    there = {name_of(cell) for cell in every_cell()}
    reasons = Counter(map(impossible, every))
    # who has none is there
    assert reasons.pop("") == len(there)
    # config refuses what says so; the others are no cells because nothing could tell them from one that is
    assert sorted(reason.partition(":")[0] for reason in reasons) == [
        "an instance deals with its store as an engine does",
        "instances find blocks by prefix",
        "instances of equal width are two of 2",
        "instances read host blocks",
        "one engine has no other whose prefix or death could matter",
        "one engine has one width",
        "swap copies to the host, and there is no host tier",
        "tiers find blocks by prefix",
        "with a host tier the blocks of preempted requests survive there",
        "write-back writes to a store, and there is none",
    ]
    assert len(there) + reasons.total() == len(every)
    assert {name_of(cell) for cell in virtual_cells()} | QUICK <= there
    assert {name_of(cell) for tier in REAL for cell in real_cells(tier)} <= there
    assert {name_of(cell) for cell in pd_cells()} <= there
    played = virtual_cells() + pd_cells() + [cell for tier in REAL for cell in real_cells(tier)]
    assert {name_of(cell) for cell in played} >= QUICK


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"prefix_cache": False, "host_blocks": 8}, "prefix_cache"),
        ({"prefix_cache": False, "store": "memory"}, "prefix_cache"),
        ({"prefix_cache": False, "store": "file", "host_blocks": 8}, "prefix_cache"),
        ({"store": "memory", "host_blocks": 0}, "host_blocks"),
        ({"store": "mooncake", "host_blocks": 0}, "host_blocks"),
        ({"prefix_cache": False, "role": "decode"}, "prefix_cache"),
        ({"role": "prefill", "host_blocks": 0}, "host_blocks"),
    ],
)
def test_config_refuses_what_cannot_be(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        synthetic_config(**values).validate()
    assert caught.value.field == f"config.{key}"
