"""`fdasync verify-trainer`: a rollout's log-probs against a trainer's, bit by bit, and the first module that differs.

The trainer is the library's model in this process (`fdasync_trainer.TrainerSide`), or another one, whose file of
log-probs is compared with a rollout's file. Called by `command.py`.
"""

from __future__ import annotations

import importlib
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvloop

import fdasync_trainer
from fdasync.errors import BadInput, PluginError
from fdasync.stats import SchedulerStats
from fdasync_trainer.cli.report import Figures, Part, show
from fdasync_trainer.cli.serve import config_of, serve_all, serve_alone
from fdasync_trainer.cli.workload import TEMPERATURE, Play, TrainerOptions, Update

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from fdasync_trainer.cli.workload import Ask


def run_verify(options: TrainerOptions, console: Console) -> int:
    """Compare; returns the exit code: 0: all bits are equal, 1: something differs. Raises FdasyncError."""
    plugin = _plugin()
    if options.logprobs is not None or options.rollout is not None:
        figures = _compare_files(options, plugin)
    elif options.model is None:
        raise BadInput("--model", "is missing", hint="name a checkpoint folder, or two files: --rollout and --logprobs")
    else:
        figures = _verify(options, plugin, console)
    show(figures, options.as_json, console)
    return 0 if figures.ok else 1


