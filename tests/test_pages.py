"""The pages: their code runs, and what they name is there."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fdasync.events.catalog import AnyEvent, Notice
from tests.support.picture import picture
from tests.support.plugins import install_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)


def run(folder: Path, script: str) -> str:
    path = folder / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- docs/events.md -----------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_subscription_runs_as_written(tmp_path: Path) -> None:
    watch, *_ = blocks("events.md", "python")
    assert re.fullmatch(r"hello 8 0\.\d{3} s\n", run(tmp_path, watch))


@pytest.mark.ci
def test_a_bus_without_an_engine_runs_as_written(tmp_path: Path) -> None:
    _, alone, *_ = blocks("events.md", "python")
    assert re.fullmatch(r"Ordered\(at=\d+\.\d+, seq=0, dish='soup'\)\n", run(tmp_path, alone))


@pytest.mark.ci
def test_the_tap_plugin_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, module, embed = blocks("events.md", "python")
    (project,) = blocks("events.md", "toml")
    points = tomllib.loads(project)["project"]["entry-points"]["fdasync.taps"]
    install_plugin(tmp_path, monkeypatch, "", "fdasync.taps", points)
    (tmp_path / "slow_requests.py").write_text(module)
    run(tmp_path, embed)
    assert re.fullmatch(r"hello took 0\.\d{3} s\n", (tmp_path / "slow.log").read_text())


def test_the_catalogue_has_every_event() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "events.md").read_text(), re.MULTILINE)
    listed = {name: cell.endswith(" N") for cell in rows for name in re.findall(r"`([A-Z]\w+)`", cell)}
    listed = {name: notice for name, notice in listed.items() if not name.endswith("Tap")}
    assert listed == {event.__name__: issubclass(event, Notice) for event in AnyEvent.__args__}


# -- docs/completion.md -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_cuda_event_is_awaited_as_written(tmp_path: Path) -> None:
    assert run(tmp_path, blocks("completion.md", "python")[0]) == "done (4096, 4096)\n"


@pytest.mark.ci
def test_the_same_lines_run_on_a_device_without_streams(tmp_path: Path) -> None:
    script = blocks("completion.md", "python")[0]
    for old, new in (
        ("4096", "8"),
        ('device="cuda"', 'device="cpu"'),
        ("torch.cuda.Event()", "AlreadyDone()"),
        ("import torch\n", "import torch\nfrom fdasync.gpu.ports.fake import AlreadyDone\n"),
    ):
        assert old in script
        script = script.replace(old, new)
    assert run(tmp_path, script) == "done (8, 8)\n"


def test_the_fake_port_runs_as_written(tmp_path: Path) -> None:
    assert "an illegal memory access" in run(tmp_path, blocks("completion.md", "python")[1])


@pytest.mark.ci
def test_the_example_of_a_cuda_future_runs(tmp_path: Path) -> None:
    out = run(tmp_path, (ROOT / "examples" / "cuda_future.py").read_text())
    (ticks,) = re.findall(r"another task ran (\d+) times meanwhile$", out, re.MULTILINE)
    assert int(ticks) > 0


# -- what pages and docstrings name -------------------------------------------------------------------

# written by others, and named here before they are merged
COMING: set[str] = set()
# repositories whose files `fdasync_trainer/rows` names as the source of a format
TRAINERS = ("nemo_rl/", "src/prime_rl/", "slime/", "miles/", "skyrl/", "verl/")


def of_ours() -> list[Path]:
    """All files and folders of the repository. What is not ours is not even walked: an environment has 60,000 files."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not name.endswith(".egg-info") and name != "build"
        ]
        found += [Path(folder, name) for name in (*folders, *names) if not name.startswith(".")]
    return sorted(found)


FILES = of_ours()
PAGES = [path for path in FILES if path.suffix == ".md"]


def ends() -> set[str]:
    """Each path, and whatever it ends with."""
    paths = [*[path.relative_to(ROOT).parts for path in FILES], *[Path(path).parts for path in COMING]]
    return {"/".join(parts[first:]) for parts in paths for first in range(len(parts))}


ENDS = ends()


def exists(path: str) -> bool:
    """Whether a file or folder has this path, or one that ends with it; a trainer's own files are not looked for."""
    return path.startswith(TRAINERS) or path.rstrip("/") in ENDS


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made where the pages are shown."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        if str(there.relative_to(ROOT)) in COMING and not there.exists():
            continue
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`([\w./-]+\.(?:py|md))`", text)
    # with a folder that is ours, of any kind
    named += re.findall(r"`((?:fdasync|tests|docs|benchmarks|examples|plugins)/[\w./-]+)`", text)
    for path in named:
        assert exists(path), f"{page.name} names {path}"


