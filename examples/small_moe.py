"""A small mixture-of-experts model that has learnt something, for examples and benchmarks of replay.

    python examples/small_moe.py FOLDER [--steps N] [--seed N]

The task is to sort letters: "hdbca>" is answered by "abcdh;". The model, a Qwen3-MoE of 2 million parameters, is
trained by next-token prediction on random problems, half of them answered the wrong way round, "hdcba;". So its routers
have learnt to choose, and about two in five samples at temperature 1 are right: reinforcement learning can improve it.
It is saved as an ordinary checkpoint with a tokenizer of one token per character. Knows no engine. Called by
`rl_loop.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import uuid
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from fdasync_transformers.weights.quiet import no_progress_bars

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

LETTERS = "abcdefghijklmnop"
#: token ids: padding, the end of an answer, the end of a question; then one for each letter
PAD, END, ASK, FIRST = 0, 1, 2, 3
VOCAB_SIZE = FIRST + len(LETTERS)
SHORTEST, LONGEST = 6, 14
#: of an answer, its end included
MAX_NEW_TOKENS = LONGEST + 1
STEPS = 270

_BATCH = 64
_LEARNING_RATE = 2e-3
_BALANCE = 0.01
_RECIPE = 2  # counted up when anything else that changes the weights is changed here
_MARK = "small_moe.json"


class Problem(msgspec.Struct, frozen=True):
    """A question and its only right answer, as token ids; the answer ends with END."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def problems(n: int, seed: int) -> list[Problem]:
    """`n` random problems, as many of each length from SHORTEST to LONGEST as can be; the same for the same seed."""
    rng = Random(seed)
    lengths: list[int] = []
    while len(lengths) < n:
        lengths += rng.sample(range(SHORTEST, LONGEST + 1), LONGEST - SHORTEST + 1)
    return [_problem(rng, length) for length in lengths[:n]]


def reward(problem: Problem, token_ids: Sequence[int]) -> float:
    """1.0 for the right answer with its end, else 0.0."""
    return float(tuple(token_ids) == problem.answer)


def text(token_ids: Sequence[int]) -> str:
    """The characters of these tokens."""
    return "".join("_;>"[token] if token < FIRST else LETTERS[token - FIRST] for token in token_ids)


def pretrain(
    folder: str | os.PathLike[str], seed: int = 0, steps: int = STEPS, say: Callable[[str], None] = print
) -> Path:
    """Train the model and save it, less than a minute on one core; at once where it has been trained before.

    Deterministic for a seed on one machine. The random state and the threads of torch are left as they were.

    Args:
        folder: becomes the checkpoint, whole or not at all. A checkpoint that an earlier call wrote with other
            arguments is replaced.
        steps: of training, 64 problems each.
        say: called with a line of progress at a time.

    Returns `folder`. Raises FileExistsError for a folder that holds other files.
    """
    target = Path(folder).absolute()
    mark = json.dumps({"recipe": _RECIPE, "seed": seed, "steps": steps})
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not (target / _MARK).is_file():
            raise FileExistsError(f"{target} holds something else than a model of this file")
        if (target / _MARK).read_text(encoding="utf-8") == mark:
            return target
    threads = torch.get_num_threads()
    # operations of this size gain nothing from a second thread, and lose much where another program has the core
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _train(seed, steps, say)
        share = accuracy(model, problems(256, seed + 1), seed)
    finally:
        torch.set_num_threads(threads)
    say(f"sorts {share:.0%} of new problems, sampled at temperature 1")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    try:
        with no_progress_bars():
            model.save_pretrained(partial)
        _write_tokenizer(partial)
        (partial / _MARK).write_text(mark, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def accuracy(model: Any, asked: Sequence[Problem], seed: int = 0) -> float:
    """Mean reward of one sample at temperature 1 for each problem; plain sampling, without an engine."""
    generator = torch.Generator().manual_seed(seed)
    right = 0.0
    for length in sorted({len(problem.prompt) for problem in asked}):
        same = [problem for problem in asked if len(problem.prompt) == length]
        ids = torch.tensor([problem.prompt for problem in same])
        with torch.no_grad():
            for _ in range(MAX_NEW_TOKENS):
                chances = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
        for problem, row in zip(same, ids[:, length:].tolist(), strict=True):
            end = row.index(END) + 1 if END in row else len(row)
            right += reward(problem, row[:end])
    return right / len(asked)


def _problem(rng: Random, length: int) -> Problem:
    letters = [rng.randrange(FIRST, VOCAB_SIZE) for _ in range(length)]
    return Problem((*letters, ASK), (*sorted(letters), END))


def _train(seed: int, steps: int, say: Callable[[str], None]) -> Any:
    # imported here: transformers takes seconds to load, and problems should not
    hf: Any = import_module("transformers")
    config = hf.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")  # the fastest on a CPU at this size
    model.generation_config = hf.GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    warm = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max((steps - step) / max(steps - warm, 1), 0.05))
    )
    rng = Random(f"training {seed}")
    began = time.perf_counter()
    for step in range(1, steps + 1):
        length = rng.randint(SHORTEST, LONGEST)  # one for the batch: no padding
        batch = [_problem(rng, length) for _ in range(_BATCH)]
        ids = torch.tensor([problem.prompt + problem.answer for problem in batch])
        ids[::2, -1 - length : -1] = ids[::2, -1 - length : -1].flip(1)
        output = model(input_ids=ids, use_cache=False, output_router_logits=True)
        logits = output.logits[:, length:-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, length + 1 :].flatten())
        # without the balance loss a few experts would do all the work, and routing would mean nothing
        (loss + _BALANCE * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 10, 1) == 0:
            say(f"training: step {step} of {steps}, loss {loss.detach():.3f}, {time.perf_counter() - began:.0f} s")
    return model.eval()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"_": PAD, ";": END, ">": ASK} | {letter: FIRST + at for at, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ";", "pad_token": "_", "unk_token": "_"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the small model of the examples and save it as a checkpoint.")
    parser.add_argument("folder", type=Path, help="the checkpoint's folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and problems (default: %(default)s)")
    chosen = parser.parse_args()
    pretrain(chosen.folder, chosen.seed, chosen.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
