"""Which sources of the product mutants are drawn from, by area. Globs from the repository's root."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PLUGIN = "plugins/fdasync-transformers/src/fdasync_transformers"
_KERNELS = "plugins/fdasync-kernels/src/fdasync_kernels"
_FLEET = "plugins/fdasync-fleet/src/fdasync_fleet"
_WEIGHTS = f"{_PLUGIN}/weights"
#: of the plugin's folder of weights: what replaces weights in use; the rest of it loads checkpoints
_UPDATES = [
    f"{_WEIGHTS}/{name}" for name in ("update.py", "named.py", "deltas/**/*.py", "kept/**/*.py", "groups/**/*.py")
]

#: area -> what is in it, and what is not although it matches
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "scheduler": (["fdasync/scheduler/**/*.py"], []),
    "cache": (["fdasync/cache/**/*.py"], ["fdasync/cache/store/**/*.py"]),
    "stores": (
        ["fdasync/cache/store/**/*.py", "plugins/fdasync-mooncake/src/**/*.py"],
        ["plugins/fdasync-mooncake/src/fdasync_mooncake/testing.py"],
    ),
    "transports": ([f"{_FLEET}/transfer/**/*.py"], []),
    "engine": (["fdasync/engine/**/*.py"], ["fdasync/engine/weights/**/*.py"]),
    "weights": (["fdasync/engine/weights/**/*.py", *_UPDATES], []),
    "loaders": (
        [f"{_WEIGHTS}/**/*.py", f"{_PLUGIN}/start/*.py"],
        [*_UPDATES, f"{_WEIGHTS}/random_checkpoints.py"],
    ),
    # kernels written for Hopper alone are not run by an interpreter, so no test without such a GPU could tell
    "kernels": (
        [f"{_KERNELS}/**/*.py"],
        [f"{_KERNELS}/**/*hopper*.py", f"{_KERNELS}/attention/latent_groups.py"],
    ),
    "executors": ([f"{_PLUGIN}/execution/**/*.py"], []),
    "router": (
        [
            f"{_FLEET}/router/**/*.py",
            f"{_FLEET}/instance/**/*.py",
        ],
        [],
    ),
    "http": (["plugins/fdasync-http/src/**/*.py"], []),
}


def sources(root: Path, area: str) -> list[str]:
    """Paths of the area's files, relative to `root`, sorted."""
    inside, outside = AREAS[area]
    left_out = {path for glob in outside for path in root.glob(glob)}
    return sorted(
        {path.relative_to(root).as_posix() for glob in inside for path in root.glob(glob)}
        - {path.relative_to(root).as_posix() for path in left_out}
    )
