"""What chaos asks an instance can be asked: it reads the inside of engines, which changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fdasync import Instance
from fdasync.testing import synthetic_config
from tests.nightly.chaos.child import probe

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: a probe reads /proc on its instance's loop."""


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_an_idle_instance_holds_nothing(tmp_path: Path, role: str) -> None:
    config = synthetic_config(role=role, host_blocks=8, process="inline")
    async with Instance(config, listen=f"ipc://{tmp_path}/one", name="one") as instance:
        seen = probe(instance)
        assert (seen.state, seen.problem, seen.paused, seen.released) == ("running", "", False, [])
        assert not any(count for name, count in seen.held.items())
        await instance.engine.sleep(level=1)
        seen = probe(instance)
        assert (seen.asleep, seen.paused, bool(seen.released)) == (True, True, True)
        await instance.engine.wake()
        assert not probe(instance).asleep
