"""For embedders: a whole RL loop in one program, with the rollout's experts replayed in the trainer.

    python examples/rl_loop.py                       # both arms, replay off and on, and a picture: rl_loop.png
    python examples/rl_loop.py --arm on --steps 10
    python examples/rl_loop.py --arm off --numerics fixed     # rollout and trainer agree to the last bit

A small MoE (`small_moe.py`, trained first, once) learns to sort letters. Each step has groups of samples, rewards, one
GRPO-like update, and `update_weights` in memory. Requests that still run go on under the new weights, and are trained
on in a later step. The two arms differ in one line: whether the trainer's passes are within `replay_routing`.

The rollout computes in bfloat16, in a worker process and in batches that change all the time; the trainer in float32,
in padded micro-batches. Their log-probs differ by the rounding, and by experts that were chosen differently because of
it. Replay removes the second difference.

With fixed numerics there is no difference: the trainer's forward pass runs in bfloat16 within `fixed_numerics` and has
the rollout's bits, so ratios of samples that no update crossed are exactly 1. Its optimizer keeps float32 masters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import deque
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import small_moe  # beside this file, as is rl_loop_report
import torch
from fdasync_trainer import fixed_numerics, replay_routing
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.rows.mismatch import mismatch
from fdasync_transformers import named_tensors
from fdasync_transformers.weights.quiet import no_progress_bars
from rich.console import Console
from rich.live import Live
from rl_loop_report import COLUMNS, StepFigures, cells, draw, plain_row, steps_table, summary, verdict

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.result import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync import Result

STEPS = 36
GROUP = 8  # samples of a problem
PROBLEMS = 36  # groups of a step: four of each length; a third as many more are under way while they are awaited
MICRO_BATCH = 64
LEARNING_RATE = 1e-4
WARM_UP = 10  # steps
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Experience(msgspec.Struct, frozen=True):
    """One sample as the trainer takes it: its prompt, the engine's sample, its reward and its advantage."""

    prompt: tuple[int, ...]
    sample: Sample
    reward: float
    advantage: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO: rewards of a group, centred and scaled; zeros where all are the same."""
    array = np.asarray(rewards, np.float64)
    return [float(one) for one in (array - array.mean()) / (array.std() + 1e-6)]


class Rollouts:
    """Groups of samples, in order; `ahead` more groups than one step takes are under way. Owned by one arm's loop."""

    def __init__(self, engine: Engine, seed: int, steps: int, problems: int, ahead: int) -> None:
        self._engine = engine
        self._problems = problems
        self._ahead = ahead
        self._asked = small_moe.problems(steps * problems, seed=seed + 1000)
        self._next = 0
        self._running: deque[asyncio.Task[list[Experience]]] = deque()

    async def take(self, group: asyncio.TaskGroup) -> list[Experience]:
        """Wait for the oldest groups, as many as a step has, and return their samples. `group` owns the tasks."""
        while len(self._running) < self._problems + self._ahead and self._next < len(self._asked):
            self._running.append(group.create_task(self._ask(self._next)))
            self._next += 1
        return [one for _ in range(self._problems) for one in await self._running.popleft()]

    async def _ask(self, number: int) -> list[Experience]:
        problem = self._asked[number]
        params = SamplingParams(
            n=GROUP, temperature=1.0, max_tokens=small_moe.MAX_NEW_TOKENS, logprobs="raw", seed=number
        )
        result = await self._engine.complete(problem.prompt, params, request_id=f"problem-{number}", deadline_s=120)
        return scored(problem, result)


def scored(problem: small_moe.Problem, result: Result) -> list[Experience]:
    """The samples of a group that ended by themselves; the others are left out, and `StepFigures` counts them.

    A sample that a deadline or an abort cut short is no wrong answer, and must not change the group's mean.
    """
    ended = [sample for sample in result.samples if sample.finish_reason in ("stop", "length")]
    if not ended:
        return []
    rewards = [small_moe.reward(problem, sample.token_ids) for sample in ended]
    return [
        Experience(problem.prompt, sample, reward, advantage)
        for sample, reward, advantage in zip(ended, rewards, advantages(rewards), strict=True)
    ]


