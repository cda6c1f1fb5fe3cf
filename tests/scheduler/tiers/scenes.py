"""Tables of a scheduler with tiers, and what several tests do to them."""

from __future__ import annotations

from tests.scheduler.table import Table


def leave_on_host(table, *prompts, **fields):
    """Compute these prompts, and leave their full blocks on the host only."""
    for prompt in prompts:
        table.run(table.request(900 + len(table.finished), prompt, 1, **fields))
    index = table.scheduler.index
    for block in index.pool.live():
        table.scheduler.swap_planner.keep(block)
    table.turn()
    table.answer()
    for block in list(index._clean):
        index._leave_device(block)
    for prompt in prompts:
        assert set(table.places(prompt)) == {"host"}


def hang(table, count=4):
    """As many copies outward as may be in flight, of blocks that are in use nowhere."""
    for key in range(count):
        table.turn(table.request(800 + key, range(8000 + key * 10, 8005 + key * 10), 1))
        table.turn(table.done())
        for block in table.scheduler.index.pool.live():
            table.scheduler.swap_planner.keep(block)
        table.turn()
    assert len(table.copies) == count


LOOKUP_S = 0.002


def make_table(*prompts, **config):
    """With a store that has the full blocks of these prompts. Ten tokens a second are computed, a block is read in a
    millisecond: what the store has is always worth a fetch."""
    values = {
        "num_host_blocks": 64, "store": True, "prefill_tokens_per_s": 10.0, "fetch_nbytes_per_s": 1e6,
        "block_nbytes": 1000, "lookup_s": LOOKUP_S, "write_through": "off", "write_back": False,
    }  # fmt: skip
    table = Table(**{**values, **config})
    for prompt in prompts:
        table.kept.update({(table.namespace, key): None for key in table.keys(prompt)})
    return table


def go_on(table):
    """Steps and copies, one after the other, while the store is silent; yields each turn."""
    while table.flying or table.copies:
        steps = [table.done()] if table.flying else []
        yield table.turn(*steps, *[table.copied() for _ in list(table.copies)])


def fetch_id(table):
    (number,) = table.late
    return number
