"""`fdasync verify-trainer`: parses. Its work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fdasync.cli.common.fields import Fields
from fdasync_trainer.cli.workload import TrainerOptions

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = Fields(
    TrainerOptions,
    names={"tensor_parallel": "--tp", "as_json": "--json"},
    types={
        "model": click.Path(exists=True, file_okay=False, path_type=Path),
        "write": click.Path(dir_okay=False, path_type=Path),
        "rollout": _FILE,
        "logprobs": _FILE,
    },
)


@click.command(name="verify-trainer")
@_OPTIONS
def verify_trainer(**options: Any) -> None:
    """Compare a rollout's log-probs with a trainer's, bit by bit.

    Serves prompts with too few blocks (preemption), shared prefixes, chunks of odd sizes, two steps in flight, a weight
    update in the middle, and by a prefill and a decode instance. Then the library's model computes the log-probs of
    all sampled tokens as a trainer does, in padded batches. Where bits differ, the first request and position are
    named, and the first layer and module whose output differs. For other trainers: --write FILE, then --rollout FILE
    --logprobs THEIRS (`pydoc fdasync_trainer.verification.logprob_file` has the layout).

    Exit code 0: all bits are equal. 1: something differs. 2: it could not run.
    """
    from fdasync_trainer.cli.run import run_verify

    plan = _OPTIONS.take(options)
    # with --json, stdout has nothing else
    sys.exit(run_verify(plan, Console(stderr=plan.as_json)))
