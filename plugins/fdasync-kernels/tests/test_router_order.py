"""The order in which the router's product adds its blocks: `router/product.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.router.product import Tile, launch_product, router_logits

# one block, two and four beside each other, either side as rows
TILES = [
    Tile(16, 16, 1, 4, 2, False), Tile(16, 8, 2, 2, 3, False), Tile(1, 8, 4, 1, 3, False), Tile(16, 16, 4, 2, 3, True),
]  # fmt: skip
BIG = 2.0**26
BLOCK = 128
# values of successive blocks, and their sum in float32 from the first to the last
ORDERS = {
    (BIG, -BIG, 1.0): 1.0,
    (BIG, 1.0, -BIG): 0.0,
    (1.0, BIG, -BIG): 0.0,
    (0.0, BIG, -BIG, 1.0): 1.0,
    (0.0, BIG, 1.0, -BIG): 0.0,
    (BIG, -BIG, 0.0, 1.0): 1.0,
    (0.0, 0.0, BIG, -BIG, 1.0): 1.0,
    (0.0, 0.0, 0.0, BIG, -BIG, 1.0): 1.0,
    (0.0, 0.0, 0.0, 1.0, BIG, -BIG): 0.0,
}


@pytest.mark.parametrize("tile", [None, *TILES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_added_in_rising_order(device, tile, dtype):
    """One value of each block is not 0, so every block's own sum is exact. An expert for each order."""
    hidden = 8 * BLOCK
    x = torch.zeros((18, hidden), device=device, dtype=dtype)
    # another place in each block, so that no block is told by its place
    places = torch.arange(8) * BLOCK + torch.arange(8) * 9
    x[:, places] = 1.0
    weight = torch.zeros((len(ORDERS), hidden), device=device, dtype=dtype)
    for row, values in enumerate(ORDERS):
        weight[row, places[: len(values)]] = torch.tensor(values, device=device, dtype=dtype)
    logits = torch.full((18, len(ORDERS)), float("nan"), device=device)
    if tile is None:
        logits = router_logits(x, weight, rounded=False, dtype=torch.float32)
    else:
        launch_product(x, weight, None, logits, False, tile)
    assert torch.equal(logits.cpu(), torch.tensor(list(ORDERS.values())).expand(18, len(ORDERS)))
