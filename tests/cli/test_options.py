"""Options made of structs, and the `--config` file: names, defaults, groups, which value wins, and what a wrong one is
told (`cli/common/fields.py`, `cli/common/options.py`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner
from msgspec import Meta

from fdasync.cli.common.fields import Fields, GroupedCommand, sentence_of
from fdasync.cli.common.options import _FIELDS, as_typed, engine_config, engine_options
from fdasync.engine.config import EngineConfig
from fdasync.errors import BadInput, ConfigError
from fdasync.registry.docs import docs_of

if TYPE_CHECKING:
    from pathlib import Path


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Of many.

    Attributes:
        drain_s: how long
            it takes. Not in the help.
    """

    drain_s: Annotated[float, Meta(ge=0, le=9)] = 2.0


class Own(Base, frozen=True, kw_only=True):
    """Of one.

    Attributes:
        where: tcp://HOST:PORT, or "here"; always.
        peers, friends: other ones.
        loud: it says so.
        size_nbytes: in bytes.
        log: is written.
        word: of two.
        number: 0 means something.
        hidden: nobody sees it.
    """

    where: Annotated[str, Meta(title="PLACE")]
    peers: tuple[str, ...] = ()
    friends: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    loud: bool = True
    size_nbytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 4 << 20
    log: Annotated[str, Meta(title="PATH")] = ""
    word: Literal["one", "two"] | None = None
    number: Annotated[int, Meta(ge=0)] | None = None
    hidden: int = 3
    left: int = 4


OWN = Fields(
    Own, groups={"First": ("where", "drain_s")}, names={"peers": "--peer", "size_nbytes": "--size-mib"},
    units={"size_nbytes": 1 << 20}, hidden=("hidden",), leave=("left",),
)  # fmt: skip


@click.group()
def root() -> None: ...


@root.command(cls=GroupedCommand)
@OWN
@engine_options
def run(**options: Any) -> None:
    own = OWN.take(options, left=5)
    config = engine_config(options)
    assert not options
    click.echo(json.dumps([msgspec.to_builtins(own), msgspec.to_builtins(config)]))


def said(*arguments: str) -> tuple[Any, ...]:
    """What the command was given; an error as it is."""
    ran = CliRunner().invoke(root, ["run", "--runner", "synthetic", *arguments])
    if isinstance(ran.exception, BadInput):
        raise ran.exception
    if ran.exit_code:
        raise click.ClickException(ran.output)
    own, config = json.loads(ran.output)
    return own, config


def test_values_come_from_the_struct_the_file_and_the_command_line_in_this_order(tmp_path: Path) -> None:
    own, config = said("--where", "here", "--where", "here")
    assert msgspec.convert(own, Own) == Own(where="here", left=5)
    assert (config["max_running"], config["store_deadline_s"], config["role"]) == (256, 5.0, "mixed")
    file = tmp_path / "any.toml"
    file.write_text(
        'max_running = 4\nwrite_back = false\nnum_blocks = "auto"\n[run]\nwhere = "file"\npeer = ["a", "b"]\n'
        "drain_s = 3\nloud = false\nsize_mib = 2\n[serve]\nanything = 1\n[runner_config]\nstep_s = 0.5\n"
    )
    own, config = said("--config", str(file))
    assert (own["where"], own["peers"], own["drain_s"], own["loud"]) == ("file", ["a", "b"], 3, False)
    assert own["size_nbytes"] == 2 << 20
    assert (config["max_running"], config["write_back"]) == (4, False)
    assert config["runner_config"] == {"step_s": 0.5}
    own, config = said(
        "--config", str(file), "--where", "here", "--peer", "c", "--loud", "--size-mib", "7", "--max-running", "5",
        "--write-back", "--num-blocks", "9", "--routing", "false", "--update-deadline-s", "1.5", "--num-threads", "2",
        "--word", "two", "--number", "0", "--friends", "1", "--friends", "2", "--weight-version", "7",
    )  # fmt: skip
    assert (own["where"], own["peers"], own["friends"], own["loud"]) == ("here", ["c"], [1, 2], True)
    assert (own["word"], own["number"], own["size_nbytes"]) == ("two", 0, 7 << 20)
    assert (config["max_running"], config["write_back"], config["num_blocks"]) == (5, True, 9)
    assert (config["routing"], config["update_deadline_s"], config["weight_version"]) == (False, 1.5, "7")
    assert config["runner_config"] == {"step_s": 0.5, "num_threads": 2}


