"""Options of the command line, and the `--config` file, that make an `EngineConfig`.

An option is a field of the configuration, a key of a plugin, or `--config`, whose file has the same keys. Options beat
the file, and no file is read that is not named. Checks keys of plugins against the plugin's own; starts nothing. Called
by the commands that take an engine's options.
"""

from __future__ import annotations

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fdasync.cache.store.plugins import load_store
from fdasync.cli.common.fields import Fields, GroupedOption
from fdasync.cli.common.gpus import parse_gpus
from fdasync.drafting import RUNNERS_OWN, drafter_class
from fdasync.engine.config import EngineConfig, policy_class
from fdasync.errors import BadInput, ConfigError
from fdasync.events.tap import Tap
from fdasync.ipc.gpus import counted
from fdasync.registry.mapping import hints_of, nearest, of_text, struct_of
from fdasync.registry.registry import COMMANDS, TAPS, Registry
from fdasync.runner.plugins import checkpoint_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLUGIN_FORMS = "NAME, NAME:VALUE, NAME:key=value,key=value or NAME:{JSON}"
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# in an error's words: the key that an option of the same name sets
_CONFIG_KEY = re.compile(r"\b(?:config\.(?:runner_config\.)?|runner_config\.)(\w+)")
# of a click context: the mapping of its `--config` file
_VALUES = "fdasync.config"
_MODEL, _GPUS, _STEPS, _TIERS, _TIMES, _WATCH = (
    "Model", "GPUs", "Requests and steps", "Host tier and store", "Deadlines", "Watching"
)  # fmt: skip
# of what `engine_config` reads, each in its group; the other fields are set by options below, or by a file alone
_FIELDS = Fields(
    EngineConfig,
    groups={
        _MODEL: ("model", "runner", "process", "numerics", "sum_slices", "routing", "routing_debug", "weight_version",
                 "weights_interface", "seed"),
        _GPUS: ("tensor_parallel", "share_gpus"),
        _STEPS: ("max_context_tokens", "block_tokens", "num_blocks", "max_running", "max_step_tokens", "max_requests",
                 "pipeline_depth", "prefix_cache", "decode_reserve_blocks", "num_snapshots", "state_every_tokens",
                 "chosen_positions_nbytes", "inline_tokenise_chars"),
        _TIERS: ("host_blocks", "host_snapshots", "write_through", "write_back", "fetch_min_tokens", "store_required",
                 "store_calls", "store_deadline_s", "store_open_deadline_s", "store_retry_s", "store_kill_s"),
        _TIMES: ("start_deadline_s", "update_deadline_s", "step_deadline_s", "request_deadline_s",
                 "prepare_deadline_s", "close_deadline_s"),
        _WATCH: ("trace_turns", "profile_folder"),
    },
    names={"tensor_parallel": "--tp"},
    leave=("role", "tokenizer", "gpus", "leases", "speculation", "store", "store_config", "policy", "policy_config",
           "runner_config", "taps"),
    types={"model": click.Path(file_okay=False)},
)  # fmt: skip


