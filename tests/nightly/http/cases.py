"""Fuzzes a live front with cases of Schemathesis, made from the front's own description. An outside program: it imports
nothing of fdasync, and runs in an environment that has Schemathesis.

    python -P tests/nightly/http/cases.py URL --group use|control --cases 1000 --seed 1

Each operation gets cases that fit the description, cases that break it, and cases near a body that is right; each with
parameters and headers that no description names. Every answer must have a status, a media type and a body as
described, within the deadline. Control cases are followed by `/continue_generation`, while other threads generate.
Prints one JSON object. Run by `fuzz.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

DEADLINE_S = 30.0
METHODS = ("get", "post", "put", "delete", "patch", "options", "trace")
PROMPT = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}
SHOWN = 40
CHECKS = [
    checks.status_code_conformance, checks.content_type_conformance, checks.response_headers_conformance,
    checks.response_schema_conformance,
]  # fmt: skip
# an operation that takes a body has more to go wrong
_BODY_WEIGHT, _GENERATES_WEIGHT = 3, 8
_NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
_WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
_NOISE = st.fixed_dictionaries(
    {
        "params": st.dictionaries(_NAMES, st.text(max_size=20), max_size=3),
        "headers": st.dictionaries(_NAMES.map(lambda name: f"x-{name.replace('_', '-')}z"), _WORDS, max_size=3),
    }
)


class Run:
    """What was sent and what came back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        self.failures: Counter[str] = Counter()
        self.cases = 0
        self.slowest_s = 0.0

    def failed(self, label: str, words: str, sent: Any = "") -> None:
        key = f"{label}: {words}"
        if key not in self.failures and len(self.failures) < SHOWN:
            print(f"{key}\n    {str(sent)[:600]}", file=sys.stderr, flush=True)
        self.failures[key] += 1

    def noted(self, label: str, status: int, took_s: float) -> None:
        self.cases += 1
        self.statuses[label][str(status)] += 1
        self.slowest_s = max(self.slowest_s, took_s)

    def send(self, label: str, case: Any, noise: dict[str, Any]) -> None:
        begin = time.monotonic()
        try:
            response = case.call(base_url=self.url, session=self.session, timeout=DEADLINE_S, **noise)
        except requests.exceptions.InvalidHeader:
            return
        except requests.RequestException as error:
            self.cases += 1
            self.failed(label, f"no answer: {type(error).__name__}", (case.body, error))
            return
        took_s = time.monotonic() - begin
        self.noted(label, response.status_code, took_s)
        if took_s > DEADLINE_S:
            self.failed(label, "an answer behind the deadline", case.body)
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                self.failed(
                    label, f"{response.status_code} {failure.title}", (case.body, noise, response.content[:300])
                )
        except Failure as failure:
            self.failed(label, f"{response.status_code} {failure.title}", (case.body, noise, response.content[:300]))

    def must_work(self, method: str, path: str, body: Any = None) -> None:
        try:
            response = self.session.request(method, self.url + path, json=body, timeout=DEADLINE_S)
            if response.status_code != 200:
                self.failed(f"{method} {path}", f"{response.status_code} between cases", response.content[:300])
        except requests.RequestException as error:
            self.failed(f"{method} {path}", f"no answer between cases: {type(error).__name__}", error)


def near(operation: Any, example: dict[str, Any]) -> Any:
    """Cases around a body that is right: with some fields as they are drawn."""

    @st.composite
    def made(draw: Any) -> Any:
        case = draw(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
        drawn = case.body if isinstance(case.body, dict) else {}
        kept = draw(st.lists(st.sampled_from(sorted(drawn)), max_size=3, unique=True)) if drawn else []
        body = json.loads(json.dumps(example))
        for name in kept:
            if name not in body:
                body[name] = drawn[name]
        if "stream" in drawn:
            body["stream"] = draw(st.booleans())
        case.body = body
        return case

    return made()


def strategies_of(operation: Any, example: dict[str, Any] | None) -> dict[str, Any]:
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    found = {mode.value: operation.as_strategy(generation_mode=mode) for mode in modes}
    if example is not None:
        found["near"] = near(operation, example)
    return found


def fuzz(run: Run, label: str, strategy: Any, count: int, seed: int, after: Any) -> int:
    """Send so many cases; how many there were, which is less where there are no more that differ."""
    before = run.cases

    @seeded(seed)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy, _NOISE)
    def send(case: Any, noise: dict[str, Any]) -> None:
        run.send(label, case, noise)
        after()

    # nothing breaks a description that has no parameters
    with contextlib.suppress(Unsatisfiable):
        send()
    return run.cases - before