def first_of(error: BaseException) -> BaseException:
    """The first error of a group and of groups in it; an error that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _compare_files(options: TrainerOptions, plugin: Any) -> Figures:
    if options.rollout is None or options.logprobs is None:
        missing = "--rollout" if options.rollout is None else "--logprobs"
        hint = "a rollout's file is written with --model DIR --write FILE"
        raise BadInput(missing, "is missing: two files are compared", hint=hint)
    if options.model is not None or options.write is not None:
        raise BadInput(
            "--model" if options.model else "--write", "does not go with two files, which are compared alone"
        )
    compared = plugin.compare_logprobs(plugin.read_logprobs(options.rollout), plugin.read_logprobs(options.logprobs))
    return Figures(numerics="", parts=[Part("files", compared)])


def _verify(options: TrainerOptions, plugin: Any, console: Console) -> Figures:
    # of a file for others: they have the checkpoint's weights alone
    changes = options.update and options.write is None
    if options.write is not None:
        _check_place(options.write)
    trainer = _trainer(options, plugin)
    update = None
    if changes:
        trainer.step(options.seed)
        update = Update(trainer.tensors(), trainer.fingerprint())
    console.print(f"serving {options.tokens:,} tokens with {options.numerics} numerics", highlight=False)
    try:
        plays = uvloop.run(serve_all(options, int(trainer.model.config.get_text_config().vocab_size), update))
    except BaseExceptionGroup as failed:
        # requests that are served together fail together: what the first one says is enough
        raise first_of(failed) from failed
    figures = Figures(
        model=str(options.model),
        numerics=options.numerics,
        dtype=trainer.dtype,
        requests=sum(len(play.results) for play in plays),
        preemptions=sum(play.totals.preemptions for play in plays),
        hit_tokens=sum(play.totals.hit_tokens for play in plays),
        steps=sum(play.totals.steps for play in plays),
        moved_blocks=sum(play.moved_blocks for play in plays),
    )
    tables = [(play, _table(play, plugin)) for play in plays]
    if options.write is not None:
        joined = tuple(one for _, table in tables for one in table.sequences)
        plugin.write_logprobs(options.write, plugin.LogprobTable(joined, tables[0][1].weights))
    first = next(iter(plays[0].weights_ids))
    figures.crossed_tokens = sum(_behind(table, first, play.crossed) for play, table in tables)
    if update is not None:
        console.print("the trainer's pass, updated weights", highlight=False)
        _compare(options, plugin, trainer, figures, [_only(tables[0], first, changed=True)], update)
        # its memory goes before the next one is loaded
        update = trainer = None
        trainer = _trainer(options, plugin)
    console.print("the trainer's pass, the checkpoint's weights", highlight=False)
    _compare(options, plugin, trainer, figures, [_only(table, first, changed=False) for table in tables], None)
    return figures


def _check_place(path: Path) -> None:
    """Before the work: raise BadInput or OSError unless a file can be put here. Leaves nothing behind."""
    if path.exists() and not path.is_file():
        raise BadInput("--write", f"{path} is no regular file")
    if not path.parent.is_dir():
        raise BadInput("--write", f"there is no folder {path.parent}")
    # without a name where the system has such files
    with TemporaryFile(dir=path.parent):
        pass


def _trainer(options: TrainerOptions, plugin: Any) -> Any:
    return plugin.TrainerSide(options.model, options.dtype, options.numerics, options.sum_slices)


def _table(play: Play, plugin: Any) -> Any:
    temperatures = {ask.name: TEMPERATURE for ask in play.asks if ask.params.logprobs == "processed"}
    return plugin.rollout_logprobs(play.results, play.weights_ids, temperatures)


def _behind(table: Any, first: str, crossed: frozenset[str]) -> int:
    """Tokens that requests sampled behind an update, on KV that may be of the weights before."""
    return sum(
        int((one.told & ~_of_first(table, one, first)).sum()) for one in table.sequences if one.request_id in crossed
    )


def _of_first(table: Any, one: Any, first: str) -> Any:
    """Tokens of a sequence whose log-probs are of the first weights."""
    labels = np.array([*(name.version == first for name in table.weights), False])
    return labels[one.weights]


def _only(played: tuple[Play, Any], first: str, *, changed: bool) -> tuple[Play, Any]:
    """The play with the log-probs of the first weights alone, or of the changed ones."""
    play, table = played
    sequences = []
    for one in table.sequences:
        kept = _of_first(table, one, first) != changed
        if changed and one.request_id in play.crossed:
            kept[:] = False
        values = np.where(kept, one.logprobs, np.float32(np.nan)).astype(np.float32)
        weights = np.where(kept, one.weights, -1).astype(np.int32)
        part = msgspec.structs.replace(one, logprobs=values, weights=weights)
        if part.told.any():
            sequences.append(part)
    return play, msgspec.structs.replace(table, sequences=tuple(sequences))


def _compare(
    options: TrainerOptions, plugin: Any, trainer: Any, figures: Figures, tables: list[Any], update: Update | None
) -> None:
    """Compare plays of one set of weights; the first difference of all is looked for in the modules."""
    trainer.place(options.device)
    for play, table in tables:
        compared = plugin.compare_logprobs(table, trainer.score(table, batch=options.batch, seed=options.seed))
        name = f"{play.name}, {'updated' if update is not None else 'first'} weights"
        figures.parts.append(Part(name, compared))
        if compared.first is not None and figures.module is None and not figures.note:
            (ask,) = [ask for ask in play.asks if ask.name == compared.first.request_id]
            _find_module(options, plugin, trainer, figures, ask, update)


def _find_module(
    options: TrainerOptions, plugin: Any, trainer: Any, figures: Figures, ask: Ask, update: Update | None
) -> None:
    """Serve the request again, alone, and compare what the modules give on both sides."""
    if update is not None:
        # its tensors may lie on a device by now
        update = Update(trainer.tensors(), update.expected)
    result, trace = uvloop.run(serve_alone(config_of(options), ask, update, plugin))
    tokens = np.array([*result.prompt_token_ids, *result.token_ids], np.int32)
    figures.module = plugin.first_difference(trace, trainer.trace(tokens), len(result.prompt_token_ids))
    if figures.module is not None:
        figures.note = f"request {ask.name}, served again alone"
        return
    play = Play(name="", asks=[ask], results=[result], weights_ids={}, crossed=frozenset(), totals=SchedulerStats())
    table = _table(play, plugin)
    again = plugin.compare_logprobs(table, trainer.score(table, batch=1))
    alone = f"request {ask.name}, served again alone"
    if again.not_numbers:
        figures.note = f"{alone}, has log-probs that are no numbers again"
    elif again.differing:
        figures.note = f"{alone}: no module differs, so the log-softmax does"
    else:
        why = "its batch, its cached prefix, preemption or a hand-over"
        figures.note = f"{alone}, has the trainer's bits: the difference comes from {why}"


def _plugin() -> Any:
    try:
        importlib.import_module("fdasync_transformers")
    except ImportError as error:
        folders = "./plugins/fdasync-{kernels,transformers,fleet,trainer}"
        hint = f"in a checkout, pip install {folders}"
        raise PluginError("fdasync.runners", "transformers", "", f"cannot be imported ({error}); {hint}") from error
    return fdasync_trainer
