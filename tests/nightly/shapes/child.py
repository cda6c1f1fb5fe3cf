"""One shape of `shapes`, in a process of its own: what it held on the device is given back with it.

    python -m tests.nightly.shapes.child

Imports what it needs, and only then reads a line of its standard input: a JSON object (`Spec`). The parent starts it
before it is needed, as imports take longer than drawing weights. With `do` "write" it writes quantised shards; with
"serve" it serves the folder's model by a whole engine, closes it, makes the model again and judges the answers. Writes
what it found to `out`, and to its standard output a line for the beginning and the end of drawing or loading weights,
which the parent reads beside this process's memory. Exit status 0 where all was done, whatever the verdict; also where
the input ends at once.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
import uvloop
from fdasync_transformers.weights import loading

from tests.nightly.shapes.folder import write_config, write_shards
from tests.nightly.shapes.judge import ShapeJudge
from tests.nightly.shapes.run import Asked, Found, serve

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


def write(spec: Spec) -> Found:
    folder = Path(spec.folder)
    layers = write_config(folder, spec.name, spec.nbytes, small=spec.tiny, quantised=True)
    sizes = write_shards(folder, torch.device(spec.asked.device))
    nbytes = {"files": sum(sizes.values()), "largest_file": max(sizes.values())}
    return Found(nbytes=nbytes, facts={"layers": layers, "files": sizes})


def run(spec: Spec) -> Found:
    asked = spec.asked
    if asked.device == "cpu":
        # threads of torch wait for the slowest of them
        torch.set_num_threads(1)
    if not spec.stored:
        write_config(Path(spec.folder), spec.name, spec.nbytes, small=spec.tiny)

    def mark(what: str) -> None:
        print(what, flush=True)

    found, answers = uvloop.run(serve(spec.folder, asked, random_weights=not spec.stored, mark=mark))
    gc.collect()
    if asked.device == "cuda":
        # the largest models have no room beside themselves
        torch.cuda.empty_cache()
    judge(spec, found, answers)
    return found


def judge(spec: Spec, found: Found, answers: list[Answer]) -> None:
    """Find what the answers are worth, by the model made again."""
    device = torch.device(spec.asked.device)
    checkpoint = loading.read_checkpoint(spec.folder, with_tensors=spec.stored)
    make = loading.load if spec.stored else loading.draw
    verdicts = ShapeJudge(lambda: make(checkpoint, "bfloat16", device), device)
    texts, tokens = spec.asked.texts
    verdicts.calibrate(texts, tokens, (10, int(checkpoint.config.vocab_size)))
    judged = verdicts.judge(answers)
    found.counts, found.worst = dict(judged.counts), judged.worst
    found.misplaced = verdicts.misplaced(_of_some_length(answers))
    found.tolerance = max(verdicts.tolerance.values())


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
