"""For users of TRL: its GRPOTrainer with the engine in the same program, and the rollout's experts in its loss.

    pip install 'trl>=1.16,<2'                          # tested with 1.16.0
    python examples/trl_grpo.py                         # some minutes on two cores
    python examples/trl_grpo.py --steps 3 --out figures.json
    python examples/trl_grpo.py --numerics fixed        # rollout and trainer agree to the last bit

The small MoE of `small_moe.py` (trained first, once) learns to sort letters. Each step has groups of samples from the
engine, one update by TRL, and `update_weights` in memory. The KL of rollout and trainer is measured on the same samples
with the rollout's experts and with the trainer's own: the loss has one of the two (`--replay`), and a pass without
gradients gives the other.

What TRL's `rollout_func` gives to the loss is tokens and log-probs; its other fields reach reward functions alone. So
`ReplayTrainer` numbers the samples: TRL shuffles and splits the numbers with everything else, and they lead to the rows
of a micro-batch. TRL also leaves the rollout's log-probs out of the ratio unless vLLM sampled; here they are its
denominator.

Where the engine's loop runs: `GRPOTrainer.train()` blocks, and waits for samples in `rollout_func`, which runs the loop
until they are there. In between the loop stands still, and so does the engine, which has no request then. That takes no
thread and no server, and loses no time, since TRL does not train while it waits. The worker process keeps the weights
and cached blocks meanwhile. Rollouts that go on during updates need an engine in a process of its own, as
`rl_over_http.py` has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rl_loop  # beside this file, as are small_moe and trl_grpo_report
import small_moe
import torch
from fdasync_trainer import fixed_numerics, replay_routing
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.rows.mismatch import mismatch
from fdasync_transformers import named_tensors
from fdasync_transformers.weights.quiet import no_progress_bars
from trl_grpo_report import StepFigures, line, summary, write

from fdasync import Engine, EngineConfig, SamplingParams

try:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer
except ImportError as missing:
    sys.exit(f"trl_grpo.py needs TRL ({missing}): pip install 'trl>=1.16,<2'")

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fdasync.result import Routing, Sample

STEPS = 36
GROUP = 8  # samples of a problem
PROBLEMS = 36  # groups of a step: four of each length
MICRO_BATCHES = 4  # of a step
LEARNING_RATE = 1e-4
WARM_UP = 10  # steps
CALL_S = 300.0


class Rollouts:
    """TRL's `rollout_func`. Called with the prompts of a step, each `num_generations` times in a row.

    Attributes:
        seconds: of the latest call.
    """

    def __init__(self, runner: asyncio.Runner, engine: Engine) -> None:
        self.seconds = 0.0
        self._runner = runner
        self._engine = engine

    def __call__(self, prompts: list[str], trainer: ReplayTrainer) -> dict[str, list[Any]]:
        return self._runner.run(self._take(prompts, trainer))

    async def _take(self, prompts: list[str], trainer: ReplayTrainer) -> dict[str, list[Any]]:
        began = time.perf_counter()
        step, size = trainer.state.global_step, trainer.num_generations
        if prompts != [prompt for prompt in prompts[::size] for _ in range(size)]:
            raise RuntimeError(f"TRL gave prompts that are not groups of {size}: another version of it?")
        if step:
            await self._engine.update_weights(step, named_tensors(trainer.model))
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._ask(prompt, trainer, seed=step * len(prompts) + number))
                for number, prompt in enumerate(prompts[::size])
            ]
        samples = [sample for task in asked for sample in task.result()[1]]
        trainer.take(samples)
        self.seconds = time.perf_counter() - began
        return {
            "prompt_ids": [task.result()[0] for task in asked for _ in range(size)],
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "logprobs": [sample.processed_logprobs.tolist() for sample in samples],
        }

    async def _ask(self, prompt: str, trainer: ReplayTrainer, seed: int) -> tuple[list[int], tuple[Sample, ...]]:
        params = SamplingParams(
            n=trainer.num_generations,
            temperature=trainer.temperature,
            max_tokens=trainer.max_completion_length,
            logprobs="processed",  # with the temperature, as TRL's own
            seed=seed,
        )
        result = await self._engine.complete(prompt, params, deadline_s=CALL_S)
        cut = [sample.finish_reason for sample in result.samples if sample.finish_reason not in ("stop", "length")]
        if cut:
            raise RuntimeError(f"{prompt!r}: samples ended by {cut}: they are no answers, and TRL takes whole groups")
        return list(result.prompt_token_ids), result.samples


class ReplayTrainer(GRPOTrainer):
    """TRL's trainer with the experts of the rollout in its forward passes.

    Args:
        replay: in the loss; False: the trainer chooses its own experts.
        fixed: log-probs with the bits of a rollout under fixed numerics; the model has them already.
        tell: is called with the figures of each step.
    """

    def __init__(
        self, *arguments: Any, replay: bool, fixed: bool, tell: Callable[[StepFigures], None], **more: Any
    ) -> None:
        self._replay = replay
        self._fixed = fixed
        self._tell = tell
        self._samples: list[Sample] = []
        self._rows: list[Routing] = []
        self._scored = torch.empty(0)
        self._begin_step()
        super().__init__(*arguments, **more)

    def _send_telemetry(self) -> None:
        """TRL tells its makers what is trained, from a thread; an engine's process has none."""

    def _begin_step(self) -> None:
        self._began = time.perf_counter()
        self._replayed_tokens = 0
        # log-probs of each sample, of the rollout and of the trainer, these by whether experts were replayed
        self._theirs: list[np.ndarray] = []
        self._mine: dict[bool, list[np.ndarray]] = {True: [], False: []}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL logs after each step, and once at the end."""
        super().log(logs, start_time)
        told = self.state.log_history[-1]
        if "reward" not in told:
            return
        pairs = zip(self._mine[self._replay], self._theirs, strict=True)
        one = StepFigures(
            reward=told["reward"],
            clipped=told["clip_ratio/region_mean"],
            replayed=mismatch(self._theirs, self._mine[True]),
            live=mismatch(self._theirs, self._mine[False]),
            other_bits=sum(int((mine != theirs).sum()) for mine, theirs in pairs),
            replayed_tokens=self._replayed_tokens,
            rollout_s=self.rollout_func.seconds,
            step_s=time.perf_counter() - self._began,
        )
        self._begin_step()
        self._tell(one)

    def take(self, samples: list[Sample]) -> None:
        """The samples of the step, in TRL's order, which is that of its prompts."""
        if any(sample.routing is None for sample in samples):
            raise RuntimeError("a sample came without its experts: it would be trained on with others, unnoticed")
        self._samples = samples
        self._rows = [sample.routing for sample in samples]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["sample"] = torch.arange(len(self._samples))
        # what TRL has itself only for samples of vLLM's: the ratio is over what the tokens were drawn with
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **more: Any) -> torch.Tensor:
        self._rows = [self._samples[at].routing for at in inputs["sample"].tolist()]
        loss = super().compute_loss(model, inputs, *arguments, **more)
        self._compare(model, inputs)
        return loss

    def _compare(self, model: Any, inputs: dict[str, Any]) -> None:
        """Keep the log-probs of the loss, and those of a pass that chooses its experts the other way."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        sampled = inputs["completion_mask"].bool()
        with torch.no_grad():
            other, _ = self._forward(model, ids, real, sampled.shape[1], self._rows, replay=not self._replay)
        self._theirs += _by_sample(inputs["sampling_per_token_logps"], sampled)
        self._mine[self._replay] += _by_sample(self._scored, sampled)
        self._mine[not self._replay] += _by_sample(other[0], sampled)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, **asked: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """TRL's one place for log-probs: of a micro-batch in the loss, and of a whole rollout where it needs old ones.

        A whole rollout comes in parts of `batch_size`; a replay is of the sequences of one pass, so they are cut here.
        """
        size = batch_size or len(input_ids)
        parts = []
        for first in range(0, len(input_ids), size):
            part = slice(first, first + size)
            given = (model, input_ids[part], attention_mask[part], logits_to_keep, self._rows[part])
            made, replayed = self._forward(*given, replay=self._replay, **asked)
            parts.append(made)
            self._replayed_tokens += replayed
        logprobs, entropies, balance = zip(*parts, strict=True)
        self._scored = torch.cat(logprobs)
        return self._scored, None if entropies[0] is None else torch.cat(entropies), balance[0]

    def _forward(
        self, model: Any, ids: torch.Tensor, real: torch.Tensor, keep: int, rows: list[Routing], *, replay: bool,
        **asked: Any,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], int]:  # fmt: skip
        """One pass over `ids` [B, T]: what TRL's method returns, [B, keep], and the tokens with replayed experts."""
        with replay_routing(model, rows) if replay else nullcontext() as replayed:
            if self._fixed:
                logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, -keep - 1 : -1]
                # a log-softmax of another kind has other bits
                scored, entropy = logprobs_of_logits(
                    logits, ids[:, -keep:], temperature=self.temperature, return_entropy=True
                )
                made = (scored, entropy, None)
            else:
                made = super()._get_per_token_logps_and_entropies(model, ids, real, keep, **asked)
        return made, 0 if replayed is None else replayed.replayed_tokens