@pytest.mark.parametrize(
    "own",
    [
        Own(where="a"),
        Own(
            where="b",
            peers=("x", "y"),
            friends=(1,),
            loud=False,
            word="one",
            number=0,
            drain_s=1.5,
            hidden=9,
            size_nbytes=7 << 20,
        ),
    ],
)
def test_a_struct_gives_the_command_line_that_gives_it(own: Own) -> None:
    again = msgspec.convert(said(*OWN.arguments(own))[0], Own)
    assert again == msgspec.structs.replace(own, left=5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--where", "a", "--max-runing", "3"], "No such option '--max-runing'. Did you mean '--max-running'?"),
        (["--where", "a", "--max-running", "many"], "'--max-running': 'many' is not a whole number"),
        (["--where", "a", "--max-running", "0"], "'--max-running': 0 is out of range (limit: 1 to 16777216)"),
        (["--where", "a", "--block-tokens", "x"], "'--block-tokens': 'x' is not a whole number or 'auto'"),
        (["--where", "a", "--block-tokens", "1"], "'--block-tokens': 1 is out of range (limit: 2 to 4096)"),
        (["--where", "a", "--store-retry-s", "nan"], "'--store-retry-s': nan is out of range"),
        (["--where", "a", "--drain-s", "-1"], "'--drain-s': -1.0 is out of range (limit: 0 to 9)"),
        (["--where", "a", "--friends", "0"], "'--friends': 0 is too small (limit: at least 1)"),
        (["--where", "a", "--numerics", "exact"], "'exact' is not 'default' or 'fixed'"),
        (["--where", "a", "--size-mib", "2000"], "'--size-mib': 2000 is out of range (limit: 1 to 1024)"),
        (["--where", "a", "--size-mib", "0"], "'--size-mib': 0 is out of range (limit: 1 to 1024)"),
        (["--where", "a", "--log", "/"], "'--log': File '/' is a directory."),
        ([], "Missing option '--where'"),
        (["--where", "a", "--where", "b"], "--where is given more than once: a and b"),
        (["--config", "a.toml", "--config", "b.toml"], "--config is given more than once: a.toml and b.toml"),
        (["--where", "a", "--loud", "--no-loud"], "--loud is given more than once: --loud and --no-loud"),
        (["--where", "a", "--config", "/no/such/file"], "File '/no/such/file' does not exist."),
        (["--where", "a", "--config", "/"], "File '/' is a directory."),
    ],
)
def test_a_wrong_option_is_told_with_the_way_out(arguments: list[str], told: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        said(*arguments)
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_runing = 3", "any.toml: config.max_runing: is not a key that exists; did you mean 'max_running'?"),
        ("max_running = 'many'", "any.toml: config.max_running: Expected `int`, got `str` (limit: 1 to 16777216)"),
        ("max_running = 0", "any.toml: config.max_running: 0 is out of range (limit: 1 to 16777216)"),
        ("numerics = 'exact'", "any.toml: config.numerics: Invalid enum value 'exact' (limit: 'default' or 'fixed')"),
        ("[htpt]\na = 1", "any.toml: config.htpt: is not a key that exists; no command of this name is installed"),
        ("[leese]\na = 1", "any.toml: config.leese: is not a key that exists; did you mean 'leases'?"),
        ("htpt = 1", "any.toml: config.htpt: is not a key that exists\n"),
        ("[leases]\nttls = 1", "any.toml: config.leases.ttls: is not a key that exists; did you mean 'ttl_s'?"),
        ("[leases]\nttl_s = 0", "any.toml: config.leases.ttl_s: 0 is out of range (limit: 0.001 to 1000000000.0)"),
        ("[policy_config]\nageing = 1", "any.toml: config.policy_config.ageing: is not a key that exists"),
        ("store = 'file'\n[store_config]\nthreads = 0", "any.toml: config.store_config.threads: 0 is out of range"),
        ("[speculation.drafter_config]\norder = 1", "any.toml: config.speculation.drafter_config.order: is not a key"),
        ("[run]\ndrain = 3", "any.toml: run.drain is no option of the command; did you mean 'drain_s'?"),
        ("[run]\ndrain_s = 'soon'", "any.toml: run.drain_s: 'soon' is not a number"),
        ("drain_s = 3", "any.toml: drain_s is an option of the command; it stands in the table [run]"),
        ("[run]\nlog = 5", "any.toml: run.log: 5 is not text: the path of a file is needed"),
        ("[run]\nlog = ['a']", "any.toml: run.log: ['a'] is not text: the path of a file is needed"),
        ("[run]\nsize_mib = 1025", "any.toml: run.size_mib: 1025 is out of range (limit: 1 to 1024)"),
        ("run = 3", "any.toml: run is no table"),
        ("max_running = ", "any.toml cannot be read as TOML"),
        ("\udcff", "any.toml cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_told_with_its_name_the_key_and_the_nearest_right_one(
    text: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "any.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput) as caught:
        said("--where", "a", "--config", str(file))
    assert told in f"{caught.value}\n"


def test_an_error_of_an_option_does_not_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "any.toml"
    file.write_text("max_running = 300\nmax_step_tokens = 300")
    with pytest.raises(BadInput) as caught:
        said("--where", "a", "--config", str(file), "--max-step-tokens", "3")
    assert str(caught.value).startswith("config.max_step_tokens: 3 cannot hold")


@pytest.mark.parametrize("form", ["--config={}", "--config\n{}"])
def test_an_error_of_the_runners_process_names_the_option_or_the_file_unless_that_is_a_pipe(
    form: str, tmp_path: Path
) -> None:
    file = tmp_path / "any.toml"
    file.write_text("[runner_config]\nsteps = 1")
    wrong = ConfigError("runner_config.steps", "is not a key that exists")
    words = ["serve", *form.format(file).split("\n")]
    assert as_typed(wrong, words) == f"{file}: runner_config.steps: is not a key that exists"
    device = ConfigError("runner_config.device", "is no device")
    assert as_typed(device, [*words, "--device", "x"]) == "--device: is no device"
    assert as_typed(device, ["serve", *form.format("/dev/fd/0").split("\n")]) == str(device)
    other = ConfigError("config.max_running", "is wrong")
    assert as_typed(other, words) == str(other)


def test_an_empty_file_says_nothing_and_no_file_is_read_that_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fdasync.toml"
    file.write_text("")
    assert said("--where", "a", "--config", str(file)) == said("--where", "a")
    file.write_text("max_running = 4")
    monkeypatch.chdir(tmp_path)
    assert said("--where", "a")[1]["max_running"] == 256


def test_help_shows_each_field_once_in_its_group_with_the_doc_and_the_default() -> None:
    told = CliRunner().invoke(root, ["run", "--help"], terminal_width=400).output
    lines = [line.split(maxsplit=1) for line in told.splitlines() if line.startswith("  --")]
    names = [words[0] for words in lines]
    assert len(names) == len(set(names))
    for option in {**OWN.options, **_FIELDS.options}.values():
        assert (option.opts[0] in names) != option.hidden
    # a field is set by an option of its name, by one of a plugin, or by a file alone
    apart = {"gpus", "store", "store_config", "policy", "policy_config", "runner_config", "speculation", "taps"}
    assert set(_FIELDS.options) == set(EngineConfig.__struct_fields__) - apart - {"role", "tokenizer", "leases"}
    first, rest = told.split("\nFirst:\n")[1].split("\nOptions:\n")
    assert "PLACE" in first
    assert 'tcp://HOST:PORT, or "here"; always.' in first
    assert "How long it takes.  [default: 2]" in " ".join(first.split("\n"))
    assert "[default: 4]" in next(line for line in rest.splitlines() if "--size-mib" in line)
    assert "Sequences in a step.  [default: 256]" in rest


def test_every_field_of_an_option_has_a_doc() -> None:
    assert {name: sentence_of(text) for name, text in docs_of(Own).items()} == {
        "drain_s": "How long it takes.", "where": 'tcp://HOST:PORT, or "here"; always.', "peers": "Other ones.",
        "friends": "Other ones.", "loud": "It says so.", "size_nbytes": "In bytes.", "log": "Is written.",
        "word": "Of two.", "number": "0 means something.", "hidden": "Nobody sees it.",
    }  # fmt: skip
    assert set(docs_of(EngineConfig)) == set(EngineConfig.__struct_fields__)
