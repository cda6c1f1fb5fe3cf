"""The conformance suite for stores, on a real pool, in a process of its own as in an engine."""

from __future__ import annotations

import pytest

from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.testing import StoreTests


@pytest.mark.nightly
@pytest.mark.usefixtures("nothing_left")
class TestMooncake(StoreTests):
    """Memory lent by another process: objects outlive the store."""

    examples = 1
    steps = 25

    @pytest.fixture(autouse=True)
    def place(self, request, pool):
        self.config = {"master": pool.address, "metrics": pool.metrics}
        # a client takes a second to leave its pool: the tests of ends wait for it, the others kill the process
        polite = any(word in request.node.name for word in ("close", "end", "across"))
        self.close_deadline_s = 15.0 if polite else 0.02

    def make(self):
        return ProcessStore("mooncake", self.config, close_deadline_s=self.close_deadline_s)

    def again(self, closed):
        return self.make()

    def make_broken(self):
        return ProcessStore("mooncake", self.config | {"master": "127.0.0.1:9"}, close_deadline_s=self.close_deadline_s)

    def test_against_the_model(self):
        # some memory of the store's own: then there are two ways to move bytes, and no end of it in mid-run
        self.config["segment_nbytes"] = 64 << 20
        super().test_against_the_model()

    @pytest.mark.nightly
    def test_against_the_model_across_ends(self):
        self.examples, self.steps = 15, 25
        super().test_against_the_model()
