"""Sockets of links in the file system."""

from __future__ import annotations

import os


def is_there(path):
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
