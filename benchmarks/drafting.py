"""What drafting costs the engine process, in CPU microseconds per emitted token, and how often its drafts are right.

128 sequences in groups of 16 samples, with prompts of 1,000 tokens. Three kinds of answers: *much* (a sample repeats
phrases of its own and of its siblings most of the time), *little* (one phrase in eight is one that came before), and
*none* (every token is drawn anew). The samples of a group do not begin together, as in a rollout under way.

`us_*`: the drafter `ngram` alone, `take` and `propose` for every sequence in every step, one token a step: no draft is
ever accepted, so every token bears a whole proposal. `accepted_*`: tokens of these paths, up to the third, that were
right, over all that were proposed. `share_*`: proposals over steps of a sequence.

`planner_us_*`: `DraftPlanner.plan` and `done` over it, at depth 2 with 3 drafts, where the answers are replayed: every
draft is verified against the answer, as a runner does. `tokens_per_step_*` is the mean run of a sequence. A step is
told to last as long whatever its rows, so the budget drafts where anything is ever right.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks._report import Report, calibrate_us
from fdasync.drafting import Beginning, DrafterLimits, DraftPlanner, make_drafter
from fdasync.events.actions import path_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from fdasync.drafting import Drafter
    from fdasync.events.actions import Drafts

RUNNING, GROUP, PROMPT_TOKENS, VOCABULARY = 128, 16, 1000, 150_000
MAX_DRAFTS, DEPTH = 3, 2
# chance that the next phrase of an answer is one that its group has used, and lengths of phrases in tokens
KINDS = {"much": 0.85, "little": 0.125, "none": 0.0}
PHRASE_TOKENS = (6, 40)
PHRASES = 60
AIM_US = 3.0

Answers = list["npt.NDArray[np.int32]"]


class Load(NamedTuple):
    """Prompts and answers of all sequences, and how many tokens of each answer are there when the count begins."""

    prompts: list[bytes]
    answers: Answers
    begun: list[int]


def make_load(kind: str, steps: int, seed: int) -> Load:
    """Answers of `steps * (MAX_DRAFTS + 1)` tokens behind those that have begun."""
    random = np.random.default_rng(seed)
    share = KINDS[kind]
    prompts, answers, begun = [], [], []
    for _ in range(RUNNING // GROUP):
        prompt = random.integers(0, VOCABULARY, PROMPT_TOKENS).astype("<i4").tobytes()
        known = [_phrase(random) for _ in range(PHRASES)]
        for sample in range(GROUP):
            start = 40 * sample
            needed = start + steps * (MAX_DRAFTS + 1)
            parts: Answers = []
            while sum(map(len, parts)) < needed:
                old = random.random() < share
                parts.append(known[int(random.integers(PHRASES))] if old else _phrase(random))
            answers.append(np.concatenate(parts))
            prompts.append(prompt)
            begun.append(start)
    return Load(prompts, answers, begun)


def _phrase(random: np.random.Generator) -> npt.NDArray[np.int32]:
    return random.integers(0, VOCABULARY, int(random.integers(*PHRASE_TOKENS))).astype(np.int32)


def new_drafter(depth: int) -> Drafter:
    return make_drafter("ngram", {}, DrafterLimits(path_tokens=path_tokens(MAX_DRAFTS, depth), max_running=RUNNING))


class Alone(NamedTuple):
    """Of the drafter alone: see the module."""

    us: float
    accepted: float
    share: float


def drafter_alone(load: Load, steps: int) -> Alone:
    drafter = new_drafter(DEPTH)
    for key, begun in enumerate(load.begun):
        drafter.begin(key, key // GROUP * GROUP, load.prompts[key], load.answers[key][:begun].tobytes())
    keys = tuple(range(RUNNING))
    columns = np.stack([load.answers[key][begun : begun + steps + MAX_DRAFTS] for key, begun in enumerate(load.begun)])
    ones, most = np.ones(RUNNING, np.int64), np.full(RUNNING, path_tokens(MAX_DRAFTS, DEPTH))
    spent = right = drafted = proposals = 0.0
    for step in range(steps):
        given = columns[:, step].copy()
        started = time.process_time()
        drafter.take(keys, ones, given)
        counts, tokens = drafter.propose(keys, most)
        spent += time.process_time() - started
        has = np.flatnonzero(counts)
        paths = tokens[(np.cumsum(counts) - counts)[has][:, None] + np.arange(MAX_DRAFTS)]
        same = np.cumprod(paths == columns[has, step + 1 : step + 1 + MAX_DRAFTS], axis=1)
        right += int(same.sum())
        drafted += same.size
        proposals += len(has)
    return Alone(spent / steps / RUNNING * 1e6, right / drafted if drafted else 0.0, proposals / steps / RUNNING)


class Replayer:
    """Verifies drafts against the answers, in the order of launches."""

    def __init__(self, load: Load) -> None:
        self._answers = [answer.tolist() for answer in load.answers]
        self._at = list(load.begun)
        self._known = [PROMPT_TOKENS + begun for begun in load.begun]

    def launch(self, drafts: Drafts | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The step's counts and tokens."""
        paths: dict[int, tuple[int, list[int], int]] = {}
        if drafts is not None:
            tokens, at = np.frombuffer(drafts.tokens, "<i4").tolist(), 0
            for key, start, count, most in zip(drafts.keys, drafts.starts, drafts.counts, drafts.most, strict=True):
                paths[key] = (start - PROMPT_TOKENS, tokens[at : at + count], most)
                at += count
        counts, given = [], []
        for key in range(RUNNING):
            answer, at = self._answers[key], self._at[key]
            start, path, most = paths.get(key, (at, [], 0))
            known = at - start
            forwarded = path[known : known + most] if path[:known] == answer[start:at] else []
            count = 0
            while count < len(forwarded) and forwarded[count] == answer[at + count]:
                count += 1
            counts.append(count + 1)
            given += answer[at : at + count + 1]
            self._at[key] += count + 1
        return tuple(counts), tuple(given)