def _take_table(ctx: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """The table of the file that has the command's name, as `[http]`, has values of the command's own options: they
    are checked as if they were given, and options beat them. Tables of other commands are theirs."""
    if path is None:
        return None
    # once: it may be a pipe
    values = ctx.meta[_VALUES] = read_config(path)
    named = ctx
    while named.parent is not None and named.parent.parent is not None:
        # of `fdasync ray up` it is [ray]
        named = named.parent
    command = str(named.info_name)
    table = values.pop(command, {})
    for other in Registry().names(COMMANDS):
        if isinstance(values.get(other), dict):
            del values[other]
    # as the command line names them: `connect` for --connect
    known = {
        option.opts[0].removeprefix("--").replace("-", "_"): option
        for option in ctx.command.params
        if isinstance(option, click.Option) and option.name not in ("config_path", *_NAMES)
    }
    if misplaced := [name for name in values if name in known and name not in EngineConfig.__struct_fields__]:
        hint = f"it stands in the table [{command}]"
        raise BadInput("--config", f"{path}: {misplaced[0]} is an option of the command", hint=hint)
    if not isinstance(table, dict):
        raise BadInput("--config", f"{path}: {command} is no table")
    ctx.default_map = {}
    for name, value in table.items():
        if name not in known:
            near = nearest(name, tuple(known))
            hint = f"did you mean {near!r}?" if near else f"its keys are: {', '.join(known)}"
            raise BadInput("--config", f"{path}: {command}.{name} is no option of the command", hint=hint)
        option = known[name]
        given = [value] if option.multiple and isinstance(value, str) else value
        try:
            paths = given if option.multiple and isinstance(given, list) else [given]
            if isinstance(option.type, click.Path) and not all(isinstance(one, str) for one in paths):
                # click takes a number for a descriptor
                raise click.BadParameter(f"{value!r:.100} is not text: the path of a {option.type.name} is needed")
            option.type_cast_value(ctx, given)
        except click.BadParameter as wrong:
            raise BadInput("--config", f"{path}: {command}.{name}: {wrong.message}") from None
        ctx.default_map[str(option.name)] = given
    return path


_OTHERS = (
    click.option(
        "--config", "config_path", type=click.Path(exists=True, dir_okay=False, path_type=Path), is_eager=True,
        cls=GroupedOption, callback=_take_table,
        help="TOML or JSON file with an engine's keys, e.g. max_running = 64; a table of the command's name has its"
        " other options. Options beat the file, and no file is read that is not named here.",
    ),
    click.option(
        "--download", is_flag=True, cls=GroupedOption, group=_MODEL,
        help="Fetch a --model that the hub's cache on this machine does not have.",
    ),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16", "float64"]), cls=GroupedOption,
        group=_MODEL, help="Of weights and KV; float64 is for toy models on CPUs.",
    ),
    click.option(
        "--device", cls=GroupedOption, group=_MODEL,
        help="Of the model: cpu, cuda:1, ... Default: a GPU if there is one; several instances take GPUs in turn.",
    ),
    click.option(
        "--num-threads", type=click.IntRange(1), cls=GroupedOption, group=_MODEL,
        help="CPU threads of each model process. Default: instances share the cores.",
    ),
    click.option(
        "--gpus", multiple=True, metavar="LIST", cls=GroupedOption, group=_GPUS,
        help="GPUs of the processes in order, such as 0,1 (as nvidia-smi counts, of those in CUDA_VISIBLE_DEVICES) or"
        " UUIDs; with several instances a list for each, or one for all. Another engine's are refused. Default, auto:"
        " --tp takes the first that are free.",
    ),
    click.option("--policy", metavar="POLICY", cls=GroupedOption, group=_STEPS,
        help="Which requests go first: any installed policy, e.g. shortest-prompt-first or"
        " shortest-prompt-first:ageing_s_per_token=0.01.  [default: arrival]",
    ),
    click.option(
        "--drafter", metavar="DRAFTER", cls=GroupedOption, group=_STEPS,
        help="Several tokens of a sample in a step, where drafts are right: any installed drafter, e.g. ngram or"
        " ngram:keep_s=600; none: the runner alone drafts.  [default: one token a step]",
    ),
    click.option(
        "--draft-tokens", type=click.IntRange(1), cls=GroupedOption, group=_STEPS,
        help="With --drafter, most drafts of a sample in a step. Default: 3.",
    ),
    click.option(
        "--store", metavar="STORE", cls=GroupedOption, group=_TIERS,
        help="Tier behind the host: any installed store, e.g. memory, file:DIR, file:path=DIR,max_nbytes=20000000000,"
        ' mooncake:HOST:PORT or sqlite:{"path": "kv.db"}. A value without a key is that of the store\'s first key. A'
        " folder of `file` serves one instance: with several, each has its own inside it.",
    ),
    click.option(
        "--tap", "taps", multiple=True, metavar="TAP", cls=GroupedOption, group=_WATCH,
        help="A tap plugin that reads the engine's events: NAME, or NAME:key=value,key=value.",
    ),
)  # fmt: skip
# parameters that `engine_config` takes besides those of `_FIELDS`
_OWN = ("download", "dtype", "device", "num_threads", "gpus", "policy", "drafter", "draft_tokens", "store", "taps")
_NAMES = (*[str(option.name) for option in _FIELDS.options.values()], *_OWN)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options that `engine_config` takes."""
    for option in reversed((*_OTHERS[:1], _FIELDS, *_OTHERS[1:])):
        command = option(command)
    return command


def engine_config(options: dict[str, Any], role: str | None = None) -> EngineConfig:
    """The configuration from the values of `engine_options`, which are taken out of `options`.

    Args:
        role: of the command line; None: the file's role, or "mixed".

    Raises ConfigError, or BadInput, naming the option, or the file and its key; CheckpointError for a model that is not
    on this machine.
    """
    path, ctx = options.pop("config_path", None), click.get_current_context(silent=True)
    read = ctx.meta.get(_VALUES) if ctx is not None else None
    file = read if read is not None else {} if path is None else read_config(path)
    given = _FIELDS.given(options)
    own = {name: options.pop(name, None) for name in _OWN}
    of_runner = {name: own[name] for name in ("dtype", "device", "num_threads") if own[name] is not None}
    if of_runner and isinstance(known := file.get("runner_config", {}), dict):
        given["runner_config"] = {**known, **of_runner}
    gpus, each = parse_gpus(own["gpus"] or ())
    if gpus is not None:
        given["gpus"] = gpus
    for name, parsed in (("policy", parse_policy(own["policy"])), ("store", parse_store(own["store"]))):
        if parsed is not None:
            given[name], given[f"{name}_config"] = parsed
    drafts = {} if own["drafter"] is None else dict(zip(_DRAFTER, parse_drafter(own["drafter"]) or (), strict=True))
    if own["draft_tokens"] is not None:
        drafts["max_tokens"] = own["draft_tokens"]
    known = file.get("speculation")
    if drafts:
        if "drafter" not in drafts and not isinstance(known, dict):
            raise BadInput("--draft-tokens", "is given, and no drafter is", hint="give --drafter ngram, too")
        given["speculation"] = {**known, **drafts} if isinstance(known, dict) else drafts
    taps: dict[str, Any] = {}
    for text in own["taps"] or ():
        name, keys = parse_plugin("--tap", text, _tap_keys)
        if name in taps:
            raise BadInput("--tap", f"names {name} twice", hint="give all its keys in one --tap")
        taps[name] = keys
    if taps and isinstance(known := file.get("taps", {}), dict):
        given["taps"] = {**known, **taps}
    if role is not None or file.get("role", "alone") == "alone":
        given["role"] = role or "mixed"
    try:
        config = EngineConfig.from_mapping({**file, **given})
        if path is not None:
            _check_keys(config)
    except ConfigError as wrong:
        key = wrong.field.removeprefix("config.").split(".")[0]
        if path is None or key in given or key not in file:
            raise
        hint = wrong.hint
        if key not in EngineConfig.__struct_fields__ and isinstance(file[key], dict):
            hint = hint or "no command of this name is installed"
        raise ConfigError(f"{path}: {wrong.field}", wrong.problem, limit=wrong.limit, hint=hint) from None
    if gpus is not None and gpus != "auto" and each not in (config.tensor_parallel, len(gpus)):
        problem = f"has {counted(each)} in a list, and --tp is {config.tensor_parallel}"
        hint = "say one list per instance, with a GPU for each rank, or one list for all"
        raise BadInput("--gpus", problem, limit=config.tensor_parallel, hint=hint)
    if config.runner == "transformers" and not config.model:
        raise BadInput("--model", "is missing", hint="name a checkpoint folder, or --runner synthetic to try without")
    folder = checkpoint_folder(config.runner, config.model, download=bool(own["download"]))
    if folder and not Path(folder).is_dir():
        raise BadInput("--model", f"{folder}: the folder does not exist")
    return msgspec.structs.replace(config, model=folder)


def _check_keys(config: EngineConfig) -> None:
    """Check what a file says to plugins, as they would when they are made. The runner's process reads its own keys: the
    import of a runner may take seconds. Raises PluginError; ConfigError naming the key."""
    told = [("policy_config", policy_class(config.policy).config_type, config.policy_config)]
    told += [(f"taps.{name}", _tap_keys(name), keys) for name, keys in config.taps.items()]
    if config.store:
        told.append(("store_config", load_store(config.store).config_type, config.store_config))
    if (drafts := config.speculation) is not None and drafts.host_drafter:
        told.append(("speculation.drafter_config", drafter_class(drafts.drafter).config_type, drafts.drafter_config))
    for place, kind, keys in told:
        struct_of(kind, keys, error=ConfigError, root=f"config.{place}")


def as_typed(error: BaseException, arguments: Sequence[str]) -> str:
    """The text of an error with the name of the option, such as `--gpus`, in place of each configuration key whose
    option is among these arguments; and with the name of their file, unless that is a pipe, before a key of the
    runner."""
    words = {name: option.opts[0] for name, option in _FIELDS.options.items()}
    words |= {name: f"--{name.replace('_', '-')}" for name in _OWN}
    typed = {
        name: word
        for name, word in words.items()
        if any(argument == word or argument.startswith(f"{word}=") for argument in arguments)
    }
    text = _CONFIG_KEY.sub(lambda found: typed.get(found[1], found[0]), str(error))
    for word, after in pairwise([*arguments, ""]):
        path = Path(after if word == "--config" else word.removeprefix("--config="))
        if word.startswith("--config") and text.startswith("runner_config.") and path.resolve().is_file():
            return f"{path}: {text}"
    return text


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
    return Registry().load(TAPS, name, Tap).config_type


def parse_store(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--store`; None where it is not given. Raises as `parse_plugin` does."""
    return None if text is None else parse_plugin("--store", text, lambda name: load_store(name).config_type)


def parse_policy(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--policy`; None where it is not given. Raises as `parse_plugin` does."""
    return None if text is None else parse_plugin("--policy", text, lambda name: policy_class(name).config_type)


_DRAFTER = ("drafter", "drafter_config")


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
    hints = hints_of(config_type)
    json_form = rest.startswith("{")
    given = _json_object(option, rest) if json_form else _pairs(option, name, rest, list(hints))
    place = f"{option} {name}"
    if not json_form:
        # a value of the command line is text
        given = {key: of_text(hints[key], value, f"{place}.{key}") if key in hints else value
                 for key, value in given.items()}  # fmt: skip
    try:
        own = struct_of(config_type, given, root=place)
    except BadInput as wrong:
        keys = f"its keys are: {', '.join(hints) or 'none'}"
        raise BadInput(wrong.field, wrong.problem, limit=wrong.limit, hint=wrong.hint or keys) from None
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
