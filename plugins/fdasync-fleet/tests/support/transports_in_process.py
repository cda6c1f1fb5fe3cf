"""Factories of transports in a process beside the loop; children import them, too."""

from __future__ import annotations

from fdasync_fleet.transfer.plugins import TransportSpec
from fdasync_fleet.transfer.process.proxy import TransferProcess


def shm_in_process():
    return TransferProcess([TransportSpec("shm")]).transports[0]


def tcp_in_process():
    return TransferProcess([TransportSpec("tcp")]).transports[0]