def planner_run(load: Load, steps: int) -> tuple[float, float, float]:
    """CPU microseconds per token, tokens per step of a sequence, accepted drafts over forwarded ones."""
    planner = DraftPlanner(new_drafter(DEPTH), name="ngram", max_drafts=MAX_DRAFTS, depth=DEPTH)
    for key, begun in enumerate(load.begun):
        planner.begin([Beginning(key, key // GROUP * GROUP, load.prompts[key], load.answers[key][:begun].tobytes())])
    keys = tuple(range(RUNNING))
    replayer = Replayer(load)
    launched: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque()
    spent, total = 0.0, 0
    for _ in range(steps):
        started = time.process_time()
        drafts = planner.plan(keys)
        spent += time.process_time() - started
        launched.append(replayer.launch(drafts))
        if len(launched) < DEPTH:
            continue
        counts, tokens = launched.popleft()
        total += len(tokens)
        started = time.process_time()
        planner.done(keys, None if len(tokens) == RUNNING else counts, tokens, seconds=0.01)
        spent += time.process_time() - started
    counters = planner.counters
    return (
        spent / total * 1e6,
        total / RUNNING / (steps - DEPTH + 1),
        counters.accepted / counters.drafted if counters.drafted else 0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--steps", type=int, default=500, help="steps to count in each run (default 500)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case; medians are reported (default 3)")
    args = parser.parse_args()
    report = Report("Drafting at 128 running in groups of 16, CPU microseconds per emitted token")
    report.conditions |= {"steps": args.steps, "prompt_tokens": PROMPT_TOKENS, "max_drafts": MAX_DRAFTS, "depth": DEPTH}
    calibration = []
    for kind in KINDS:
        loads = [make_load(kind, args.steps, seed) for seed in range(args.runs)]
        calibration += [calibrate_us() for _ in loads]
        alone = [drafter_alone(load, args.steps) for load in loads]
        report.add(f"us_{kind}", [one.us for one in alone], aim=AIM_US)
        report.add(f"share_{kind}", [one.share for one in alone])
        report.add(f"accepted_{kind}", [one.accepted for one in alone])
        planned = [planner_run(load, args.steps) for load in loads]
        report.add(f"planner_us_{kind}", [us for us, _, _ in planned])
        report.add(f"tokens_per_step_{kind}", [per_step for _, per_step, _ in planned])
        report.add(f"planner_accepted_{kind}", [accepted for _, _, accepted in planned])
    report.add("calibration_us", calibration)
    report.finish(args.json)


if __name__ == "__main__":
    main()
