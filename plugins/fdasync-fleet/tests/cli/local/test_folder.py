"""The folder of a fleet's sockets: what others have there stays, whatever becomes of the fleet."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.cli.local.folder import Folder
from fdasync_fleet.link.address import remove_dead

from fdasync.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def listener(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    made.listen()
    return made


def test_one_that_we_made_goes_when_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    folder = Folder(path)
    assert path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not path.exists()
    assert path.parent.exists()


def test_what_is_in_one_that_we_made_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    (tmp_path / "run" / "notes").write_text("mine")
    folder.close()
    assert (tmp_path / "run" / "notes").read_text() == "mine"


def test_one_that_was_there_stays(tmp_path: Path) -> None:
    Folder(tmp_path).close()
    assert tmp_path.exists()


def test_a_private_one_goes_whole() -> None:
    folder = Folder(None)
    (folder.path / "m0").touch()
    folder.close()
    assert not folder.path.exists()


def test_it_has_one_fleet_at_a_time(tmp_path: Path) -> None:
    first = Folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="other instances have their sockets in") as refused:
        Folder(tmp_path / "run")
    assert refused.value.hint
    assert first.path.exists()
    first.close()
    Folder(tmp_path / "run").close()


def test_one_that_goes_while_it_is_taken_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, lock = Folder(tmp_path / "run"), Folder._lock

    def slow(folder: Folder, fd: int) -> None:
        # whoever had it ends between our open and our lock
        first.close()
        lock(folder, fd)

    monkeypatch.setattr(Folder, "_lock", slow)
    second = Folder(tmp_path / "run")
    assert os.path.samestat(os.fstat(second._fd), second.path.stat())
    second.close()
    assert not (tmp_path / "run").exists()


def test_what_can_be_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"folder: .*Not a directory"):
            Folder(path)


def test_addresses_of_others_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.* no socket"):
        folder.check([f"ipc://{tmp_path}/m0", f"ipc://{tmp_path}/notes"])
    with closing(listener(tmp_path / "p0")), pytest.raises(ConfigError, match=r"a process listens at .*p0"):
        folder.check([f"ipc://{tmp_path}/p0"])
    # left behind by one that died
    folder.check([f"ipc://{tmp_path}/p0"])
    with pytest.raises(ConfigError, match="too long"):
        folder.check([f"ipc://{tmp_path}/{'x' * 108}"])
    folder.close()


def test_only_dead_sockets_are_removed(tmp_path: Path) -> None:
    path, address = tmp_path / "p0", f"ipc://{tmp_path}/p0"
    remove_dead(address)
    path.write_text("mine")
    remove_dead(address)
    assert path.read_text() == "mine"
    path.unlink()
    with closing(listener(path)):
        remove_dead(address)
        assert path.exists()
    remove_dead(address)
    assert not path.exists()
