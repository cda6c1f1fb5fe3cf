"""Which protocol an engine starts with: what the environment says, else rdma where the machine has a device for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fdasync_mooncake.transfer import engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("said", "devices", "protocol", "problem"),
    [
        ("", (), "tcp", ""),
        ("", ("mlx5_0",), "rdma", ""),
        ("tcp", ("mlx5_0",), "tcp", ""),
        ("rdma", ("mlx5_0",), "rdma", ""),
        ("rdma", (), "rdma", "no device"),
        ("pigeon", (), "pigeon", "not tcp or rdma"),
    ],
)
def test_the_protocol_is_what_is_said_or_what_the_machine_has(
    said: str, devices: tuple[str, ...], protocol: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(engine, "Path", lambda _: tmp_path)
    monkeypatch.setenv("MOONCAKE_PROTOCOL", said)
    monkeypatch.setenv("MOONCAKE_DEVICE", "mlx5_1")
    found = engine.protocol_here()
    assert found[:2] == (protocol, "mlx5_1")
    assert problem in found[2]
    assert bool(problem) == bool(found[2])
