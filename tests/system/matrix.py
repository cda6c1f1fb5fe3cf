"""The routing matrix: its dimensions, which cells can be, what an engine of a cell looks like. Pure data.

A cell is one value of each dimension. What is played in it: `matrix_play.py`; how its trace is read: `matrix_facts.py`.
To add a dimension, name it in `DIMENSIONS`, say in `impossible` where it cannot be, and let `engine_config` or the
play do what it says and assert that it was done.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

from fdasync.drafting import Speculation
from fdasync.testing import synthetic_config
from tests.system.covering import Cell, all_cells, covering

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.engine.config import EngineConfig

DIMENSIONS: dict[str, tuple[str, ...]] = {
    # prefix cache
    "cache": ("on", "off"),
    # the tiers behind the device: the host; the host and a store
    "tier": ("device", "host", "memory", "file", "mooncake"),
    # of the blocks of preempted requests: lost; copied out when room is needed; at once to the host and the store
    "preempt": ("none", "recompute", "swap", "writeback"),
    "prefill": ("whole", "chunked"),
    "depth": ("1", "2"),
    # what a drafter makes of tokens that it knows: every second one wrong; paths of any length, right, wrong, no ids
    "drafts": ("none", "half", "wild"),
    "abort": ("no", "yes"),
    "update": ("none", "abort", "keep"),
    # processes that compute each step together; of prefill instances and of decode instances where they differ
    "tp": ("1", "2", "4", "2x4"),
    # aux specs: routing; routing and another one
    "specs": ("one", "two"),
    # one engine; or prefill and decode instances, and how blocks go from one to the other
    "pd": ("mixed", "shm", "tcp", "device"),
    # the decode instance has the prompts' beginnings before they come
    "hit": ("no", "yes"),
    # an instance is killed in the middle
    "dies": ("nobody", "prefill", "decode"),
}
STORES = ("memory", "file", "mooncake")
# tiers behind which a real process or server stands: no virtual time
REAL = ("file", "mooncake")

BLOCK_TOKENS = 4
WEIGHTS_ID = 1001
NEW_WEIGHTS_ID = 2002
MAX_RUNNING = 8
# fewer than the requests of the play need at a time, and more than they ever do
TIGHT_BLOCKS, ROOMY_BLOCKS = 26, 64
# of the order in which cells are looked at: this one gives few cells, with most threes in them
_SEED = 353
_CHUNK_TOKENS, _WHOLE_TOKENS = 12, 512
# of a sequence in a step
MAX_DRAFTS = 3
# what `impossible` looks at
_DECIDING = ("cache", "tier", "preempt", "tp", "pd", "hit", "dies")


def impossible(cell: Cell) -> str:
    """Why there is no such cell; "" where there is."""
    tier, preempt = cell["tier"], cell["preempt"]
    if cell["cache"] == "off" and tier != "device":
        return "tiers find blocks by prefix: config refuses a host tier or a store without the prefix cache"
    if preempt == "swap" and tier == "device":
        return "swap copies to the host, and there is no host tier"
    if preempt == "writeback" and tier not in STORES:
        return "write-back writes to a store, and there is none"
    if preempt == "recompute" and tier != "device":
        return "with a host tier the blocks of preempted requests survive there"
    if cell["tp"] == "2x4" and cell["pd"] == "mixed":
        return "one engine has one width"
    if cell["tp"] == "4" and cell["pd"] != "mixed":
        return "instances of equal width are two of 2"
    return _impossible_pd(cell)


def _impossible_pd(cell: Cell) -> str:
    tier = cell["tier"]
    if cell["pd"] == "mixed":
        alone = cell["hit"] == "no" and cell["dies"] == "nobody"
        return "" if alone else "one engine has no other whose prefix or death could matter"
    if cell["cache"] == "off":
        return "instances find blocks by prefix: config refuses a role without the prefix cache"
    if tier == "device":
        return "instances read host blocks: config refuses a role without a host tier"
    if tier in ("memory", "mooncake"):
        return "an instance deals with its store as an engine does: one store stands for all behind instances"
    return ""


def possible(cell: Cell) -> bool:
    return not impossible(cell)


@cache
def every_cell() -> tuple[Cell, ...]:
    return tuple(all_cells(DIMENSIONS, possible, _DECIDING))


@cache
def quick_cells(seed: int = _SEED) -> tuple[Cell, ...]:
    """For `make test`: every pair of values."""
    cells = list(every_cell())
    # where several are as good, not the one that resembles the last
    Random(seed).shuffle(cells)
    return tuple(covering(cells, 2))


def virtual_cells() -> list[Cell]:
    """All of one process without drafts; of groups and of drafts what `quick_cells` has, and every three values."""
    cells = [cell for cell in every_cell() if cell["tier"] not in REAL and cell["pd"] == "mixed"]
    plain = [cell for cell in cells if cell["tp"] == "1" and cell["drafts"] == "none"]
    others = [cell for cell in cells if cell["tp"] != "1" or cell["drafts"] != "none"]
    Random(_SEED).shuffle(others)
    chosen = plain + [cell for cell in cells if cell in quick_cells()] + covering(others, 3)
    return list({name_of(cell): cell for cell in chosen}.values())


def pd_cells() -> list[Cell]:
    """Of several instances, which are real processes or share a real loop: what `quick_cells` has, and every three
    values of all such cells."""
    cells = [cell for cell in every_cell() if cell["pd"] != "mixed"]
    Random(_SEED).shuffle(cells)
    chosen = [cell for cell in quick_cells() if cell["pd"] != "mixed"] + covering(cells, 3)
    return list({name_of(cell): cell for cell in chosen}.values())


def real_cells(tier: str) -> list[Cell]:
    """Of a tier with a real process behind it: what `quick_cells` has, and every three values of all such tiers."""
    array = covering([cell for cell in every_cell() if cell["tier"] in REAL and cell["pd"] == "mixed"], 3)
    chosen = [cell for cell in (*quick_cells(), *array) if cell["pd"] == "mixed"]
    # a cell may stand in both
    return list({name_of(cell): cell for cell in chosen if cell["tier"] == tier}.values())


def name_of(cell: Cell) -> str:
    return ",".join(f"{dimension}={value}" for dimension, value in cell.items())


def num_blocks(cell: Cell) -> int:
    return ROOMY_BLOCKS if cell["preempt"] == "none" else TIGHT_BLOCKS


def host_blocks(cell: Cell) -> int:
    """In front of a store: more than one request writes at a time, so that no write is dropped."""
    if cell["tier"] == "device":
        return 0
    return 96 if cell["tier"] == "host" else num_blocks(cell) + 16


def ranks_of(cell: Cell, role: str = "", *, second: bool = False) -> int:
    """Of an engine of this cell. What one width has written to a store, another reads: the second engine on it has
    another one."""
    widths = [int(width) for width in cell["tp"].split("x")]
    if second:
        return {1: 2, 2: 4, 4: 1}[widths[0]]
    return widths[-1] if role == "decode" else widths[0]


def engine_config(
    cell: Cell, store_config: Mapping[str, Any] | None = None, *, second: bool = False, role: str = ""
) -> EngineConfig:
    """An engine of this cell; `store_config` says where its store is. `second`: the other engine on that store.
    `role`: of an instance."""
    real = cell["tier"] in REAL
    ranks = ranks_of(cell, role, second=second)
    values: dict[str, Any] = {}
    if cell["tier"] != "device":
        values["host_blocks"] = host_blocks(cell)
        values["write_back"] = cell["preempt"] == "writeback"
    if cell["tier"] in STORES:
        values["store"] = cell["tier"]
        values["store_config"] = dict(store_config or {})
        if real and not second:
            # its store is empty, and how long it takes to say so would decide who is preempted
            values["fetch_min_tokens"] = 1 << 20
        # what a write-back cell finds in its store came there that way
        values["write_through"] = "off" if cell["preempt"] == "writeback" else "all"
    runner = {
        "block_tokens": BLOCK_TOKENS,
        "num_blocks": num_blocks(cell),
        "weights_id": WEIGHTS_ID,
        # of 4 ranks two hold each share
        "kv_shares": 2,
        "values_spec": cell["specs"] == "two",
        "step_s": 0.002 if real else 0.01,
        "token_s": 0.0 if real else 0.001,
        "copy_s": 0.001 if real else 0.002,
    }
    chunk_tokens = _CHUNK_TOKENS
    if cell["drafts"] != "none":
        values["speculation"] = Speculation(drafter=cell["drafts"], max_tokens=MAX_DRAFTS, budget=False)
        # drafts of all who run fit a step
        chunk_tokens = MAX_RUNNING * (MAX_DRAFTS + 1)
    return synthetic_config(
        runner,
        tensor_parallel=ranks,
        process="inline" if ranks == 1 else "worker",
        prefix_cache=cell["cache"] == "on",
        pipeline_depth=int(cell["depth"]),
        max_running=MAX_RUNNING,
        max_step_tokens=chunk_tokens if cell["prefill"] == "chunked" else _WHOLE_TOKENS,
        decode_reserve_blocks=0,
        # the burst counts on its first request never being preempted
        policy="arrival",
        request_deadline_s=600.0,
        **values,
    )
