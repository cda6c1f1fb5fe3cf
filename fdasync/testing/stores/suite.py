"""The conformance suite for stores: what `store/base.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyStore(StoreTests):
        @pytest.fixture(autouse=True)
        def folder(self, tmp_path):
            self.path = tmp_path

        def make(self):
            return MyStore(MyConfig(path=str(self.path)))

        def again(self, closed):
            return self.make()

A store that blocks is tested as it will run: `make` returns a `ProcessStore` around it. Every test opens the store,
with keys of its own, on a loop of its own, bounded. No test needs an async plugin or settings. What a store cannot do
is skipped with the reason. `stores/harness.py` lists the hooks and has the tools, for further tests of your own:

        @on_loop
        async def test_of_mine(self):
            async with self.on_store() as on:
                assert (await on.keep(on.key("a"), b"bytes")).status == "done"
"""

from __future__ import annotations

from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.stores.lifetimes import EndTests
from fdasync.testing.stores.limits import LimitTests
from fdasync.testing.stores.machine import run_machine
from fdasync.testing.stores.values import ValueTests

__all__ = ["StoreTests", "on_loop"]


class StoreTests(ValueTests, LimitTests, EndTests):
    """Subclass it, name the subclass Test..., define `make`; the other hooks are in `StoreHooks`."""

    def test_against_the_model(self) -> None:
        run_machine(self)