def commands_of_pip(text: str) -> Iterator[list[str]]:
    """The words behind each `pip install`, to the end of the line or of what is quoted."""
    for words in re.findall(r"pip\s+install\s+([^\n`#]*)", text):
        yield [word.strip("'\"),.;:") for word in words.split()]


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("folder", ["fdasync", "plugins", "docs", "README.md", "examples", "tests"])
def test_no_page_or_hint_installs_a_name_of_ours_from_an_index(folder: str) -> None:
    """The names are not ours there: whoever has them has what a reader installs. A folder of the checkout is named."""
    found = [path for path in FILES if path.suffix in (".py", ".md") and path.relative_to(ROOT).parts[0] == folder]
    told = [(path, words) for path in found for words in commands_of_pip(path.read_text())]
    assert told
    assert [one for one in told if any(word.startswith("fdasync") for word in one[1])] == []


def docstrings_and_comments(path: Path) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return "\n".join(token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING))


def named_in(text: str) -> list[str]:
    return [*re.findall(r"\bdocs/[\w-]+\.md\b", text), *re.findall(r"``?([\w./-]+\.(?:py|md))``?", text)]


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("folder", ["fdasync", "plugins", "examples", "benchmarks", "tests"])
def test_files_that_docstrings_and_comments_name_exist(folder: str) -> None:
    wrong = []
    for path in FILES:
        if path.suffix != ".py" or path.relative_to(ROOT).parts[0] != folder:
            continue
        # few files name what does not exist, and splitting a file into tokens takes a while
        if any(not exists(name) for name in named_in(path.read_text())):
            named = named_in(docstrings_and_comments(path))
            wrong += [f"{path.relative_to(ROOT)} names {name}" for name in named if not exists(name)]
    assert not wrong, "\n".join(wrong)


# -- docs/performance.md ------------------------------------------------------------------------------

FIGURES = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def spelt_out(key: str) -> list[str]:
    """`a_{1,64}` stands for `a_1` and `a_64`."""
    before, _, rest = key.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + after for choice in choices.split(",")]


def kept(path: Path, key: str) -> Decimal:
    """The figure in its file. Some files have several runs: `key#2` is of the second one that has the key."""
    name, _, number = key.partition("#")
    runs = json.loads(path.read_text(), parse_float=Decimal, parse_int=Decimal)
    found: list[Decimal] = [
        run["figures"][name] for run in (runs if isinstance(runs, list) else [runs]) if name in run["figures"]
    ]
    return found[int(number or 1) - 1]


def wrong(path: Path, key: str, figure: str, unit: str = "") -> list[str]:
    """What is wrong with a figure that a page shows, where its file has another one."""
    shown, there = Decimal(figure.replace(",", "")), kept(path, key) / {"": 1, "MB": 10**6, "GB": 10**9}[unit]
    # half of the last digit that is shown
    far = abs(shown - there) > Decimal("0.5").scaleb(int(shown.as_tuple().exponent))
    return [f"{path.name} has {there} for {key}, the page {figure} {unit}"] if far else []


def test_figures_are_those_of_their_files() -> None:
    """Of each row `| question | figure | aim | command: keys |`; the page's first lines have the convention."""
    path, compared = RESULTS, 0
    found: list[str] = []
    for line in FIGURES.read_text().splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) != 4 or cells[0] == " question " or set(line) == {"|", "-"}:
            continue
        if link := re.search(r"\]\((\S+\.json)\)", cells[3]):
            path = (FIGURES.parent / link[1]).resolve()
        # a command has spaces, a key has none
        names = [name for name in re.findall(r"`([^`]+)`", cells[3]) if " " not in name]
        keys = [key for name in names for key in spelt_out(name)]
        figures = re.findall(r"(\d[\d,]*(?:\.\d+)?(?:e-\d+)?)(?: ([MG]B))?", cells[1])
        assert len(keys) == len(figures) > 0, f"as many keys as figures: {line}"
        for key, (figure, unit) in zip(keys, figures, strict=True):
            found += wrong(path, key, figure, unit)
        compared += len(keys)
    assert not found, "\n".join(found)
    assert compared > 250


CITED = re.compile(r'\[([\d.,]+)\]\((\S+/results/\S+\.json) "(\S+)"\)')
# a machine, and a figure with a unit
MEASURED_ON = re.compile(r"\b(?:[HA]\d00|GPU decodes|(?:two|\d+) (?:busy )?cores|busy machine)\b")
FIGURE = re.compile(r"\b\d[\d,.]* ?(?:us|ms|s|%|x|[MG]B/s|tokens/s|times|of (?:its|the) (?:speed|rate)|of a core)\b")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != FIGURES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_figures_in_a_page_s_sentences_are_those_of_their_files(page: Path) -> None:
    """`[0.97](benchmarks/results/FILE.json "key")`. Where a sentence names a machine, each figure is such a link."""
    text = page.read_text()
    cited = CITED.findall(text)
    assert [one for figure, path, key in cited for one in wrong((page.parent / path).resolve(), key, figure)] == []
    sentences = re.split(r"(?<=[.:|])\s", re.sub(r"\s+", " ", CITED.sub("(kept)", text)))
    # CONTRIBUTING.md tells how long tests take, which tests/budget.toml holds
    for sentence in sentences if page.name != "CONTRIBUTING.md" else ():
        assert not (MEASURED_ON.search(sentence) and FIGURE.search(sentence)), f"kept by no file: {sentence}"


