"""`fdasync http`: options and exit codes. Parses; `run.py` does the work, and is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from fdasync_fleet.cli.local.options import missing_half

from fdasync.cli.common.fields import Fields, GroupedCommand
from fdasync.cli.common.options import engine_config, engine_options
from fdasync.errors import BadInput
from fdasync_http.config import ConnectionLimits, HttpConfig, HttpOptions, Listen

_MIB = 1 << 20
_OF_BODIES = {"max_body_nbytes": "--max-body-mib", "max_bodies_nbytes": "--max-bodies-mib"}
_SETTINGS = ("dialect", "model", "unknown_models", "weights_root", "pulls_root", "rows", "memory_saver")
_ROOT = click.Path(exists=True, file_okay=False, resolve_path=True)
_HTTP = Fields(
    HttpOptions,
    "Instances",
    groups={"Logs": ("log_level", "log_json", "access_log")},
    names={"addresses": "--connect"},
)
_LISTEN = Fields(
    Listen,
    "Server",
    names={"certificate": "--ssl-certfile", "key": "--ssl-keyfile", "client_authority": "--ssl-ca-certs"},
    leave=("drain_s", "limits"),
)
_APP = Fields(
    HttpConfig,
    "Limits",
    groups={"Server": _SETTINGS},
    names={"model": "--served-model-name", **_OF_BODIES},
    units=dict.fromkeys(_OF_BODIES, _MIB),
    leave=("api_key", "admin_key"),
    types={"weights_root": _ROOT, "pulls_root": _ROOT},
)
_CONNECTIONS = Fields(
    ConnectionLimits,
    "Limits",
    names={"max_header_nbytes": "--max-header-kib", "header_s": "--header-timeout-s", "write_s": "--write-timeout-s"},
    units={"max_header_nbytes": 1 << 10},
)


@click.command(cls=GroupedCommand)
@_HTTP
@_LISTEN
@_APP
@_CONNECTIONS
@engine_options
def http(**options: Any) -> None:
    """Serve a checkpoint over HTTP: SGLang's and vLLM's rollout paths, OpenAI's API, and Anthropic's Messages.

    Starts an instance, or several, as processes of their own and serves them from this one; or serves instances that
    run already (--connect). When requests may come, "fdasync http: ready at URL" goes to stdout, and with --ready-fd a
    JSON object with url, port, pid and model.

    Listens on the loopback. Any other --host needs --api-key-file or --ssl-ca-certs, because without a key every path
    is open, even the paths that replace weights.

    The first signal drains, the second ends at once. Exit code 0: drained. 1: all instances failed, or answers were cut
    short. 2: it could not start. 130: interrupted while it loaded.
    """
    from fdasync.ipc.child import leave
    from fdasync_http.run import run_http

    plan = _HTTP.take(options)
    counted = plan.prefill or plan.decode or plan.mixed
    if plan.addresses and (options["model"] or counted):
        raise click.UsageError("--connect serves instances that run already: leave out --model and the numbers")
    if plan.front == "in-process" and (plan.addresses or counted):
        raise click.UsageError("--front in-process serves one engine of its own: leave out --connect and the numbers")
    if missing := missing_half(plan.prefill, plan.decode, plan.mixed):
        raise click.UsageError(f"one half is missing: add {missing} 1")
    listen = _LISTEN.take(options, drain_s=plan.drain_s, limits=_CONNECTIONS.take(options))
    keys = {"api_key": plan.api_key_file, "admin_key": plan.admin_key_file}
    config = _APP.take(options, **{name: _key(file, f"--{name[:-4]}-key-file") for name, file in keys.items()})
    if config.max_bodies_nbytes < config.max_body_nbytes:
        problem = f"{config.max_bodies_nbytes // _MIB} is less than --max-body-mib, {config.max_body_nbytes // _MIB}"
        raise BadInput("--max-bodies-mib", problem, hint="a body of that size could never be read")
    leave(run_http(None if plan.addresses else engine_config(options), plan, config, listen))


def _key(path: str, option: str) -> str:
    """The key in a file. Raises BadInput for a file that others can read, or that is empty."""
    if not path:
        return ""
    file = Path(path)
    if file.stat().st_mode & 0o077:
        raise BadInput(option, f"{path} can be read by other users", hint=f"chmod 600 {path}")
    key = file.read_text(errors="replace").strip()
    if not key:
        raise BadInput(option, f"{path} is empty")
    return key
