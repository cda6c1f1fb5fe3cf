"""`fdasync http`: options and exit codes. Parses; `run.py` does the work, and is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fdasync.cli.common.numbers import NumberRange
from fdasync.cli.common.options import engine_config, engine_options
from fdasync.errors import BadInput
from fdasync_http.limits import LimitedCommand, limit_options, limits_of

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(cls=LimitedCommand)
@engine_options
@click.option("--prefill", default=0, type=click.IntRange(0, 64), help="Prefill instances to start.")
@click.option("--decode", default=0, type=click.IntRange(0, 64), help="Decode instances to start.")
@click.option("--mixed", default=0, type=click.IntRange(0, 64), help="Mixed instances to start.  [default: 1]")
@click.option(
    "--connect",
    "addresses",
    multiple=True,
    metavar="ADDRESS",
    help="Serve instances that run already (`fdasync serve`, `fdasync up`) instead of starting some. Several fronts may"
    " serve the same ones.",
)
@click.option(
    "--connect-s",
    default=30.0,
    show_default=True,
    type=NumberRange(0.1, 1e6),
    help="With --connect: longest that the first instance may take to answer.",
)
@click.option("--keys", type=_FILE, help="With --connect: file of `fdasync keys new`.")
@click.option(
    "--front",
    default="process",
    show_default=True,
    type=click.Choice(["process", "in-process"]),
    help="in-process: one engine on this process's loop, which JSON and slow readers then hold up.",
)
@click.option("--tokenizer", type=_FOLDER, help="With --connect: checkpoint folder for chats and text.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=30000, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option(
    "--dialect",
    default="sglang",
    show_default=True,
    type=click.Choice(["sglang", "vllm"]),
    help="Whose server clients are told that this is. All paths are there in either.",
)
@click.option(
    "--served-model-name", default="", metavar="NAME", help="Name of the model in answers.  [default: the folder's]"
)
@click.option("--api-key-file", type=_FILE, help="File with the key that every path asks for.")
@click.option("--admin-key-file", type=_FILE, help="File with the key that paths which control the engine ask for.")
@click.option(
    "--weights-root", type=_FOLDER, help="Clients may load weights from folders in this one.  [default: none]"
)
@click.option(
    "--pulls-root",
    type=_FOLDER,
    help="Clients may have checkpoints kept in this one, which follow a trainer's deltas (/pull_weights,"
    " /fetch_weights).  [default: none]",
)
@click.option(
    "--rows",
    default="npy",
    show_default=True,
    type=click.Choice(["npy", "prime_rl", "none"]),
    help="Form of expert rows at /inference/v1/generate.",
)
@click.option(
    "--memory-saver",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "off"]),
    help="What /server_info says of releasing memory: off for slime and Miles where they do not offload rollouts.",
)
@click.option("--ssl-certfile", type=_FILE, help="PEM file: serve HTTPS.")
@click.option("--ssl-keyfile", type=_FILE, help="PEM file with the certificate's key.")
@click.option("--ssl-ca-certs", type=_FILE, help="PEM file: clients must show a certificate of this authority.")
@click.option(
    "--drain-s",
    default=600.0,
    show_default=True,
    type=NumberRange(0, 1e9),
    help="Longest that the first signal waits for answers under way.",
)
@click.option(
    "--traces",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append a span of each request to this file, one line of JSON each (fdasync[otel]).",
)
@click.option("--ready-fd", type=click.IntRange(0), help="Write one JSON line to this descriptor when ready.")
@limit_options
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
    from fdasync_http.config import HttpConfig
    from fdasync_http.run import HttpOptions, run_http
    from fdasync_http.server import Listen

    connects = bool(options["addresses"])
    if connects and (options["model"] or options["prefill"] or options["decode"] or options["mixed"]):
        raise click.UsageError("--connect serves instances that run already: leave out --model and the numbers")
    alone = options["front"] == "in-process"
    if alone and (connects or options["prefill"] or options["decode"] or options["mixed"]):
        raise click.UsageError("--front in-process serves one engine of its own: leave out --connect and the numbers")
    if bool(options["prefill"]) != bool(options["decode"]) and not options["mixed"]:
        raise click.UsageError(f"one half is missing: add {'--decode' if options['prefill'] else '--prefill'} 1")
    taken = {name: options.pop(name) for name in _OWN}
    limits, of_connections = limits_of(options)
    engine = None if connects else engine_config(options)
    config = HttpConfig(
        model=taken["served_model_name"],
        dialect=taken["dialect"],
        api_key=_key(taken["api_key_file"], "--api-key-file"),
        admin_key=_key(taken["admin_key_file"], "--admin-key-file"),
        weights_root=_absolute(taken["weights_root"]),
        pulls_root=_absolute(taken["pulls_root"]),
        rows=taken["rows"],
        memory_saver=taken["memory_saver"],
        **limits,
    )
    listen = Listen(
        host=taken["host"],
        port=taken["port"],
        certificate=str(taken["ssl_certfile"] or ""),
        key=str(taken["ssl_keyfile"] or ""),
        client_authority=str(taken["ssl_ca_certs"] or ""),
        drain_s=taken["drain_s"],
        limits=of_connections,
    )
    mixed = taken["mixed"] or (0 if taken["prefill"] else 1)
    plan = HttpOptions(
        addresses=taken["addresses"],
        counts={"prefill": taken["prefill"], "decode": taken["decode"], "mixed": 0 if connects or alone else mixed},
        front=taken["front"],
        tokenizer_folder=str(taken["tokenizer"] or ""),
        ready_fd=taken["ready_fd"],
        connect_s=taken["connect_s"],
        keys=str(taken["keys"] or ""),
        traces=str(taken["traces"] or ""),
    )
    leave(run_http(engine, plan, config, listen))


_OWN = (
    "prefill", "decode", "mixed", "addresses", "front", "tokenizer", "host", "port", "dialect", "served_model_name",
    "api_key_file", "admin_key_file", "weights_root", "pulls_root", "rows", "memory_saver", "ssl_certfile",
    "ssl_keyfile", "ssl_ca_certs", "drain_s", "ready_fd", "connect_s", "keys", "traces",
)  # fmt: skip


def _absolute(folder: Path | None) -> str:
    return "" if folder is None else str(folder.absolute())


def _key(path: Path | None, option: str) -> str:
    """The key in a file. Raises BadInput for a file that others can read, or that is empty."""
    if path is None:
        return ""
    if path.stat().st_mode & 0o077:
        raise BadInput(option, f"{path} can be read by other users", hint=f"chmod 600 {path}")
    key = path.read_text(errors="replace").strip()
    if not key:
        raise BadInput(option, f"{path} is empty")
    return key