def test_pages_cite_the_results_that_are_kept() -> None:
    """And no others. A file that no page cites tells nobody anything."""
    cited = {name for page in PAGES for name in re.findall(r"benchmarks/results/([\w.-]+\.json)", page.read_text())}
    assert cited == {path.name for path in RESULTS.glob("*.json")}


# -- ARCHITECTURE.md, README.md -----------------------------------------------------------------------

TOUR = ROOT / "ARCHITECTURE.md"


def test_pages_are_short() -> None:
    tour = TOUR.read_text().splitlines()
    assert len(tour) <= 200
    assert [line for line in tour if len(line) > 100] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 8 << 10
    assert len(FIGURES.read_bytes()) <= 25 << 10


def test_the_picture_of_the_house_is_that_of_the_imports() -> None:
    assert f"\n\n{picture()}\n" in TOUR.read_text(), "draw it anew: python -m tests.support.picture"


def test_the_tour_names_every_room() -> None:
    home = ROOT / "fdasync"
    for path in home.rglob("__init__.py"):
        room = path.parent.relative_to(home)
        if room.parts and room.parts[:1] != ("testing",):
            assert f"`{room}/`" in TOUR.read_text(), f"{room} is not in ARCHITECTURE.md"


def source_of(path: str) -> Path:
    """A file that the tour names, of the core or of a plugin."""
    (found,) = [one for one in (ROOT / "fdasync" / path, *ROOT.glob(f"plugins/*/src/{path}")) if one.exists()]
    return found


def test_the_functions_that_the_tour_names_are_in_the_files_it_names() -> None:
    """ "Where do I change ...?" is of use only while it is right."""
    (section,) = re.findall(r"^## Where do I change \.\.\.\?\n(.*?)^## ", TOUR.read_text(), re.DOTALL | re.MULTILINE)
    wanted = ("Eviction", "Admission order", "Preemption", "A lease", "A feature that decides about sequences",
              "A pause, an update of weights",
              "A setting of an engine", "A metric", "An event", "An aux datum", "A kernel",
              "A field of an HTTP dialect", "A verb of the runner", "A trainer's row format",
              "A store, a transport, a runner, a policy")  # fmt: skip
    entries = dict(re.findall(r"^- \*\*([^*]+?)\.?\*\*(.*?)(?=^- |\Z)", section, re.DOTALL | re.MULTILINE))
    assert list(entries) == list(wanted)
    for entry, text in entries.items():
        sources = [source_of(path) for path in re.findall(r"`([\w/]+\.py)`", text)]
        functions = re.findall(r"`(?:\w+\.)?(\w+)\(\)`", text)
        code = "\n".join(path.read_text() for path in sources)
        for function in functions:
            place = (ROOT / "fdasync" / "events" / "bus.py").read_text() if function == "publish" else code
            assert re.search(rf"def {function}\(", place), f"{entry}: {function}"
    assert sum(len(re.findall(r"\(\)`", text)) for text in entries.values()) >= 15


# -- docs/design.md -----------------------------------------------------------------------------------


DESIGN = ROOT / "docs" / "design.md"


@pytest.mark.ci
def test_the_sections_and_rules_of_the_design_are_those_that_are_cited() -> None:
    """And no others: a rule that nothing cites goes, or is cited where it holds."""
    page = DESIGN.read_text()
    known = {("section", number) for number in re.findall(r"^## Section (\d+)\.", page, re.MULTILINE)}
    known |= {("rule", number) for number in re.findall(r"^\*\*Rule (\d+)\.", page, re.MULTILINE)}
    cited = set()
    for path in [*[path for path in FILES if path.suffix == ".py"], *PAGES]:
        if path == DESIGN:
            # what it says of itself keeps no rule
            continue
        # a citation may go on in the next line of a comment
        text = re.sub(r"\n\s*(?:# )?", " ", path.read_text())
        # as text or as a link
        for citation in re.findall(r"\bdesign\.md\)?,((?: (?:section|rule)s? \d+(?:(?:,| and) \d+)*,?)+)", text):
            for word, numbers in re.findall(r"(section|rule)s? (\d+(?:(?:,| and) \d+)*)", citation):
                cited |= {(word, number) for number in re.findall(r"\d+", numbers)}
        # pages that stand nowhere are not cited
        assert not re.search(r"\b(?:DESIG[N]|DECISION[S])(?: section)? \d", text), path
    assert cited == known, f"no such rules: {sorted(cited - known)}; nothing cites: {sorted(known - cited)}"
    assert len(cited) > 20
    # what the rules say of each other
    assert {("rule", number) for number in re.findall(r"\brule (\d+)", page)} <= known
