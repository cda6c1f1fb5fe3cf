"""The client without the plugin, which benchmarks compare with: it moves the bytes that it is timed for."""

from __future__ import annotations

import os

import pytest
from fdasync_mooncake.direct import DirectProcess

from fdasync.ipc.shared_memory import SharedRegion


@pytest.mark.usefixtures("nothing_left")
def test_it_moves_the_bytes(pool):
    region = SharedRegion.create("direct", 4 << 20)
    data = os.urandom(4 << 20)
    region.view()[:] = data
    parts = [[(start, 4096), (start + 4096, (1 << 20) - 4096)] for start in range(0, 4 << 20, 1 << 20)]
    with DirectProcess(pool.address, region, parts, checksum=True) as direct:
        assert direct.put("one") > 0
        region.view()[:] = bytes(4 << 20)
        assert direct.get("one") > 0
        assert region.view() == data
        direct.delete("one")
        with pytest.raises(RuntimeError, match="-704"):
            direct.get("one")
    region.close()
