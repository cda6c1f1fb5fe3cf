"""Options of the command line that make an `EngineConfig`.

Parses, and checks keys of stores, policies and taps against the plugin's own; starts nothing. An option beats the same
key of the `--config` file. Called by `serve.py`, which has `serve` and `up`, and by the demo.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from fdasync.cache.store.plugins import load_store
from fdasync.cli.common.gpus import parse_gpus
from fdasync.drafting import RUNNERS_OWN, drafter_class
from fdasync.engine.config import EngineConfig, policy_class
from fdasync.errors import BadInput, ConfigError
from fdasync.events.tap import Tap
from fdasync.ipc.gpus import counted
from fdasync.registry.registry import TAPS, Registry
from fdasync.request import Numerics
from fdasync.runner.shares import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLUGIN_FORMS = "NAME, NAME:VALUE, NAME:key=value,key=value or NAME:{JSON}"
STORE_HELP = (
    "Any installed store, e.g. memory, file:DIR, file:path=DIR,max_nbytes=20000000000, mooncake:HOST:PORT or"
    ' sqlite:{"path": "kv.db"}. A value without a key is that of the store\'s first key.'
)
POLICY_HELP = (
    "Which requests go first: any installed policy, e.g. shortest-prompt-first or"
    " shortest-prompt-first:ageing_s_per_token=0.01.  [default: arrival]"
)
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_COUNT = click.IntRange(1)
# in an error's words: the key that an option of the same name sets
_CONFIG_KEY = re.compile(r"\bconfig\.(?:runner_config\.)?(\w+)")
# of a click context: the mapping of its `--config` file
_VALUES = "fdasync.config"


def _take_table(ctx: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """The table of the file that has the command's name, as `[http]`, has values of the command's own options: they
    are checked as if they were given, and options beat them."""
    if path is None:
        return None
    # once: it may be a pipe
    values = ctx.meta[_VALUES] = read_config(path)
    table = values.pop(str(ctx.info_name), None)
    if table is not None:
        # as the command line names them: `connect` for --connect
        known = {
            option.opts[0].removeprefix("--").replace("-", "_"): option
            for option in ctx.command.params
            if isinstance(option, click.Option) and option.name not in ("config_path", *_NAMES)
        }
        if not isinstance(table, dict):
            raise BadInput("--config", f"{path}: {ctx.info_name} is no table")
        if unknown := [name for name in table if name not in known]:
            problem = f"{path}: {ctx.info_name}.{unknown[0]} is no option of the command"
            raise BadInput("--config", problem, hint=f"its keys are: {', '.join(known)}")
        ctx.default_map = {
            str(known[name].name): [value] if known[name].multiple and isinstance(value, str) else value
            for name, value in table.items()
        }
    return path


_OPTIONS = (
    click.option(
        "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Hugging Face checkpoint folder."
    ),
    click.option(
        "--config", "config_path", type=click.Path(exists=True, dir_okay=False, path_type=Path), is_eager=True,
        callback=_take_table,
        help="TOML or JSON file with keys of EngineConfig, e.g. max_running = 64; a table of the command's name has its"
        " other options. Options beat the file.",
    ),
    click.option("--runner", help="Runner plugin: transformers (the default), synthetic, or another's name."),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16", "float64"]),
        help="Of weights and KV; float64 is for toy models on CPUs.",
    ),
    click.option(
        "--device", help="Of the model: cpu, cuda:1, ... Default: a GPU if there is one; several instances take GPUs"
        " in turn.",
    ),
    click.option(
        "--num-threads", type=_COUNT, help="CPU threads of each model process. Default: instances share the cores."
    ),
    click.option(
        "--numerics", type=click.Choice(get_args(Numerics)),
        help="fixed: every number of a token depends on its prefix and the weights alone, to the last bit; runners that"
        " cannot promise it are refused.  [default: default]",
    ),
    click.option(
        "--sum-slices", type=_COUNT,
        help="With fixed numerics, 2 or 4: one process and so many ranks compute the same bits.  [default: 1]",
    ),
    click.option(
        "--tp", "tensor_parallel", type=click.IntRange(1, MOST_RANKS),
        help="Tensor parallel: so many processes, each with its part of the model, compute every step; at most"
        f" {MOST_RANKS}.  [default: 1]",
    ),
    click.option(
        "--gpus", multiple=True, metavar="LIST",
        help="GPUs of the processes in order, such as 0,1 (as nvidia-smi counts, of those in CUDA_VISIBLE_DEVICES) or"
        " UUIDs; with several instances a list for each, or one for all. Another engine's are refused. Default, auto:"
        " --tp takes the first that are free.",
    ),
    click.option("--share-gpus", is_flag=True, help="Others may have the same GPUs, if they share them as well."),
    click.option("--num-blocks", type=_COUNT, help="KV blocks on the device. Default: what fits."),
    click.option("--block-tokens", type=_COUNT, help="Tokens of a KV block, a power of two. Default: the runner's."),
    click.option("--max-context-tokens", type=_COUNT, help="Longest prompt and output together. Default: the model's."),
    click.option("--max-running", type=_COUNT, help="Sequences in a step.  [default: 256]"),
    click.option("--max-step-tokens", type=_COUNT, help="Token budget of a step.  [default: 2048]"),
    click.option("--host-blocks", type=_COUNT, help="KV blocks in host memory. Default: what 1 GiB holds."),
    click.option(
        "--store", metavar="STORE",
        help=f"Tier behind the host. {STORE_HELP} A folder of `file` serves one instance: with several, each has its"
        " own inside it.",
    ),
    click.option(
        "--store-required", is_flag=True,
        help="Do not start without the store. Default: start, say so, and use the store once it opens.",
    ),
    click.option("--policy", metavar="POLICY", help=POLICY_HELP),
    click.option(
        "--drafter", metavar="DRAFTER",
        help="Several tokens of a sample in a step, where drafts are right: any installed drafter, e.g. ngram or"
        " ngram:keep_s=600; none: the runner alone drafts.  [default: one token a step]",
    ),
    click.option("--draft-tokens", type=_COUNT, help="With --drafter, most drafts of a sample in a step. Default: 3."),
    click.option(
        "--tap", "taps", multiple=True, metavar="TAP",
        help="A tap plugin that reads the engine's events: NAME, or NAME:key=value,key=value.",
    ),
    click.option("--seed", type=click.IntRange(0), help="Of the engine's own random numbers."),
)  # fmt: skip
_PLAIN = (
    "numerics", "sum_slices", "tensor_parallel", "num_blocks", "block_tokens", "max_context_tokens", "max_running",
    "max_step_tokens", "host_blocks", "seed",
)  # fmt: skip
# parameters that `engine_config` takes
_NAMES = (
    "model", "runner", "dtype", "device", "num_threads", *_PLAIN, "gpus", "share_gpus", "store", "store_required",
    "policy", "drafter", "draft_tokens", "taps",
)  # fmt: skip


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options that `engine_config` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config(options: dict[str, Any], role: str | None = None) -> EngineConfig:
    """The configuration from the values of `engine_options`, which are taken out of `options`.

    Args:
        role: of the command line; None: the file's role, or "mixed".

    Raises ConfigError, or BadInput, naming the option or the file's key.
    """
    taken = {
        name: options.pop(name)
        for name in ("model", "config_path", "runner", "dtype", "device", "num_threads", *_PLAIN)
    }
    ctx = click.get_current_context(silent=True)
    if ctx is not None and _VALUES in ctx.meta:
        values = ctx.meta[_VALUES]
    else:
        values = {} if taken["config_path"] is None else read_config(taken["config_path"])
    if taken["model"] is not None:
        values["model"] = str(taken["model"])
    if taken["runner"] is not None:
        values["runner"] = taken["runner"]
    own = {name: taken[name] for name in ("dtype", "device", "num_threads") if taken[name] is not None}
    if own and isinstance(values.setdefault("runner_config", {}), dict):
        values["runner_config"] = {**values["runner_config"], **own}
    values.update({name: taken[name] for name in _PLAIN if taken[name] is not None})
    gpus, each = parse_gpus(options.pop("gpus"))
    if gpus is not None:
        values["gpus"] = gpus
    if options.pop("share_gpus"):
        values["share_gpus"] = True
    policy = parse_policy(options.pop("policy"))
    if policy is not None:
        values["policy"], values["policy_config"] = policy
    drafter, draft_tokens = parse_drafter(options.pop("drafter")), options.pop("draft_tokens")
    if drafter is not None:
        known = values.get("speculation")
        own = {"drafter": drafter[0], "drafter_config": drafter[1]}
        values["speculation"] = {**known, **own} if isinstance(known, dict) else own
    if draft_tokens is not None:
        if not isinstance(values.get("speculation"), dict):
            raise BadInput("--draft-tokens", "is given, and no drafter is", hint="give --drafter ngram, too")
        values["speculation"] = {**values["speculation"], "max_tokens": draft_tokens}
    store = parse_store(options.pop("store"))
    if store is not None:
        values["store"], values["store_config"] = store
    given: set[str] = set()
    for text in options.pop("taps"):
        name, keys = parse_plugin("--tap", text, _tap_keys)
        if name in given:
            raise BadInput("--tap", f"names {name} twice", hint="give all its keys in one --tap")
        given.add(name)
        if isinstance(values.setdefault("taps", {}), dict):
            values["taps"][name] = keys
    if options.pop("store_required"):
        values["store_required"] = True
    if role is not None or values.get("role", "alone") == "alone":
        values["role"] = role or "mixed"
    config = EngineConfig.from_mapping(values)
    if gpus is not None and gpus != "auto" and each not in (config.tensor_parallel, len(gpus)):
        problem = f"has {counted(each)} in a list, and --tp is {config.tensor_parallel}"
        hint = "say one list per instance, with a GPU for each rank, or one list for all"
        raise BadInput("--gpus", problem, limit=config.tensor_parallel, hint=hint)
    if config.runner == "transformers" and not config.model:
        raise BadInput("--model", "is missing", hint="name a checkpoint folder, or --runner synthetic to try without")
    return config


def as_typed(error: BaseException, arguments: Sequence[str]) -> str:
    """The text of an error with the name of the option, such as `--gpus`, in place of each configuration key whose
    option is among these arguments."""
    typed = {
        str(option.name): option.opts[0]
        for option in _options()
        if any(argument == option.opts[0] or argument.startswith(f"{option.opts[0]}=") for argument in arguments)
    }
    return _CONFIG_KEY.sub(lambda found: typed.get(found[1], found[0]), str(error))


def _options() -> list[click.Parameter]:
    command = click.Command("any")
    for option in _OPTIONS:
        option(command)
    return command.params


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a TOML or JSON file. Raises BadInput naming the file and the place."""
    try:
        data = path.read_bytes()
        values = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except (ValueError, OSError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON (a TOML file's name ends in .toml)"
        raise BadInput("--config", f"{path} cannot be read as {kind}: {error}") from None
    if not isinstance(values, dict):
        raise BadInput("--config", f"{path} holds no keys", hint='for example {"max_running": 64}')
    return values


def _tap_keys(name: str) -> type[msgspec.Struct]:
    return Registry().load(TAPS, name, Tap).config_type  # type: ignore[type-abstract]


def parse_store(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--store`; None where it is not given. Raises as `parse_plugin` does."""
    return None if text is None else parse_plugin("--store", text, lambda name: load_store(name).config_type)


def parse_policy(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--policy`; None where it is not given. Raises as `parse_plugin` does."""
    return None if text is None else parse_plugin("--policy", text, lambda name: policy_class(name).config_type)


def parse_drafter(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--drafter`; None where it is not given. Raises as `parse_plugin` does."""
    if text is None or text == RUNNERS_OWN:
        return None if text is None else (text, {})
    return parse_plugin("--drafter", text, lambda name: drafter_class(name).config_type)


def parse_plugin(
    option: str, text: str, config_type_of: Callable[[str], type[msgspec.Struct]]
) -> tuple[str, dict[str, Any]]:
    """Entry-point name and configuration of a plugin.

    Loads the plugin for its keys: unknown keys and values of a wrong type are refused here. Raises BadInput naming the
    part that is wrong; PluginError, naming the installed plugins, where there is no such plugin.

    Args:
        option: the command-line option that names the plugin, for errors.
        config_type_of: gives the struct of the plugin's keys.
    """
    name, colon, rest = text.partition(":")
    if not name or (colon and not rest):
        missing = "its configuration behind the colon" if name else f"the name of a {option.removeprefix('--')}"
        raise BadInput(option, f"{text!r} lacks {missing}", limit=PLUGIN_FORMS)
    config_type = config_type_of(name)
    keys = [field.encode_name for field in msgspec.structs.fields(config_type)]
    json_form = rest.startswith("{")
    given = _json_object(option, rest) if json_form else _pairs(option, name, rest, keys)
    hint = f"its keys are: {', '.join(keys) or 'none'}"
    if unknown := [key for key in given if key not in keys]:
        raise BadInput(f"{option} {name}.{unknown[0]}", "is not a key that exists", hint=hint)
    try:
        # a value of the command line is text, and is converted to the key's type
        own = msgspec.convert(given, config_type, strict=json_form)
    except msgspec.ValidationError as error:
        wrong = ConfigError.of_validation(error, f"{option} {name}")
        raise BadInput(wrong.field, wrong.problem, hint=hint) from None
    values = msgspec.to_builtins(own)
    return name, {key: values[key] for key in given if key in values}


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadInput(option, f"{text!r} is no JSON object: {error}") from None
    assert isinstance(values, dict)  # it begins with a brace
    return values


def _pairs(option: str, name: str, text: str, keys: list[str]) -> dict[str, Any]:
    """Keys and values of "key=value,key=value"; the first may be a value alone."""
    given: dict[str, Any] = {}
    for number, part in enumerate(text.split(",") if text else ()):
        found = _KEY.fullmatch(part)
        if found is not None:
            key, value = found.groups()
        elif number == 0 and keys:
            key, value = keys[0], part
        else:
            hint = f"a value with a comma needs the JSON form: {option} '{name}:{{...}}'"
            raise BadInput(option, f"{part!r} of {name}:{text} is no key=value", hint=hint)
        if key in given:
            raise BadInput(option, f"{key} is given twice in {name}:{text}")
        given[key] = value
    return given


def store_of_instance(config: EngineConfig, name: str) -> dict[str, Any]:
    """The store's configuration for one of several instances: a file store's folder has one user at a time."""
    path = config.store_config.get("path")
    if config.store != "file" or path is None:
        return config.store_config
    if not isinstance(path, str):
        raise ConfigError("config.store_config.path", f"{path!r} is no folder")
    return {**config.store_config, "path": str(Path(path) / name)}
