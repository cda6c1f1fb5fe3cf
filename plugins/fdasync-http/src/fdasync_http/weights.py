"""Weights from disk, for all dialects: which folders a client may name. Knows no dialect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from fdasync_http.config import HttpConfig


def folder_within(config: HttpConfig, named: str, field: str) -> str:
    """The folder that a client names, resolved. Raises Refused (400) unless it is a folder in `weights_root` or
    `pulls_root`.

    It looks at the disk on the loop: a few calls of `stat`, which a trainer waits for anyway.
    """
    roots = [root for root in (config.weights_root, config.pulls_root) if root]
    if not roots:
        raise Refused(400, "no folder of weights is open to clients; start with --weights-root DIR", param=field)
    folder = Path(resolved(named, field))
    if not any(_is_within(folder, root) for root in roots):
        problem = f"{named} is outside of the folder of weights, {' or '.join(roots)}"
        raise Refused(400, problem, param=field)
    if not os.path.isdir(folder):
        raise Refused(400, f"{named} is no folder", param=field)
    return str(folder)


def local_within(config: HttpConfig, named: str, field: str) -> str:
    """The folder of a pulled checkpoint, resolved; it need not be there. Raises Refused (400) unless it would lie in
    `pulls_root`."""
    root = config.pulls_root
    if not root:
        problem = "no folder is open to checkpoints that are pulled; start with --pulls-root DIR"
        raise Refused(400, problem, param=field)
    folder = Path(resolved(named, field))
    if folder == Path(root).resolve() or not _is_within(folder, root):
        raise Refused(400, f"{named} does not lie in the folder of pulled checkpoints, {root}", param=field)
    return str(folder)


def resolved(named: str, field: str) -> str:
    """A path that a client names, wherever it leads. Raises Refused (400) if it cannot be a path."""
    if not named or "\0" in named:
        raise Refused(400, f"{named!r} is no folder", param=field)
    # links are followed first: one inside a root may lead out of it. A loop of them leads nowhere, and is no folder
    return os.path.realpath(named)


def _is_within(folder: Path, root: str) -> bool:
    resolved = Path(root).resolve()
    return folder == resolved or resolved in folder.parents
