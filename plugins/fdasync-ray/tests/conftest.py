"""A real Ray cluster of several raylets, once for all tests of a module, in a network that has only loopback.

Elsewhere Ray listens on the machine's own address, whatever it is told.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fdasync.engine.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# the tests' helpers
SUPPORT = str(Path(__file__).parent / "support")
sys.path.insert(0, SUPPORT)
NODE_CPUS = 2
# declared: Ray counts them, and no instance of these tests uses one
NODE_GPUS = 2
MEMORY = 80 << 20


@pytest.fixture(scope="module")
def loopback() -> Iterator[None]:
    """This module's tests run in a network of their own; skips where none can be made."""
    testing = pytest.importorskip("fdasync_mooncake.testing", reason="its loopback network namespace is used")
    if os.geteuid() != 0:
        pytest.skip("a network namespace for Ray needs root")
    try:
        namespace = testing.LoopbackNamespace()
    except OSError as error:
        pytest.skip(f"no network namespace for Ray can be made: {error}")
    try:
        with namespace.entered():
            yield
    finally:
        namespace.close()


@pytest.fixture(scope="module")
def cluster(loopback: None) -> Iterator[Any]:
    """A head that takes no instances, and three nodes with two CPUs and GPUs each; this process is connected to it."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.50'")
    import ray
    from ray.cluster_utils import Cluster

    # actors of tests import the tests' modules
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = SUPPORT if paths is None else f"{SUPPORT}{os.pathsep}{paths}"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=NODE_CPUS, num_gpus=NODE_GPUS, object_store_memory=MEMORY)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("PYTHONPATH")
        if paths is not None:
            os.environ["PYTHONPATH"] = paths


@pytest.fixture
def engine_of() -> Callable[..., EngineConfig]:
    """A configuration of the synthetic runner, which needs no model."""

    def make(**runner: Any) -> EngineConfig:
        shape = {"vocab_size": 128, "block_tokens": 16, "num_blocks": 256, "max_context_tokens": 512, **runner}
        return EngineConfig(
            runner="synthetic", runner_config=shape, process="inline", role="mixed", host_blocks=64, close_deadline_s=5
        )

    return make
