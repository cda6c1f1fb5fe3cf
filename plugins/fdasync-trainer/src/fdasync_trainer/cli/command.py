"""`fdasync verify-trainer`: parses. Its work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fdasync.runner.shares import MOST_RANKS


@click.command(name="verify-trainer")
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Hugging Face checkpoint folder."
)
@click.option(
    "--numerics", default="fixed", show_default=True, type=click.Choice(["fixed", "default"]), help="Of both sides."
)
@click.option(
    "--sum-slices", default=1, show_default=True, type=click.Choice([1, 2, 4]), help="Of fixed numerics, of both sides."
)
@click.option(
    "--tp", "tensor_parallel", default=1, show_default=True, type=click.IntRange(1, MOST_RANKS), help="Of the rollout."
)
@click.option(
    "--tokens", default=2000, show_default=True, type=click.IntRange(1, 10_000_000), help="Sampled tokens, at least."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of prompts, sampling and weights.")
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Sequences in a trainer's pass.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Of weights and KV, of both sides; float64 has no fixed numerics.",
)
@click.option("--device", help="Of both sides: cpu, cuda:1, ... Default: a GPU if there is one.")
@click.option("--num-threads", type=click.IntRange(1), help="CPU threads of each model process.")
@click.option("--pd/--no-pd", default=True, show_default=True, help="Serve by a prefill and a decode instance, too.")
@click.option("--update/--no-update", default=True, show_default=True, help="Update the weights in the middle.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rollout's log-probs here, for another trainer; goes without an update.",
)
@click.option(
    "--rollout",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A rollout's file (--write), to be compared with --logprobs; serves nothing.",
)
@click.option(
    "--logprobs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another trainer's file of log-probs for --rollout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
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
    from fdasync_trainer.cli.workload import TrainerOptions

    # with --json, stdout has nothing else
    sys.exit(run_verify(TrainerOptions(**options), Console(stderr=options["as_json"])))
