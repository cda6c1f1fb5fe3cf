"""One shape of `gpu_shapes`, in a process of its own: what it held on the device is given back with it.

    python -m tests.nightly.shapes.child

Imports what it needs, and only then reads a line of its standard input: a JSON object (`Spec`). The parent starts it
before it is needed, as imports take longer than drawing weights. With `do` "write" it writes quantised shards; with
"serve" it serves the folder's model by a whole engine, closes it, makes the model again and judges the answers. Writes
what it found to `out`, and to its standard output a line for the beginning and the end of every part of the start-up,
which the parent reads beside this process's memory. Exit status 0 where all was done, whatever the verdict; also where
the input ends at once.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import uvloop
from fdasync_transformers.weights import loading

from tests.nightly.shapes.folder import write_config, write_shards
from tests.nightly.shapes.judge import ShapeJudge
from tests.nightly.shapes.run import Asked, Served, serve

if TYPE_CHECKING:
    from benchmarks.gpu.judge import Answer

# prompt tokens of the answer whose rows are put in wrong places
_ENOUGH = 40
# kernels take a tenth of a second in Triton's interpreter
TINY = Asked(
    device="cpu", requests=4, prefix=9, own=(3, 14), output=(3, 5), again=2, running=2, context=8, new_tokens=8,
    block_tokens=4, chunk=16, texts=(2, 40),
)  # fmt: skip


class Spec(msgspec.Struct, frozen=True):
    """What a child does.

    Attributes:
        name: of the shape.
        folder: of the checkpoint.
        out: file for what was found (`Found`), in JSON.
        nbytes: of plain weights, at most, unless the fewest layers take more.
        do: "write" quantised shards, or "serve".
        stored: the folder has weights, from a child that wrote them.
        tiny: every width small, on a CPU.
        kernels: of the engine.
    """

    name: str
    folder: str
    out: str
    nbytes: int
    do: Literal["write", "serve"] = "serve"
    stored: bool = False
    tiny: bool = False
    kernels: str = "auto"

    @property
    def asked(self) -> Asked:
        return replace(TINY if self.tiny else Asked(), kernels=self.kernels)


class Found(msgspec.Struct):
    """What a child found.

    Attributes:
        seconds: of parts of the start-up, of serving and of judging.
        nbytes: of weights, files, KV of a token, and peaks of device memory.
        counts: of rows and tokens, by verdict.
        misplaced: see `ShapeJudge.misplaced`.
        tied_over_tolerance: the largest shift that a tied row needed, over its tolerance.
        worst: what is wrong, in words.
    """

    seconds: dict[str, float]
    nbytes: dict[str, int]
    counts: dict[str, int] = {}
    decode_ms: float = 0.0
    misplaced: float = 0.0
    tolerance: float = 0.0
    reference_differs: float = 0.0
    tied_over_tolerance: float = 0.0
    worst: list[str] = []
    facts: dict[str, Any] = {}


def write(spec: Spec) -> Found:
    began = time.perf_counter()
    folder = Path(spec.folder)
    layers = write_config(folder, spec.name, spec.nbytes, small=spec.tiny, quantised=True)
    sizes = write_shards(folder, torch.device(spec.asked.device))
    nbytes = {"files": sum(sizes.values()), "largest_file": max(sizes.values())}
    return Found({"write": time.perf_counter() - began}, nbytes, facts={"layers": layers, "files": sizes})


def run(spec: Spec) -> Found:
    asked = spec.asked
    if asked.device == "cpu":
        # threads of torch wait for the slowest of them
        torch.set_num_threads(1)
    if not spec.stored:
        write_config(Path(spec.folder), spec.name, spec.nbytes, small=spec.tiny)

    def mark(what: str) -> None:
        print(what, flush=True)

    began = time.perf_counter()
    served = uvloop.run(serve(spec.folder, asked, random_weights=not spec.stored, mark=mark))
    served.seconds["serve"] = time.perf_counter() - began - served.seconds["start"]
    gc.collect()
    if asked.device == "cuda":
        torch.cuda.empty_cache()
        # the largest models have no room beside themselves
        served.nbytes["left"] = torch.cuda.memory_allocated()
    return judge(spec, served)


def judge(spec: Spec, served: Served) -> Found:
    """What the answers are worth, by the model made again. Raises AssertionError for a judge that sees nothing."""
    began = time.perf_counter()
    device = torch.device(spec.asked.device)
    checkpoint = loading.read_checkpoint(spec.folder, with_tensors=spec.stored)
    make = loading.load if spec.stored else loading.draw
    verdicts = ShapeJudge(lambda: make(checkpoint, "bfloat16", device), device)
    texts, tokens = spec.asked.texts
    verdicts.calibrate(texts, tokens, (10, int(checkpoint.config.vocab_size)))
    found = verdicts.judge(served.answers)
    misplaced = verdicts.misplaced(_of_some_length(served.answers))
    served.seconds["judge"] = time.perf_counter() - began
    return Found(
        seconds=served.seconds,
        nbytes=served.nbytes,
        counts=dict(found.counts),
        decode_ms=served.decode_ms,
        misplaced=misplaced,
        tolerance=max(verdicts.tolerance.values()),
        reference_differs=verdicts.own_share,
        tied_over_tolerance=max(found.tied_distances, default=0.0),
        worst=found.worst,
        facts=served.facts,
    )


def _of_some_length(answers: list[Answer]) -> Answer:
    """The shortest of those with enough rows, as each row that is wrong takes its time to be judged."""
    enough = [answer for answer in answers if len(answer.prompt) >= _ENOUGH]
    return min(enough or answers, key=lambda answer: len(answer.prompt) if enough else -len(answer.prompt))


def main() -> None:
    line = sys.stdin.readline()
    if not line:
        return
    spec = msgspec.json.decode(line, type=Spec)
    found = write(spec) if spec.do == "write" else run(spec)
    Path(spec.out).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
