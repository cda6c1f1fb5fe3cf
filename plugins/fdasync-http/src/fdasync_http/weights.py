"""Weights from disk, for both dialects: which folders a client may name. Knows no dialect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from fdasync_http.config import HttpConfig


def folder_within(config: HttpConfig, named: str, field: str) -> str:
    """The folder that a client names, resolved. Raises Refused (400) unless it is a folder in `weights_root`.

    It looks at the disk on the loop: a few calls of `stat`, which a trainer waits for anyway.
    """
    if not config.weights_root:
        raise Refused(400, "no folder of weights is open to clients; start with --weights-root DIR", param=field)
    if not named or "\0" in named:
        raise Refused(400, f"{named!r} is no folder", param=field)
    root = Path(config.weights_root).resolve()
    # links are followed first: one inside the root may lead out of it
    folder = Path(named).resolve()
    if folder != root and root not in folder.parents:
        raise Refused(400, f"{named} is outside of the folder of weights, {config.weights_root}", param=field)
    if not os.path.isdir(folder):
        raise Refused(400, f"{named} is no folder", param=field)
    return str(folder)
