"""Shows whether a model would be served, and how much memory it would take (`fdasync doctor --model`).

The runner's plugin looks at the model (`Runner.examine`); this file prints what it found. Called by `main.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Column, Table

from fdasync.cli.common.stdout import print_json
from fdasync.runner.plugins import make_runner

if TYPE_CHECKING:
    from rich.console import Console

    from fdasync.engine.config import EngineConfig
    from fdasync.runner.report import ModelReport

_CONTEXTS = (4_096, 16_384, 65_536)
_CONCURRENCIES = (1, 16, 64, 256)


def examine_model(config: EngineConfig, as_json: bool, console: Console) -> bool:
    """Print the report of a configuration's model; returns whether it would be served.

    Raises what `Runner.examine` raises, PluginError, and ConfigError of the runner's configuration.
    """
    report = make_runner(config.runner, config.runner_config, config.runner_limits()).examine()
    if report.served and config.numerics == "fixed" and report.numerics != "fixed":
        reason = f"fixed numerics were asked for, and runner {config.runner!r} does not promise them for it"
        report = msgspec.structs.replace(report, served=False, reason=reason)
    if report.served and report.tensor_parallel != config.tensor_parallel:
        reason = (
            f"{config.tensor_parallel} ranks were asked for, runner {config.runner!r} answers {report.tensor_parallel}"
        )
        report = msgspec.structs.replace(report, served=False, reason=reason)
    if as_json:
        print_json(report)
        return report.served
    console.print(_facts(report))
    if report.kv_token_nbytes:
        console.print(_memory(report, config.max_running))
    told = [f"{what}: kernels are tried on a GPU for {count}" for what, count in report.replaced.items()]
    for note in (*report.notes, *told, *report.kept):
        console.print(f"[dim]- {note}[/]", highlight=False)
    if report.served:
        console.print("[green]would be served[/]; the engine checks the computation itself when it starts")
    else:
        console.print(f"[red]would not be served:[/] {report.reason}", highlight=False)
    return report.served


def _facts(report: ModelReport) -> Table:
    columns = Column(overflow="fold"), Column(overflow="fold")
    table = Table(*columns, title=f"fdasync doctor --model {report.model}", show_header=False)
    table.add_row("architecture", f"{report.family} ({report.model_class or 'no class'})")
    if report.num_hidden_layers:
        moe = f", {report.moe_layers} with {report.num_experts} experts, {report.top_k} a token"
        table.add_row("layers", f"{report.num_hidden_layers}{moe if report.moe_layers else ''}")
    if report.stored_nbytes:
        table.add_row("files", _bytes(report.stored_nbytes))
    if report.weights_nbytes:
        table.add_row("weights in memory", f"{_bytes(report.weights_nbytes)} ({report.dtype})")
    if report.numerics != "default":
        slices = f", sums in {report.sum_slices} slices" if report.sum_slices > 1 else ""
        table.add_row("numerics", report.numerics + slices)
    if report.tensor_parallel > 1:
        table.add_row("ranks", f"{report.tensor_parallel}; memory is that of one of them")
    if report.kv_token_nbytes:
        table.add_row("KV", f"{report.kv_token_nbytes:,} bytes a token")
    if report.state_nbytes:
        table.add_row("recurrent state", f"{report.state_nbytes:,} bytes a sequence, and as much in each snapshot")
    if report.aux_token_nbytes:
        table.add_row("routing", f"{report.aux_token_nbytes:,} bytes a token, in host memory")
    if report.max_context_tokens:
        table.add_row("context", f"{report.max_context_tokens:,} tokens")
    memory = f", {_bytes(report.device_nbytes)}" if report.device_nbytes else ""
    table.add_row("device", f"{report.device}{memory}")
    return table


def _memory(report: ModelReport, max_running: int) -> Table:
    """Weights, KV and state by context and concurrency; what a step computes with comes on top, and so do snapshots."""
    table = Table(title="device memory: weights, and KV of so many sequences at once")
    table.add_column("context")
    counts = sorted({min(count, max_running) for count in (*_CONCURRENCIES, max_running)})
    for count in counts:
        table.add_column(f"{count}", justify="right")
    longest = report.max_context_tokens
    for context in sorted({context for context in _CONTEXTS if context < longest} | {longest}):
        each = context * report.kv_token_nbytes + report.state_nbytes
        cells = [report.weights_nbytes + count * each for count in counts]
        table.add_row(f"{context:,}", *(_cell(nbytes, report.device_nbytes) for nbytes in cells))
    return table


def _cell(nbytes: int, device_nbytes: int) -> str:
    fits = not device_nbytes or nbytes < device_nbytes
    return _bytes(nbytes) if fits else f"[red]{_bytes(nbytes)}[/]"


def _bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} bytes"