def _by_sample(logprobs: torch.Tensor, sampled: torch.Tensor) -> list[np.ndarray]:
    return [row[keep].numpy() for row, keep in zip(logprobs.detach().float(), sampled, strict=True)]


class Masters(torch.optim.AdamW):
    """AdamW on float32 masters of a model that computes in bfloat16."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self._masters = rl_loop.Masters(model)
        super().__init__(self._masters.wide, **options)

    def step(self, closure: Any = None) -> Any:
        self._masters.take_gradients()
        made = super().step(closure)
        self._masters.round()
        return made


def right(completion_ids: list[list[int]], answer: list[list[int]], **_: Any) -> list[float]:
    """TRL's reward function: 1.0 for the only right answer. `answer` is a column of the data set."""
    problems = [small_moe.Problem((), tuple(one)) for one in answer]
    return [small_moe.reward(problem, ids) for problem, ids in zip(problems, completion_ids, strict=True)]


def trainer_of(
    folder: Path, rollouts: Rollouts, *, replay: bool, fixed: bool, steps: int, problems: int, seed: int,
    tell: Callable[[StepFigures], None],
) -> ReplayTrainer:  # fmt: skip
    """TRL's trainer of the model of a folder, as `rl_loop.py` trains it."""
    hf: Any = import_module("transformers")
    with no_progress_bars():
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if fixed else torch.float32)
    model.set_experts_implementation("eager")
    options = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)
    if fixed:
        fixed_numerics(model).apply()
        optimizer = Masters(model, **options)
    asked = small_moe.problems(steps * problems, seed=seed + 1000)
    settings = GRPOConfig(
        output_dir=str(folder), save_strategy="no", report_to="none", seed=seed, use_cpu=True, bf16=False,
        disable_tqdm=True,  # its bars start a thread, and an engine's process has none
        gradient_checkpointing=False, max_steps=steps, logging_steps=1, shuffle_dataset=False,
        per_device_train_batch_size=problems * GROUP // MICRO_BATCHES, gradient_accumulation_steps=MICRO_BATCHES,
        num_generations=GROUP, max_completion_length=small_moe.MAX_NEW_TOKENS, temperature=1.0,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant_with_warmup", warmup_steps=WARM_UP, max_grad_norm=1.0,
        epsilon=rl_loop.CLIP_LOW, epsilon_high=rl_loop.CLIP_HIGH, router_aux_loss_coef=0.0,
    )  # fmt: skip
    return ReplayTrainer(
        model,
        right,
        settings,
        Dataset.from_list([{"prompt": small_moe.text(one.prompt), "answer": list(one.answer)} for one in asked]),
        processing_class=hf.AutoTokenizer.from_pretrained(folder),
        optimizers=(optimizer, None),
        rollout_func=rollouts,
        replay=replay,
        fixed=fixed,
        tell=tell,
    )


