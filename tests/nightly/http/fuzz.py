"""Fuzzes every path of the HTTP front with Schemathesis, and holds it to its own description.

    python3 -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install "schemathesis==4.32.5"
    python -m tests.nightly http_fuzz --python /tmp/fuzz/bin/python --cases 10000

Schemathesis is an outside program (`tests/nightly/http/cases.py`) with an interpreter of its own. Paths of clients are
fuzzed on one server, over a random checkpoint with a chat template; paths that control the engine on a second one, over
the synthetic runner, which is resumed after each case and generates for other threads meanwhile. A first tenth of the
cases is for memory to settle; then it may grow by `GROWTH_NBYTES` in the front and in the instance.

Exit code 1: an answer that the description does not have, no answer within the deadline, or memory that grew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync.runner.synthetic import WEIGHTS_FILE
from tests.nightly.http.process import Memory, children_of, front, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# private memory: more than noise of allocators, less than a kibibyte a case
GROWTH_NBYTES = 32 << 20
_CONTEXT_TOKENS = 64
_LIMIT_S = 3600
_CONTROL_SHARE = 0.35
_MIB = 1 << 20
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_checkpoint(folder: Path) -> None:
    """A tiny random checkpoint with a chat template."""
    import fdasync_transformers

    fdasync_transformers.make_random_checkpoint(folder, "qwen3_moe", size="tiny")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": _TEMPLATE}))


def make_synthetic(folder: Path) -> list[str]:
    """Options of a synthetic instance, and weights that it may load."""
    config, weights = folder / "engine.toml", folder / "weights"
    config.write_text(f"[runner_config]\nstep_s = 0.001\nmax_context_tokens = {_CONTEXT_TOKENS}\n")
    weights.mkdir()
    (weights / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 1}))
    return ["--runner", "synthetic", "--config", str(config), "--weights-root", str(weights)]


def cases(python: str, url: str, group: str, count: int, seed: int, weights: str) -> dict[str, Any]:
    """Run the outside program; what it printed."""
    script = Path(__file__).with_name("cases.py")
    # -P: a module of this folder has the name of one of the standard library
    command = [python, "-P", str(script), url, "--group", group, "--cases", str(count), "--seed", str(seed)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--weights", weights], env=environment, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True
    )
    return dict(json.loads(done.stdout))


def play(python: str, group: str, count: int, seed: int, options: Sequence[str], weights: str = "") -> dict[str, Any]:
    """Fuzz one server; what came back, and how memory grew behind the first tenth."""
    with front(*options) as server:
        instance = children_of(server.pid)
        first = cases(python, server.url, group, count // 10, seed, weights)
        before = [memory_of([server.pid]), memory_of(instance)]
        told = cases(python, server.url, group, count - count // 10, seed + 100, weights)
        after = [memory_of([server.pid]), memory_of(instance)]
        if children_of(server.pid) != instance:
            told["failures"]["an instance was started again"] = 1
    told["cases"] += first["cases"]
    told["beside"] += first["beside"]
    told["slowest_s"] = max(told["slowest_s"], first["slowest_s"])
    for label, statuses in first["statuses"].items():
        told["statuses"][label] = dict(Counter(told["statuses"].get(label, {})) + Counter(statuses))
    told["failures"] |= first["failures"]
    for name, one, other in zip(("front", "instance"), before, after, strict=True):
        told[name] = {"before": one._asdict(), "after": other._asdict()}
        if _growth(one, other) > GROWTH_NBYTES:
            told["failures"][f"the private memory of the {name} grew by {_growth(one, other)} bytes"] = 1
    return told


def _growth(before: Memory, after: Memory) -> int:
    return after.private - before.private


def run(python: str, count: int, seed: int) -> dict[str, Any]:
    """Both servers."""
    controls = int(count * _CONTROL_SHARE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        make_checkpoint(model)
        context = ["--max-context-tokens", str(_CONTEXT_TOKENS), "--num-threads", "1"]
        use = play(python, "use", count - controls, seed, ["--model", str(model), *context])
        options = make_synthetic(folder)
        control = play(python, "control", controls, seed, options, str(folder / "weights"))
    return {"use": use, "control": control}


def has_schemathesis(python: str) -> bool:
    with suppress(OSError):
        return not subprocess.run([python, "-c", "import schemathesis"], capture_output=True, check=False).returncode
    return False


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has Schemathesis")
    parser.add_argument("--cases", type=at_least_one, default=10_000, help="in all, about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not has_schemathesis(args.python):
        parser.error(f"--python: {args.python} has no Schemathesis; name an interpreter that has it")
    report = Report("Generated requests against the HTTP front")
    told = run(args.python, args.cases, args.seed)
    report.conditions |= told | {"seed": args.seed}
    for group, one in told.items():
        for name in ("cases", "operations", "slowest_s", "beside"):
            report.add(f"{group}_{name}", [one[name]])
        for name in ("front", "instance"):
            before, after = (one[name][when]["private"] / _MIB for when in ("before", "after"))
            report.add(f"{group}_{name}_grew_mib", [after - before], aim=GROWTH_NBYTES / _MIB)
        report.add(f"{group}_failures", [sum(one["failures"].values())], aim=0)
    report.finish(args.json_path)
    for group, one in told.items():
        for words, number in one["failures"].items():
            print(f"{group}: FAILED {number} times: {words}", file=sys.stderr)
    sys.exit(1 if any(one["failures"] for one in told.values()) else 0)