def clipped_objective(ratio: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's objective of each token, to be raised, and whether the clip took its gradient; shapes broadcast."""
    whole, cut = ratio * gain, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * gain
    return torch.minimum(whole, cut), cut < whole


class Masters:
    """The parameters in float32, for the optimizer, of a model that computes in a narrower dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._served = [one for one in model.parameters() if one.requires_grad]
        self.wide = [one.detach().float().requires_grad_() for one in self._served]

    def take_gradients(self) -> None:
        for wide, served in zip(self.wide, self._served, strict=True):
            wide.grad = None if served.grad is None else served.grad.float()
            served.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Give the model the new parameters; `update_weights` then sends those, and rounds nothing."""
        for wide, served in zip(self.wide, self._served, strict=True):
            served.copy_(wide)


class Trainer:
    """The model in float32, as the optimizer needs it; with fixed numerics in the rollout's dtype, beside masters.

    Attributes:
        replayed_tokens: tokens of the latest update, prompts included, that had the rollout's experts in it.
    """

    def __init__(self, folder: Path, *, replay: bool, fixed: bool = False) -> None:
        hf: Any = import_module("transformers")
        with no_progress_bars():
            dtype = torch.bfloat16 if fixed else torch.float32
            self.model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model.set_experts_implementation("eager")
        self.model.train()
        self.replay = replay
        self.replayed_tokens = 0
        self._masters = Masters(self.model) if fixed else None
        if fixed:
            fixed_numerics(self.model).apply()
        self._parameters = list(self.model.parameters()) if self._masters is None else self._masters.wide
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        # the first steps of Adam go as far for noise as for a gradient
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min((step + 1) / WARM_UP, 1.0))

    async def update(self, batch: list[Experience]) -> tuple[list[np.ndarray], float]:
        """One optimizer step; returns the log-probs of each sample's tokens before it, and the share of clipped tokens.

        It computes on the engine's own loop, a micro-batch at a time, and other tasks of the loop run between them.
        That is fine here because the engine is paused and a micro-batch takes a quarter of a second. A trainer whose
        steps take longer belongs in a process of its own (or the engine does: `fdasync serve`): a loop that is blocked
        neither answers requests nor sees that a worker has died.
        """
        tokens = sum(len(one.sample.token_ids) for one in batch)
        if not tokens:
            raise RuntimeError("no request of this step ended by itself: there is nothing to train on")
        self.replayed_tokens = 0
        logprobs: list[np.ndarray] = []
        clipped = 0
        for at in range(0, len(batch), MICRO_BATCH):
            part = batch[at : at + MICRO_BATCH]
            mine, theirs, gain, mask = self._forward(part)
            objective, cut = clipped_objective((mine - theirs).exp(), gain)
            # the mean over the tokens of the whole batch, whatever the micro-batches
            loss = -(objective * mask).sum() / tokens
            torch.autograd.backward(loss)
            clipped += int((cut & mask).sum())
            logprobs += [row[keep].numpy() for row, keep in zip(mine.detach(), mask, strict=True)]
            await asyncio.sleep(0)
        if self._masters is not None:
            self._masters.take_gradients()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        if self._masters is not None:
            self._masters.round()
        return logprobs, clipped / tokens

    def _forward(self, part: list[Experience]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs of the trainer and of the rollout, advantages, and which places are sampled tokens; all [B, T]."""
        width = max(len(one.prompt) + len(one.sample.token_ids) for one in part)
        ids = torch.full((len(part), width), small_moe.PAD)
        real = torch.zeros(len(part), width, dtype=torch.int64)
        theirs = torch.zeros(len(part), width)
        sampled = torch.zeros(len(part), width, dtype=torch.bool)
        for row, one in enumerate(part):
            first, last = len(one.prompt), len(one.prompt) + len(one.sample.token_ids)
            assert one.sample.raw_logprobs is not None
            ids[row, :last] = torch.tensor(one.prompt + one.sample.token_ids)
            real[row, :last] = 1
            theirs[row, first:last] = torch.from_numpy(one.sample.raw_logprobs)
            sampled[row, first:last] = True
        # a request's rows may have been recorded under old and new weights
        rows = [one.sample.routing for one in part]
        if self.replay and None in rows:
            raise RuntimeError("a sample came without its experts: it would be trained on with others, unnoticed")
        with replay_routing(self.model, rows) if self.replay else nullcontext() as replay:
            logits = self.model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
        self.replayed_tokens += 0 if replay is None else replay.replayed_tokens
        if self._masters is None:
            mine = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        else:
            mine = logprobs_of_logits(logits, ids[:, 1:])
        gain = torch.tensor([one.advantage for one in part])[:, None]
        return mine, theirs[:, 1:], gain, sampled[:, 1:]


async def run_arm(
    folder: Path,
    *,
    replay: bool,
    steps: int,
    problems: int,
    seed: int,
    tell: Callable[[StepFigures], None],
    numerics: Literal["default", "fixed"] = "default",
) -> None:
    """One run of the loop: a fresh engine, a fresh trainer, the same problems and seeds whatever `replay`."""
    ahead = (problems + 2) // 3
    config = EngineConfig(
        model=str(folder),
        runner_config={"dtype": "bfloat16", "num_threads": 1},
        max_running=ahead * GROUP,  # so that groups are at different places when an update comes
        seed=seed,
        numerics=numerics,
    )
    trainer = Trainer(
        folder, replay=replay, fixed=numerics == "fixed"
    )  # blocking: reads its weights before the engine is there
    async with Engine(config) as engine:
        rollouts = Rollouts(engine, seed, steps, problems, ahead)
        async with asyncio.TaskGroup() as group:
            for version in range(steps):
                began = time.perf_counter()
                batch = await rollouts.take(group)
                rollout_s = time.perf_counter() - began
                # requests that still run wait while the trainer has the loop
                await engine.pause()
                logprobs, clipped = await trainer.update(batch)
                await engine.update_weights(version + 1, named_tensors(trainer.model), mode="keep")
                await engine.resume()
                train_s = time.perf_counter() - began - rollout_s
                left_out = problems * GROUP - len(batch)
                counts = (left_out, trainer.replayed_tokens)
                tell(figures(batch, logprobs, version, clipped, rollout_s, train_s, *counts))


def figures(
    batch: list[Experience],
    logprobs: list[np.ndarray],
    version: int,
    clipped: float,
    rollout_s: float,
    train_s: float,
    left_out: int = 0,
    replayed: int = 0,
) -> StepFigures:
    spans = [one.sample.weight_version for one in batch]
    fresh = [at for at, own in enumerate(spans) if all(span.version == str(version) for span in own)]
    theirs = [np.asarray(one.sample.raw_logprobs) for one in batch]
    return StepFigures(
        other_bits=sum(int((theirs[at] != logprobs[at]).sum()) for at in fresh),
        reward=float(np.mean([one.reward for one in batch])),
        fresh=mismatch([theirs[at] for at in fresh], [logprobs[at] for at in fresh]),
        crossed=sum(len(own) > 1 for own in spans),
        stale=sum(span.stop - span.start for own in spans for span in own if int(span.version) < version),
        clipped=clipped,
        left_out=left_out,
        replayed=replayed,
        rollout_s=rollout_s,
        train_s=train_s,
    )


async def compare(
    folder: Path,
    names: list[str],
    steps: int,
    problems: int,
    seed: int,
    console: Console,
    numerics: Literal["default", "fixed"] = "default",
) -> dict[str, list[StepFigures]]:
    """Run the arms, one after the other, and show them meanwhile."""
    runs: dict[str, list[StepFigures]] = {}
    for name in names:
        done = runs[f"replay {name}"] = []
        # `auto_refresh` would start a thread, and an engine's process has none
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def tell(one: StepFigures, name: str = name, done: list[StepFigures] = done, live: Live = live) -> None:
                done.append(one)
                if console.is_terminal:
                    live.update(steps_table(f"replay {name}", done), refresh=True)
                else:
                    rows = [COLUMNS] if len(done) == 1 else []
                    for row in (*rows, cells(len(done), one)):
                        console.print(f"replay {name}:".ljust(11), plain_row(row), soft_wrap=True, highlight=False)

            replay = name == "on"
            await run_arm(
                folder, replay=replay, steps=steps, problems=problems, seed=seed, tell=tell, numerics=numerics
            )
    return runs


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdasync" / "small_moe"
    parser = argparse.ArgumentParser(
        description="A whole RL loop on a small MoE: rollouts, rewards, updates, with routing replay off and on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="updates of each arm")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help=f"groups of {GROUP} samples in a step")
    parser.add_argument("--arm", choices=("off", "on", "both"), default="both", help="replay in the trainer")
    parser.add_argument("--numerics", choices=("default", "fixed"), default="default", help="of rollout and trainer")
    parser.add_argument("--png", type=Path, default=Path("rl_loop.png"), help="where the picture goes")
    parser.add_argument("--folder", type=Path, default=cache, help="the model to start from, trained there first")
    parser.add_argument("--pretrain-steps", type=int, default=small_moe.STEPS, help="of that training")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the problems and the engine")
    chosen = parser.parse_args()
    if chosen.steps < 1 or chosen.problems < 2:
        parser.error("--steps must be 1 or more, --problems 2 or more")
    if find_spec("matplotlib") is None:
        sys.exit("the picture needs matplotlib: pip install 'matplotlib>=3.10'")
    # a model this small gains nothing from a second thread, and the engine's worker wants the other core
    torch.set_num_threads(1)
    console = Console()
    began = time.perf_counter()
    try:
        try:
            small_moe.pretrain(chosen.folder, chosen.seed, chosen.pretrain_steps, say=console.print)
        except OSError as error:  # a file, a folder of something else, one that cannot be written
            sys.exit(f"rl_loop.py: --folder {chosen.folder}: {error}")
        names = ["off", "on"] if chosen.arm == "both" else [chosen.arm]
        runs = asyncio.run(
            compare(chosen.folder, names, chosen.steps, chosen.problems, chosen.seed, console, chosen.numerics)
        )
    except KeyboardInterrupt:
        # the engine was closed on the way here, and its worker has ended
        return 130
    draw(runs, chosen.png)
    print(summary(runs))
    if chosen.numerics == "fixed":
        print(verdict(runs))
    print(f"{chosen.png} drawn; {time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
