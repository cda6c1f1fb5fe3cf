"""Bounds of the front as options of `fdasync http`: names, units, ranges, and their group in `--help`.

One table says which option is which field of `HttpConfig` or `ConnectionLimits`. Called by `command.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from fdasync.cli.common.numbers import NumberRange
from fdasync.errors import BadInput
from fdasync_http.config import ConnectionLimits, HttpConfig

if TYPE_CHECKING:
    from collections.abc import Callable

_KIB, _MIB = 1 << 10, 1 << 20


class _Limit(NamedTuple):
    """An option.

    Attributes:
        option: its name.
        field: of `HttpConfig`, or else of `ConnectionLimits`.
        kind: its range.
        words: its help.
        unit: how much of the field's unit one of the option's is.
    """

    option: str
    field: str
    kind: click.IntRange | NumberRange
    words: str
    unit: int = 1

    @property
    def name(self) -> str:
        """As the command gets it."""
        return self.option.removeprefix("--").replace("-", "_")


_COUNT, _SECONDS = click.IntRange(1, 1_000_000), NumberRange(0.1, 1e6)
_LIMITS = (
    _Limit("--max-live", "max_live", _COUNT, "Requests that generate at a time; above it 429."),
    _Limit(
        "--max-body-mib", "max_body_nbytes", click.IntRange(1, 1024),
        "A request's body; above it 413. Decoding a MiB of token ids holds up every stream for some 6 ms.", _MIB,
    ),
    _Limit(
        "--max-bodies-mib", "max_bodies_nbytes", click.IntRange(1, 1 << 20),
        "Bodies that arrive, together; above it 429.", _MIB,
    ),
    _Limit(
        "--max-json-depth", "max_json_depth", click.IntRange(2, 512), "Levels of arrays and objects; above it 400."
    ),
    _Limit("--body-timeout-s", "body_timeout_s", _SECONDS, "For a body to arrive; then 408."),
    _Limit("--pull-s", "pull_s", _SECONDS, "For a version that is pulled; then 503."),
    _Limit(
        "--group-s", "group_s", NumberRange(0.1, 3600.0),
        "For the ranks of a trainer's group to meet, and for the next bytes of its update; then 400 or 503.",
    ),
    _Limit("--health-s", "health_s", _SECONDS, "For the token of /health_generate."),
    _Limit("--max-connections", "max_connections", _COUNT, "Open connections; above it 429."),
    _Limit(
        "--max-header-kib", "max_header_nbytes", click.IntRange(1, 1024),
        "First line and headers of a request; above it 431.", _KIB,
    ),
    _Limit(
        "--max-pipelined", "max_pipelined", click.IntRange(1, 1024),
        "Requests that wait on a connection behind another; one more closes it.",
    ),
    _Limit("--header-timeout-s", "header_s", _SECONDS, "For headers to arrive; then 408."),
    _Limit("--write-timeout-s", "write_s", _SECONDS, "That a client may read nothing of its answer."),
)  # fmt: skip


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options that `limits_of` takes."""
    defaults = {**msgspec.structs.asdict(HttpConfig()), **msgspec.structs.asdict(ConnectionLimits())}
    for limit in reversed(_LIMITS):
        default = defaults[limit.field] // limit.unit if limit.unit > 1 else defaults[limit.field]
        command = click.option(
            limit.option, default=default, show_default=True, type=limit.kind, help=limit.words
        )(command)  # fmt: skip
    return command


def limits_of(options: dict[str, Any]) -> tuple[dict[str, Any], ConnectionLimits]:
    """Fields of `HttpConfig`, and the bounds of connections, from the values of `limit_options`, which are taken out of
    `options`. Raises BadInput."""
    if options["max_bodies_mib"] < options["max_body_mib"]:
        problem = f"{options['max_bodies_mib']} is less than --max-body-mib, {options['max_body_mib']}"
        raise BadInput("--max-bodies-mib", problem, hint="a body of that size could never be read")
    fields = {limit.field: options.pop(limit.name) * limit.unit for limit in _LIMITS}
    own = {name: fields.pop(name) for name in ConnectionLimits.__struct_fields__}
    return fields, ConnectionLimits(**own)


class LimitedCommand(click.Command):
    """A command whose help has the limits in a group of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = {limit.name for limit in _LIMITS}
        records = [(param.name, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        for title, is_limit in (("Options", False), ("Limits", True)):
            with formatter.section(title):
                formatter.write_dl([record for name, record in records if (name in names) == is_limit])
