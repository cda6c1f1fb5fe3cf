"""All settings, from the structs that declare them: a page of tables, and a file of `--config` with every key.

    python -m tests.support.options          # writes docs/reference/options.md and docs/reference/fdasync.toml

Type and bound are of a field's annotation, the sentence is the first one of its doc. `tests/test_options.py` compares
both files with the code.
"""

from __future__ import annotations

import importlib
import json
import re
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
import msgspec
from fdasync_fleet.cli.local.options import ServeOptions, UpOptions
from fdasync_fleet.router.config import RouterConfig
from fdasync_http.config import ConnectionLimits, HttpConfig, HttpOptions, Listen
from fdasync_ray.config import FleetConfig
from msgspec import NODEFAULT

from fdasync.cli.common.fields import sentence_of
from fdasync.cli.common.options import _FIELDS, _NAMES
from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from fdasync.registry.docs import docs_of
from fdasync.registry.mapping import alternatives, hints_of, limit_of
from fdasync.registry.registry import COMMANDS, TOKENIZERS, Registry
from fdasync.request import Grammar, SamplingParams
from fdasync.scheduler import LeaseRules
from tests.support.floors import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgspec.structs import FieldInfo

Struct = type[msgspec.Struct]
PAGE = ROOT / "docs" / "reference" / "options.md"
FILE = ROOT / "docs" / "reference" / "fdasync.toml"
SECTIONS: dict[str, tuple[Struct, ...]] = {
    "Engine": (EngineConfig, LeaseRules, Speculation),
    "Requests": (SamplingParams, Grammar),
    "Fleet": (RouterConfig, ServeOptions, UpOptions, FleetConfig),
    "HTTP": (HttpOptions, HttpConfig, Listen, ConnectionLimits),
}
#: keys that the file sets; all others stand in it with their defaults, commented out
SET = {"model": "/models/qwen3-30b-a3b", "store": "file", "path": "/var/lib/fdasync/kv"}
# tables of the file: a struct's, and those of commands
_TABLES = {"runner_config": "runners: transformers", "store_config": "stores: file"}
_COMMANDS = ("serve", "up", "http")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


def plugins() -> dict[str, Struct]:
    """The settings of the plugins of this repository that have some, by "runners: transformers" and the like."""
    found = {}
    for info in Registry().list():
        if info.group in (COMMANDS, TOKENIZERS) or not info.distribution.startswith("fdasync"):
            continue
        module, _, name = info.target.partition(":")
        kind = getattr(getattr(importlib.import_module(module), name), "config_type", None)
        if kind is not None and kind.__struct_fields__:
            found[f"{info.group.removeprefix('fdasync.')}: {info.name}"] = kind
    return found


def typed(hint: Any) -> str:
    """The type of an annotation, as a reader writes its values."""
    words = []
    for bare, _ in alternatives(hint):
        if get_origin(bare) is Literal:
            words += [json.dumps(word) for word in get_args(bare)]
        elif get_origin(bare) in (list, tuple):
            words.append(f"list of {typed(get_args(bare)[0])}")
        elif get_origin(bare) is dict:
            words.append("table")
        else:
            words.append("none" if bare is type(None) else bare.__name__)
    return " or ".join(dict.fromkeys(words))


def bound(hint: Any) -> str:
    """The bounds of an annotation; of several types, each that has some."""
    told = [str(limit_of(meta)) for _, meta in alternatives(hint) if meta is not None]
    return " or ".join(dict.fromkeys(filter(None, told)))


