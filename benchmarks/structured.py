"""What a grammar costs: masks on the host, and sequences under a JSON schema against free ones in an engine on a GPU.

    python -m benchmarks.structured [--json FILE] [--streams 64] [--tokens 192] [--pairs 5] [--masks] [--tiny]

The model has the shape of Qwen3-30B-A3B in bfloat16, weights drawn on the device, in a worker process with two steps in
flight; the tokenizer has 151,936 tokens of one to four bytes, made here. Both arms sample 64 sequences at temperature 1
and take the same number of tokens; in one of them each sequence is held to a schema whose arrays do not end before.

    structured_over_free_N   tokens per second under the schema, over those of free sequences; ratio of the medians
    free_tokens_per_s_N, structured_tokens_per_s_N
    beside_over_free_N       of the N/2 free sequences beside N/2 under the schema, over N free ones, for each
    mask_us, mask_us_p99     of one mask, on the host, by this tokenizer; accept_us: of one token
    compile_ms               of the schema

`--masks` measures the host's part alone, on any machine. `--tiny` rehearses on a CPU, where the figures mean nothing.
The arms alternate; some two minutes in all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import string
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from fdasync_transformers.sampling.grammars import Grammars

from benchmarks._gpu_scale import Scale, tiny, write_folder
from benchmarks._report import Report, calibrate_us
from fdasync import Engine, EngineConfig, Grammar, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

_AIM = 0.9
_SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["navy", "science", "law"]}, "maxItems": 3},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["name", "age", "tags", "zip"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = Grammar("json_schema", json.dumps(_SCHEMA))


def write_tokenizer(folder: Path, vocab_size: int, specials: Sequence[int]) -> None:
    """Bytes, then pairs of printable characters, then longer runs of letters, as byte-level BPE; `specials` are ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = string.ascii_lowercase
    # a space, as byte-level vocabularies write it
    space = "\u0120"
    pairs = itertools.product([space, *string.ascii_letters, *string.digits, *'{}[]":,'], repeat=2)
    runs = itertools.chain(
        map("".join, pairs),
        map("".join, itertools.product([space, *letters], letters, letters)),
        map("".join, itertools.product([space, *letters], letters, letters, letters)),
    )
    taken = set(specials)
    free = (number for number in range(vocab_size) if number not in taken)
    vocab = dict(zip(itertools.chain(sorted(alphabet), runs), free, strict=False))
    merges = [(text[:-1], text[-1]) for text in vocab if len(text) > 1 and text[:-1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["added_tokens"] = [
        {"id": number, "content": f"<|{number}|>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for number in sorted(taken)
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def measure_masks(folder: Path, vocab_size: int, eos_ids: Sequence[int], report: Report) -> None:
    """The host's part: texts drawn at random from what the masks allow."""
    grammars = Grammars(folder / "tokenizer.json", vocab_size, eos_ids)
    began = time.perf_counter()
    grammars.check(GRAMMAR)
    report.add("compile_ms", [(time.perf_counter() - began) * 1e3])
    masks: list[float] = []
    accepts: list[float] = []
    row = np.zeros(grammars.words, np.int32)
    for seed in range(4):
        random = Random(seed)
        matcher = grammars.matcher(seed, GRAMMAR.packed(), array("i"))
        for _ in range(300):
            began = time.perf_counter()
            matcher.fill(row)
            masked = time.perf_counter()
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(random.choice(allowed))
            chosen = time.perf_counter()
            matcher.accept(token)
            masks.append((masked - began) * 1e6)
            accepts.append((time.perf_counter() - chosen) * 1e6)
    report.add("mask_us", masks)
    report.add("mask_us_p99", [float(np.percentile(masks, 99))])
    report.add("accept_us", accepts)


async def _round(engine: Engine, prompts: Sequence[list[int]], grammars: Sequence[Grammar | None], new: int) -> float:
    """Seconds of the free requests, or of all where none is free. Raises RuntimeError for a reply that is too short."""
    tasks = []
    for number, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        # EOS cannot be sampled under the grammar, and ends no free sequence
        free: dict[str, Any] = {"ignore_eos": True} if grammar is None else {}
        params = SamplingParams(max_tokens=new, temperature=1.0, seed=number, grammar=grammar, **free)
        tasks.append(asyncio.create_task(engine.complete(prompt, params)))
    began = time.perf_counter()
    counted = [task for task, grammar in zip(tasks, grammars, strict=True) if grammar is None] or tasks
    await asyncio.wait(counted)
    wall = time.perf_counter() - began
    for task in tasks:
        if len((await task).samples[0].token_ids) != new:
            raise RuntimeError(f"a reply ended early: {(await task).samples[0].finish_reason}")
    return wall


async def measure_engine(scale: Scale, folder: str, streams: int, new: int, pairs: int, report: Report) -> None:
    longest = scale.context + new + 1
    config = EngineConfig(
        model=folder,
        runner_config=scale.runner_config((streams,)),
        process="worker",
        tokenizer="none",
        max_context_tokens=longest,
        block_tokens=scale.block_tokens,
        num_blocks=2 * streams * -(-longest // scale.block_tokens),
        host_blocks=0,
        max_running=streams,
        max_step_tokens=max(4 * scale.context, streams),
        max_requests=streams,
        pipeline_depth=2,
        seed=1,
    )
    began = time.perf_counter()
    async with Engine(config) as engine:
        report.conditions["engine_start_s"] = round(time.perf_counter() - began, 1)
        prompts = scale.prompts(streams)
        arms: dict[str, list[Grammar | None]] = {
            "free": [None] * streams,
            "structured": [GRAMMAR] * streams,
            "beside": [None if number % 2 else GRAMMAR for number in range(streams)],
        }
        for grammars in arms.values():
            await _round(engine, prompts, grammars, max(new // 4, 2))
        walls: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(pairs):
            for name in arms if turn % 2 == 0 else reversed(arms):
                walls[name].append(await _round(engine, prompts, arms[name], new))
    for name in ("free", "structured"):
        report.add(f"{name}_tokens_per_s_{streams}", [streams * new / wall for wall in walls[name]])
    middle = {name: statistics.median(values) for name, values in walls.items()}
    report.add(f"structured_over_free_{streams}", [middle["free"] / middle["structured"]], aim=_AIM)
    report.add(f"beside_over_free_{streams}", [middle["free"] / middle["beside"]])


def main() -> int:
    parser = argparse.ArgumentParser(description="What grammars cost: masks on the host, and an engine on a GPU.")
    parser.add_argument("--json", metavar="FILE", help="write figures and conditions there")
    parser.add_argument("--streams", type=int, default=64, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens of each (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each arm (default: %(default)s)")
    parser.add_argument("--masks", action="store_true", help="the host's part alone")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    args = parser.parse_args()
    scale = tiny() if args.tiny else Scale(context=256)
    if args.tiny:
        # room for all bytes
        scale.config.update(vocab_size=2048, bos_token_id=2046, eos_token_id=2047)
        args.streams, args.tokens, args.pairs = 2, 4, 1
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report("grammars")
    report.conditions["calibration_us"] = round(calibrate_us())
    vocab_size, eos_id = int(scale.config["vocab_size"]), int(scale.config["eos_token_id"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, scale)
        write_tokenizer(folder, vocab_size, (int(scale.config["bos_token_id"]), eos_id))
        measure_masks(folder, vocab_size, (eos_id,), report)
        if not args.masks:
            asyncio.run(measure_engine(scale, name, args.streams, args.tokens, args.pairs, report))
    report.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
