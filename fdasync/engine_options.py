"""Options of the command line that make an `EngineConfig`: shared by `serve` and `up`; `--store` by `demo` too.

Parses and checks; starts nothing. What is given as an option beats what the `--config` file says.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fdasync.config import EngineConfig
from fdasync.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNT = click.IntRange(1)
_OPTIONS = (
    click.option(
        "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Hugging Face checkpoint folder."
    ),
    click.option(
        "--config", "config_path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML or JSON file with keys of EngineConfig, e.g. max_running = 64. Options given here go first.",
    ),
    click.option("--runner", help="Runner plugin: transformers (the default), synthetic, or another's name."),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="Of weights and KV."
    ),
    click.option(
        "--device", help="Of the model: cpu, cuda:1, ... Default: a GPU if there is one; several instances take GPUs"
        " in turn.",
    ),
    click.option(
        "--num-threads", type=_COUNT, help="CPU threads of each model process. Default: instances share the cores."
    ),
    click.option("--num-blocks", type=_COUNT, help="KV blocks on the device. Default: what fits."),
    click.option("--block-tokens", type=_COUNT, help="Tokens of a KV block, a power of two. Default: the runner's."),
    click.option("--max-context-tokens", type=_COUNT, help="Longest prompt and output together. Default: the model's."),
    click.option("--max-running", type=_COUNT, help="Sequences in a step.  [default: 256]"),
    click.option("--max-step-tokens", type=_COUNT, help="Token budget of a step.  [default: 2048]"),
    click.option("--host-blocks", type=_COUNT, help="KV blocks in host memory. Default: what 1 GiB holds."),
    click.option(
        "--store", default="", metavar="STORE",
        help="Tier behind the host: memory, file:DIR or mooncake:HOST:PORT. A folder serves one instance: with"
        " several, each has its own inside DIR.",
    ),
    click.option("--seed", type=click.IntRange(0), help="Of what an engine draws itself."),
)  # fmt: skip
_PLAIN = ("num_blocks", "block_tokens", "max_context_tokens", "max_running", "max_step_tokens", "host_blocks", "seed")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options that `engine_config` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config(options: dict[str, Any], role: str | None = None) -> EngineConfig:
    """From the values of `engine_options`, which are taken out of `options`.

    Args:
        role: on the command line; None: what the file says, or "mixed".

    Raises ConfigError, BadInput naming the option or the file's key.
    """
    taken = {
        name: options.pop(name)
        for name in ("model", "config_path", "runner", "dtype", "device", "num_threads", *_PLAIN)
    }
    values = {} if taken["config_path"] is None else read_config(taken["config_path"])
    if taken["model"] is not None:
        values["model"] = str(taken["model"])
    if taken["runner"] is not None:
        values["runner"] = taken["runner"]
    own = {name: taken[name] for name in ("dtype", "device", "num_threads") if taken[name] is not None}
    if own and isinstance(values.setdefault("runner_config", {}), dict):
        values["runner_config"] = {**values["runner_config"], **own}
    values.update({name: taken[name] for name in _PLAIN if taken[name] is not None})
    store = parse_store(options.pop("store"))
    if store is not None:
        values["store"], values["store_config"] = store
    if role is not None or values.get("role", "alone") == "alone":
        values["role"] = role or "mixed"
    config = EngineConfig.from_mapping(values)
    if config.runner == "transformers" and not config.model:
        raise BadInput("--model", "is missing", hint="name a checkpoint folder, or --runner synthetic to try without")
    return config


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


def parse_store(text: str) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--store`; None for "". Raises BadInput."""
    name, _, rest = text.partition(":")
    if not text:
        return None
    if text == "memory":
        return "memory", {}
    if name == "file" and rest:
        return "file", {"path": rest}
    if name == "mooncake" and rest:
        return "mooncake", {"master": rest.removeprefix("//")}
    raise BadInput("store", f"{text!r} is no store", limit="memory, file:DIR or mooncake:HOST:PORT")


def store_of_instance(config: EngineConfig, name: str) -> dict[str, Any]:
    """The store's configuration for one of several instances: a file store's folder has one user at a time."""
    path = config.store_config.get("path")
    if config.store != "file" or path is None:
        return config.store_config
    if not isinstance(path, str):
        raise ConfigError("config.store_config.path", f"{path!r} is no folder")
    return {**config.store_config, "path": str(Path(path) / name)}