def train(
    folder: Path,
    *,
    replay: bool,
    steps: int,
    problems: int,
    seed: int,
    numerics: Literal["default", "fixed"],
    tell: Callable[[StepFigures], None],
) -> None:
    """Train; the engine has ended when this returns or raises."""
    config = EngineConfig(
        model=str(folder), runner_config={"dtype": "bfloat16", "num_threads": 1}, seed=seed, numerics=numerics
    )
    engine = Engine(config)
    with asyncio.Runner() as runner:
        rollouts = Rollouts(runner, engine)
        sizes = {"steps": steps, "problems": problems, "seed": seed}
        trainer = trainer_of(folder, rollouts, replay=replay, fixed=numerics == "fixed", tell=tell, **sizes)
        trainer.remove_callback(PrinterCallback)
        try:
            runner.run(engine.start())
            trainer.train()
        finally:
            runner.run(engine.aclose())


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdasync" / "small_moe"
    parser = argparse.ArgumentParser(
        description="TRL's GRPOTrainer on a small MoE, with samples and experts of an engine in the same program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="updates")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help=f"groups of {GROUP} samples in a step")
    parser.add_argument("--replay", choices=("on", "off"), default="on", help="the rollout's experts in the loss")
    parser.add_argument("--numerics", choices=("default", "fixed"), default="default", help="of rollout and trainer")
    parser.add_argument("--out", type=Path, help="JSON of every step's figures goes there")
    parser.add_argument("--folder", type=Path, default=cache, help="the model to start from, trained there first")
    parser.add_argument("--pretrain-steps", type=int, default=small_moe.STEPS, help="of that training")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the problems and the engine")
    chosen = parser.parse_args()
    if chosen.steps < 1 or chosen.problems < 1:
        parser.error("--steps and --problems must be 1 or more")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` may change with any version
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names that TRL uses
    # a model this small gains nothing from a second thread, and the engine's worker wants the other core
    torch.set_num_threads(1)
    began = time.perf_counter()
    done: list[StepFigures] = []

    def tell(one: StepFigures) -> None:
        done.append(one)
        print(line(len(done), one), flush=True)

    try:
        try:
            small_moe.pretrain(chosen.folder, chosen.seed, chosen.pretrain_steps)
        except OSError as error:  # a file, a folder of something else, one that cannot be written
            sys.exit(f"trl_grpo.py: --folder {chosen.folder}: {error}")
        settings = {name: getattr(chosen, name) for name in ("steps", "problems", "seed", "numerics")}
        train(chosen.folder, replay=chosen.replay == "on", tell=tell, **settings)
    except KeyboardInterrupt:
        # the engine was closed on the way here, and its worker has ended
        return 130
    print(summary(done), end="")
    if chosen.out is not None:
        write(chosen.out, {**settings, "replay": chosen.replay, "trl": import_module("trl").__version__}, done)
    print(f"{time.perf_counter() - began:.0f} s in all")
    different = sum(one.other_bits for one in done)
    if chosen.numerics == "fixed" and different:
        print(f"trl_grpo.py: {different} log-probs have other bits than the rollout's", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
