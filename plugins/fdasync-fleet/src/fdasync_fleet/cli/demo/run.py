"""`fdasync demo`: serves chats and a workload from a real checkpoint, checks every token and row, shows the figures.

With `--store` everything is served twice, the second time by a fresh engine on the same store: blocks that come back
from the store are checked like the others. With `--pd` prefill and decode instances serve, in processes of their own.
Uses only public names, also of the transformers and trainer plugins. Called by `command.py`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import uvloop
from rich.progress import Progress

from fdasync.cli.common.options import parse_policy, parse_store
from fdasync.errors import PluginError
from fdasync_fleet.cli.demo.chats import make_chats, show_experts
from fdasync_fleet.cli.demo.checkpoint import choose
from fdasync_fleet.cli.demo.one_engine import serve_all
from fdasync_fleet.cli.demo.pd import parse_pd
from fdasync_fleet.cli.demo.report import figures_of, finished, pd_figures, show, store_figures
from fdasync_fleet.cli.demo.workload import COLUMNS, REFRESH_S, DemoOptions, Served

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo; returns the exit code. Raises FdasyncError where it cannot run."""
    transformers, trainer = _plugins()
    if options.json_path is not None:
        options.json_path.open("a").close()  # before the work: a path that cannot be written to
    store = parse_store(options.store)
    parse_pd(options.pd)
    parse_policy(options.policy)
    options, model = choose(options, transformers, console)
    tokenizer = transformers.load_tokenizer(str(model))
    chats = make_chats(tokenizer, console)
    lives = uvloop.run(serve_all(options, model, store, chats, console))
    served = lives[0]
    if chats:
        show_experts(tokenizer, served.results[0], console)
    report = _verify(trainer, model, lives, console)
    figures = figures_of(served, report)
    if options.store is not None:
        figures["store"] = store_figures(options.store, *lives)
    if served.moved is not None:
        figures["pd"] = pd_figures(served)
    show(figures, served, console)
    for difference in report.differences[:10]:
        console.print(f"  {difference.verdict}: {difference}", style="red", highlight=False)
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(figures, indent=2) + "\n")
    good = report.ok and all(finished(life) == len(life.jobs) for life in lives)
    if len(lives) > 1 and not figures["store"]["hit_tokens_store"]:
        refused = figures["store"]["refused_why"]
        why = f"it refused what was written: {refused}" if refused else "computing was faster, or it was not there"
        console.print(f"nothing came back from the store: {why}", style="yellow", markup=False, highlight=False)
    ties = report.rows_tied + report.tokens_tied
    equal = "everything equals the reference" + (f", but for {ties} within rounding of a tie" if ties else "")
    console.print(f"[green]{equal}[/]" if good else "[red]something differs[/]")
    return 0 if good else 1


def _verify(trainer: Any, model: Path, lives: list[Served], console: Console) -> Any:
    records = [
        trainer.Served(
            result.prompt_token_ids,
            sample.token_ids,
            greedy=job.params.temperature == 0,
            routing=sample.routing,
            wants_rows=sample.finish_reason in ("stop", "length"),
        )
        for served in lives
        for job, result in zip(served.jobs, served.results, strict=True)
        for sample in result.samples
    ]
    shown = 0.0
    with Progress(*COLUMNS, console=console, auto_refresh=False) as progress:
        task = progress.add_task("checking against the library's plain forward pass", total=len(records))

        def tell(done: int, total: int) -> None:
            nonlocal shown
            progress.update(task, completed=done)
            if done == total or time.monotonic() > shown + REFRESH_S:
                shown = time.monotonic()
                progress.refresh()

        return trainer.verify(model, records, progress=tell)


def _plugins() -> tuple[Any, Any]:
    """What makes and serves a checkpoint, and what computes it once more."""
    try:
        import fdasync_trainer
        import fdasync_transformers
    except ImportError as error:
        folders = "./plugins/fdasync-{kernels,transformers,fleet,trainer}"
        hint = f"in a checkout, pip install {folders}"
        raise PluginError("fdasync.runners", "transformers", "", f"cannot be imported ({error}); {hint}") from error
    return fdasync_transformers, fdasync_trainer