def default(field: FieldInfo) -> Any:
    """The default of a field, as plain values; NODEFAULT: it is required."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return field.default if field.default is NODEFAULT else msgspec.to_builtins(field.default)


def table(kind: Struct) -> Iterator[str]:
    """The lines of a struct's table."""
    docs, hints = docs_of(kind), hints_of(kind)
    yield from ("| key | type | default | bound | what it says |", "| --- | --- | --- | --- | --- |")
    for field in msgspec.structs.fields(kind):
        value = default(field)
        of_struct = isinstance(field.default, msgspec.Struct)
        shown = "required" if value is NODEFAULT else "its own" if of_struct else f"`{written(value) or 'none'}`"
        cells = (f"`{field.name}`", typed(hints[field.name]), shown, bound(hints[field.name]),
                 sentence_of(docs[field.name]))  # fmt: skip
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """The page of tables."""
    sections = {**SECTIONS, "Plugins": ()}
    lines = [
        "# All settings", "",
        "Written by `python -m tests.support.options`, from the structs that declare the settings. A value that does"
        " not fit is refused, with the key and the bound. [fdasync.toml](fdasync.toml) is a file for `--config` with"
        " every key of an engine and of the commands that serve; there, none is a key that is left out.", "",
    ]  # fmt: skip
    for title, kinds in sections.items():
        lines += [f"## {title}", ""]
        named = {f"`{kind.__name__}`": kind for kind in kinds}
        for name, kind in named.items() if kinds else plugins().items():
            lines += [f"### {name}", "", *table(kind), ""]
    return "\n".join(lines)


def written(value: Any) -> str:
    """A plain value as TOML has it; "": TOML has none such."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {written(one)}' for key, one in value.items())} }}" if value else "{}"
    return "" if value is None else f"{value:g}" if isinstance(value, float) and value >= 1e6 else json.dumps(value)


def comment(text: str) -> list[str]:
    """Lines of the file that say something."""
    return wrap(text, 120, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False)


def key_lines(kind: Struct, names: tuple[str, ...]) -> Iterator[str]:
    """Keys of a table in the file, each below its sentence."""
    fields, docs = {field.name: field for field in msgspec.structs.fields(kind)}, docs_of(kind)
    for name in names:
        yield from comment(sentence_of(docs[name]))
        value = SET.get(name, default(fields[name]))
        if value in (NODEFAULT, None):
            yield f"# {name}: not set"
        else:
            yield f"{'' if name in SET else '#'}{name} = {written(value)}"


def option_lines(command: click.Command) -> Iterator[str]:
    """The options of a command that are none of an engine, as keys of its table."""
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden or option.name in ("config_path", *_NAMES):
            continue
        text, _, shown = (option.help or "").partition("  [default: ")
        name = option.opts[0].removeprefix("--").replace("-", "_")
        yield from comment(text)
        if option.is_flag:
            yield f"#{name} = {'true' if shown.startswith('yes') else 'false'}"
        elif value := shown.removesuffix("]"):
            yield f"#{name} = {value if _NUMBER.fullmatch(value) else json.dumps(value)}"
        else:
            yield f"# {name}: not set"


def file() -> str:
    """The file of `--config` with every key."""
    lines = [
        "# Every setting of an engine and of the commands that serve it: fdasync http --config fdasync.toml",
        "# A line that begins with # and a key has the key's default. Options of the command line beat this file.",
        "# Written by `python -m tests.support.options`; options.md beside it has types and bounds.",
    ]
    groups: dict[str, list[str]] = {}
    tables = {"leases": LeaseRules, "speculation": Speculation}
    plain = [name for name in EngineConfig.__struct_fields__ if name not in (*tables, *_TABLES)]
    for name in sorted(plain, key=[*_FIELDS.options, *plain].index):
        option = _FIELDS.options.get(name)
        groups.setdefault("Others" if option is None else option.group, []).append(name)
    for title, names in groups.items():
        lines += ["", f"# -- {title}", *key_lines(EngineConfig, tuple(names))]
    found = plugins()
    tables |= {name: found[plugin] for name, plugin in _TABLES.items()}
    for name, kind in tables.items():
        lines += ["", f"# -- {_TABLES.get(name, kind.__name__)}", f"{'#' * (name == 'speculation')}[{name}]"]
        lines += key_lines(kind, kind.__struct_fields__)
    for name in _COMMANDS:
        command = Registry().load_function(COMMANDS, name)
        assert isinstance(command, click.Command)
        lines += ["", f"# -- options of `fdasync {name}` alone; other commands pass them by", f"[{name}]"]
        lines += option_lines(command)
    return "\n".join([*lines, ""])


def main() -> None:
    PAGE.write_text(page())
    FILE.write_text(file())


if __name__ == "__main__":
    main()
