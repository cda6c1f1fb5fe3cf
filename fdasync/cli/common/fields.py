"""Options of a command, made of a struct: each field's name, type, bounds, words and default, and the first sentence of
its doc. `--help` has them in groups.

A field's annotation may name a form: `Meta(title="FILE")` and `Meta(title="DIR")` are paths that must exist,
`Meta(title="PATH")` and `Meta(title="FOLDER")` are a file and a folder to be written; any other title is what `--help`
shows for a value. Knows no command. Called by the modules that parse.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import click
import msgspec
from msgspec import Meta

from fdasync.errors import BadInput
from fdasync.registry.docs import docs_of
from fdasync.registry.mapping import alternatives, hints_of, of_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from click import Context, Parameter
    from click.core import ParameterSource

S = TypeVar("S", bound=msgspec.Struct)
File = Annotated[str, Meta(title="FILE")]
Folder = Annotated[str, Meta(title="DIR")]
Address = Annotated[str, Meta(title="ADDRESS")]

_FORMS = {
    "FILE": click.Path(exists=True, dir_okay=False),
    "DIR": click.Path(exists=True, file_okay=False),
    "PATH": click.Path(dir_okay=False, readable=False, writable=True),
    "FOLDER": click.Path(file_okay=False),
}
_WORDS = {int: "INTEGER", float: "FLOAT", bool: "true|false", str: "TEXT"}
_SENTENCE = re.compile(r"\.(?= [A-Z\"`]|$)")


class GroupedOption(click.Option):
    """An option that `--help` shows under the title of its group. One value is taken: two that differ are refused,
    unless it takes several."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def add_to_parser(self, parser: Any, ctx: Context) -> None:
        """See the base. The parser keeps each value that is given, not the last one alone."""
        multiple, self.multiple = self.multiple, True
        super().add_to_parser(parser, ctx)
        self.multiple = multiple

    def consume_value(self, ctx: Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """See the base."""
        given = opts.get(self.name)
        if given is None or self.multiple:
            return super().consume_value(ctx, opts)
        if len(values := dict.fromkeys(given)) > 1:
            told = " and ".join((*self.opts, *self.secondary_opts) if self.is_flag else values)
            raise click.UsageError(f"{self.opts[0]} is given more than once: {told}", ctx)
        return super().consume_value(ctx, {**opts, self.name: given[0]})


class GroupedCommand(click.Command):
    """A command whose `--help` has its options in their groups, and which names the option nearest to a wrong one."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as wrong:
            near = get_close_matches(wrong.option_name, wrong.possibilities or (), 1)
            raise click.NoSuchOption(wrong.option_name, possibilities=near, ctx=ctx) from None
        except click.UsageError as wrong:
            # an option without its value is told by the parser, which knows no command
            wrong.ctx = wrong.ctx or ctx
            raise

    def format_options(self, ctx: Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class FieldType(click.ParamType[Any, Any]):
    """What a field's annotation takes: text of the command line, or a value of a file.

    Args:
        unit: how much of the field's unit one of the option's is.
    """

    name = "value"

    def __init__(self, hint: Any, unit: int = 1) -> None:
        self.hint = _scaled(hint, unit) if unit > 1 else hint
        self.unit = unit

    def get_metavar(self, param: Parameter, ctx: Context) -> str:  # noqa: ARG002 - click's names
        """See the base."""
        return "|".join(_shown(hint, meta) for hint, meta in alternatives(self.hint) if hint is not type(None))

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        """Raises click's BadParameter for what the annotation refuses."""
        name = "" if param is None else str(param.name)
        try:
            given = of_text(self.hint, value, name)
            return given * self.unit if self.unit > 1 else given
        except BadInput as wrong:
            self.fail(str(wrong).removeprefix(f"{name}: "), param, ctx)


def _scaled(hint: Any, unit: int) -> Any:
    """The annotation of a whole number, with its bounds in another unit."""
    ((_, meta),) = alternatives(hint)
    if meta is None:
        return hint
    least = None if meta.ge is None else -(-meta.ge // unit)
    most = None if meta.le is None else meta.le // unit
    return Annotated[int, Meta(ge=least, le=most)]


def between(low: float, high: float) -> FieldType:
    """The type of an option that no struct has: a number from `low` to `high`."""
    return FieldType(Annotated[float, Meta(ge=low, le=high)])


class Fields(Generic[S]):
    """The options of a struct's fields. A decorator of commands.

    Args:
        group: title of their group; a field in `groups` has its own.
        names: options that have another name than their field, as `{"tensor_parallel": "--tp"}`.
        units: options in another unit than their field, which `names` has as well.
        leave: fields that no option sets.
        hidden: options that `--help` does not show.
        types: types of click in place of the annotation's.
        defaults: words for defaults that are not the struct's.
    """

    def __init__(
        self,
        kind: type[S],
        group: str = "Options",
        *,
        groups: Mapping[str, tuple[str, ...]] | None = None,
        names: Mapping[str, str] | None = None,
        units: Mapping[str, int] | None = None,
        leave: tuple[str, ...] = (),
        hidden: tuple[str, ...] = (),
        types: Mapping[str, click.ParamType[Any, Any]] | None = None,
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self._names, self._units, self._types, self._hidden = names or {}, units or {}, types or {}, hidden
        self._defaults = defaults or {}
        self._fields = own = {field.name: field for field in msgspec.structs.fields(kind) if field.name not in leave}
        # in the order of the groups, else in that of the struct
        titles = {name: title for title, fields in (groups or {}).items() for name in fields}
        ordered = [*titles, *[name for name in own if name not in titles]]
        docs = {name: sentence_of(text) for name, text in docs_of(kind).items()}
        self._made = {name: self._option(own[name], docs.get(name, ""), titles.get(name, group)) for name in ordered}
        self.options = {name: GroupedOption([words], **attributes) for name, (words, attributes) in self._made.items()}

    def __call__(self, command: Callable[..., Any]) -> Callable[..., Any]:
        for words, attributes in reversed(self._made.values()):
            command = click.option(words, cls=GroupedOption, **attributes)(command)
        return command

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        """The fields that the command line or a file has, which are taken out of the command's parameters."""
        found = {name: options.pop(str(option.name), None) for name, option in self.options.items()}
        return {name: value for name, value in found.items() if value not in (None, ())}

    def take(self, options: dict[str, Any], **others: Any) -> S:
        """The struct, of the command's parameters, which are taken out, and of fields that no option sets."""
        return self.kind(**self.given(options), **others)

    def arguments(self, made: S) -> Iterator[str]:
        """The command line that gives this struct, word by word."""
        for name, option in self.options.items():
            value, unit = getattr(made, name), self._units.get(name, 1)
            if value == _default(self._fields[name]):
                continue
            if isinstance(value, bool):
                yield (option.opts if value else option.secondary_opts)[0]
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    yield from (option.opts[0], str(one // unit if unit > 1 else one))

    def _option(self, field: msgspec.structs.FieldInfo, doc: str, group: str) -> tuple[str, dict[str, Any]]:
        name, hint, unit = field.name, hints_of(self.kind)[field.name], self._units.get(field.name, 1)
        words = self._names.get(name, "--" + name.replace("_", "-"))
        default = self._defaults.get(name, "") or ("" if field.required else _words_of(_default(field), unit))
        shown = default and f"  [default: {default}]"
        attributes = {"group": group, "help": doc + shown, "hidden": name in self._hidden}
        if hint is bool:
            return f"{words}/--no-{words.removeprefix('--')}", {**attributes, "default": None}
        several = get_origin(hint) is tuple
        title = next((meta.title for _, meta in alternatives(hint) if meta is not None and meta.title), "")
        own = self._types.get(name) or _FORMS.get(title) or FieldType(get_args(hint)[0] if several else hint, unit)
        return words, {**attributes, "type": own, "multiple": several, "required": field.required}


def sentence_of(text: str) -> str:
    """The first sentence of a field's doc."""
    end = _SENTENCE.search(text)
    first = text[: end.start()] if end else text
    # an address at the beginning stays as it is
    return f"{first[:1] if '/' in first.split()[0] else first[:1].upper()}{first[1:]}."


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _words_of(default: Any, unit: int) -> str:
    if default is False or default in (None, "", ()):
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    return "yes" if default is True else f"{default // unit if unit > 1 else default}"


def _shown(hint: Any, meta: Meta | None) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    return (meta is not None and meta.title) or _WORDS.get(hint, "TEXT")
