"""Measures fdasync: `python -m benchmarks NAME`; without a name it lists all commands."""

from __future__ import annotations

import sys

from benchmarks.lib.commands import run

ROOMS = {
    "engine": ("engine_step", "trip", "tiers", "weights", "sleep", "speculation"),
    "stores": ("stores",),
    "fleet": ("link", "transports", "network", "pd_isolation", "pd_headline", "fleet_scale"),
    "http": ("http",),
    "trainer": ("replay_kl", "trainer_step"),
}
GPU = ("serving", "exact", "hybrid", "quantised", "mtp", "pd", "tp")
COMMANDS = {name: f"benchmarks.{room}.{name}" for room, names in ROOMS.items() for name in names}
COMMANDS |= {f"gpu_{name}": f"benchmarks.gpu.{name}" for name in GPU}

if __name__ == "__main__":
    run("benchmarks", COMMANDS, sys.argv[1:])
