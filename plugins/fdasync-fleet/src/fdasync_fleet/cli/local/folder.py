"""The folder of a fleet's sockets: one fleet uses it at a time, and other files in it are left alone.

A lock on the folder itself says that it is taken: the lock leaves no file, and ends with its process. Knows no
processes. Called by `local/fleet.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync_fleet.link.address import check_address, check_free

if TYPE_CHECKING:
    from collections.abc import Iterable

# another fleet may remove the folder between making and locking it
_TRIES = 3


class Folder:
    """See the module. Blocks for microseconds, at the start and at the end.

    Args:
        wanted: made if missing, and then removed at the end if it is empty; None: a private one, removed whole.

    Attributes:
        path: absolute.
    """

    def __init__(self, wanted: Path | None) -> None:
        """Raises ConfigError if another fleet has the folder, or it cannot be made."""
        self._private = wanted is None
        self._made = False
        self._fd = -1
        try:
            if wanted is None:
                self.path = Path(tempfile.mkdtemp(prefix="fdasync-"))
            else:
                self.path = wanted.absolute()
                self._take()
        except OSError as error:
            raise ConfigError("folder", f"{wanted or tempfile.gettempdir()}: {error.strerror}") from None

    def _take(self) -> None:
        for _ in range(_TRIES):
            self._make()
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)  # blocking: once, at start
            try:
                self._lock(fd)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):  # blocking: the same
                    self._fd = fd
                    return
            except FileNotFoundError:
                pass
            finally:
                if self._fd != fd:
                    os.close(fd)
        raise ConfigError("folder", f"{self.path} is made and removed by other processes all the time")

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True)  # blocking: once, at start
            self._made = True
        except FileExistsError:
            self._made = False

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"other instances have their sockets in {self.path}"
            raise ConfigError("folder", problem, hint="choose another folder, or end them first") from None
        except OSError:
            # the file system has no locks: `check_free` looks at each address
            return

    def check(self, addresses: Iterable[str]) -> None:
        """Raises ConfigError for an address at which another process listens."""
        for address in addresses:
            check_address(address, listens=True)
            check_free(address)

    def close(self) -> None:
        """Remove the folder if it was made here and is empty, and unlock it; idempotent."""
        if self._private:
            shutil.rmtree(self.path, ignore_errors=True)  # blocking: a few sockets, once
        elif self._made and self._fd >= 0:
            with contextlib.suppress(OSError):
                # it holds files of others: it stays
                self.path.rmdir()  # blocking: once, at the end
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
