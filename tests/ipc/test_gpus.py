"""The machine's GPUs by their names: what the driver's files tell, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fdasync.errors import ConfigError
from fdasync.ipc.gpus import check_names, environment_of, find, installed, visible
from tests.support.gpus import address_of, install_gpus, uuid_of

if TYPE_CHECKING:
    from pathlib import Path


def seen(monkeypatch: pytest.MonkeyPatch, told: str) -> list[tuple[str, str]]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    return [(gpu.name, gpu.token) for gpu in visible() or ()]


def test_gpus_are_counted_by_address_and_named_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 3)
    assert [(gpu.name, gpu.key, gpu.token) for gpu in installed() or ()] == [
        (f"{number}", address_of(number), uuid_of(number)) for number in range(3)
    ]
    assert visible() == installed()
    assert str(find([1])[0]) == "GPU 1 (0000:20:00.0)"
    # of which this container has no device file
    (tmp_path / "dev" / "nvidia1").unlink()
    assert [(gpu.name, gpu.token) for gpu in installed() or ()] == [("0", uuid_of(0)), ("1", uuid_of(2))]


def test_a_driver_that_knows_no_uuids_yet_has_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 3, known=False)
    assert [gpu.token for gpu in find([2, 0])] == ["2", "0"]
    assert seen(monkeypatch, "2,1") == [("0", "2"), ("1", "1")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    # taken at its word
    assert find(["GPU-abc"])[0].token == "GPU-abc"


def test_without_the_drivers_folder_device_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path / "bare", monkeypatch, 0)
    assert (installed(), visible()) == ([], [])
    dev = tmp_path / "bare" / "dev"
    (dev / "nvidia10").touch()
    (dev / "nvidia9").touch()
    assert [(gpu.name, gpu.key, gpu.token) for gpu in installed() or ()] == [
        ("0", "nvidia9", "0"),
        ("1", "nvidia10", "1"),
    ]
    (dev / "nvidia10").unlink()
    (dev / "nvidia9").unlink()
    (dev / "dxg").touch()
    assert installed() is None
    # which indices there are is not known
    assert [gpu.token for gpu in find([7])] == ["7"]
    assert seen(monkeypatch, "3,1") == [("0", "3"), ("1", "1")]


def test_indices_count_among_those_that_this_process_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 4, visible=f" 3, {uuid_of(1)[:8]}")
    assert [gpu.token for gpu in find([0, 1])] == [uuid_of(3), uuid_of(1)]
    assert [gpu.name for gpu in find([uuid_of(1)])] == ["1"]
    with pytest.raises(ConfigError, match=r"2 is no GPU .*sees 2, by CUDA_VISIBLE_DEVICES=' 3, GPU-.*limit: 0 to 1"):
        find([2])
    with pytest.raises(ConfigError, match="is no GPU that this process sees"):
        find([uuid_of(0)])
    # as CUDA does, which sees nothing behind an entry that is wrong
    assert seen(monkeypatch, "2,-1,0") == [("0", uuid_of(2))]
    assert seen(monkeypatch, "2,9,0") == [("0", uuid_of(2))]
    assert seen(monkeypatch, "") == []
    assert seen(monkeypatch, "MIG-1f,0") == [("0", "MIG-1f"), ("1", uuid_of(0))]
    assert find(["MIG-1f"])[0].key == "MIG-1f"
    with pytest.raises(ConfigError, match="MIG-2f"):
        find(["MIG-2f"])


def test_what_is_not_there_and_what_is_there_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 2)
    assert find(["MIG-1f"])[0].token == "MIG-1f"
    for names in ([0, 0], [0, uuid_of(0)], [uuid_of(0), uuid_of(0)[:10]]):
        with pytest.raises(ConfigError, match=r"names GPU \S+ \(0000:10:00.0\) twice"):
            find(names)
    for name in (2, "GPU-ff"):
        with pytest.raises(ConfigError, match=r"is no GPU that this process sees: it sees 2 "):
            find([name])
    for wrong in (-1, "0", "", "cuda:0", "GPU-", "GPU-1,GPU-2", "GPU-1 "):
        with pytest.raises(ConfigError, match="names no GPU"):
            check_names([0, wrong])


def test_a_rank_sees_its_own_first_and_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 4)
    group = find([3, 1, 0])
    told = [environment_of(group, rank)["CUDA_VISIBLE_DEVICES"].split(",") for rank in range(3)]
    assert told == [[uuid_of(number) for number in order] for order in ((3, 1, 0), (1, 3, 0), (0, 3, 1))]
    assert environment_of(group, 0)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