def other_methods(run: Run, path: str, declared: set[str]) -> None:
    """Methods that a path has not are 405, and are told which it has."""
    for method in METHODS:
        if method in declared or "{" in path:
            continue
        begin = time.monotonic()
        response = run.session.request(method, run.url + path, timeout=DEADLINE_S)
        label = f"{method.upper()} {path}"
        run.noted("methods that are not there", response.status_code, time.monotonic() - begin)
        if response.status_code != 405 or not response.headers.get("allow"):
            run.failed(label, f"{response.status_code}, allow {response.headers.get('allow')!r}: 405 is due")


class Beside:
    """Threads that generate while control paths are fuzzed: each answer must be 200, aborted or not."""

    def __init__(self, run: Run, threads: int) -> None:
        self._run = run
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._generate, daemon=True) for _ in range(threads)]
        self.served = 0

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            if thread.is_alive():
                self._run.failed("POST /generate", "hangs beside control paths")

    def _generate(self) -> None:
        with requests.Session() as session:
            while not self._ended.is_set():
                try:
                    response = session.post(self._run.url + "/generate", json=PROMPT, timeout=DEADLINE_S)
                except requests.RequestException as error:
                    self._run.failed("POST /generate", f"no answer beside: {type(error).__name__}", error)
                    continue
                if response.status_code != 200:
                    self._run.failed("POST /generate", f"{response.status_code} beside", response.content[:300])
                self.served += 1


def play(run: Run, group: str, cases: int, seed: int, weights: str) -> dict[str, Any]:
    load_all_checks()
    # from a URL, the library would leave out the path of the description itself
    schema = schemathesis.openapi.from_dict(run.session.get(f"{run.url}/openapi.json", timeout=DEADLINE_S).json())
    operations = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        controls = "403" in operation.definition.raw["responses"]
        if controls == (group == "control"):
            operations[operation.label] = operation
    weight = {}
    for label, operation in operations.items():
        answers = operation.definition.raw["responses"]
        is_long = "409" in answers and group == "use"
        weight[label] = _GENERATES_WEIGHT if is_long else _BODY_WEIGHT if len(operation.body) else 1
    unit = cases / sum(weight.values())

    def after() -> None:
        if group == "control":
            run.must_work("POST", "/continue_generation", {})
        elif run.cases % 50 == 0:
            run.must_work("GET", "/health_generate")

    beside = Beside(run, 2 if group == "control" else 0)
    with beside:
        for label, operation in operations.items():
            content = operation.definition.raw.get("requestBody", {}).get("content", {})
            example = content.get("application/json", {}).get("example")
            if weights and example:
                example = {name: weights if value == "/weights/step_1" else value for name, value in example.items()}
            found = strategies_of(operation, example)
            share = int(unit * weight[label] / len(found)) + 1
            missing = 0
            for number, strategy in enumerate(reversed(found.values())):
                # the last ones fit the description, and there is no end of them
                missing += share
                missing -= fuzz(run, label, strategy, missing, seed + number, after)
        for path, methods in schema.raw_schema["paths"].items():
            if any(operation.path == path for operation in operations.values()):
                other_methods(run, path, set(methods))
    run.must_work("GET", "/health_generate")
    run.must_work("POST", "/generate", PROMPT)
    return {
        "cases": run.cases, "operations": len(operations), "slowest_s": run.slowest_s, "beside": beside.served,
        "statuses": run.statuses, "failures": run.failures,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--group", choices=["use", "control"], required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", default="", help="a folder that /update_weights may load")
    args = parser.parse_args()
    print(json.dumps(play(Run(args.url), args.group, args.cases, args.seed, args.weights)))


if __name__ == "__main__":
    main()
