"""What fixed numerics cost a trainer: its steps over those of the library's own model, in turns.

A step is a forward pass in bfloat16 over padded sequences of random tokens, the log-probs of their tokens, and the
backward pass to all parameters; the optimizer is the same on both sides and left out. Shapes are `replay_kl`'s, weights
are drawn.

    step_ms_default, step_ms_fixed         medians
    step_fixed_over_default                of these (aim: 1.25 for the large shape on a GPU)
    forward_ms_*, forward_fixed_over_default   the same of forward passes without gradients
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.logprobs import logprobs_of_logits

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from benchmarks.trainer.replay_model import SHAPES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_AIM = 1.25


class Side:
    """One of the two models, and its steps over the same batch."""

    def __init__(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, *, fixed: bool) -> None:
        self._model = model
        self._given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        self._targets = torch.where(mask > 0, ids, -100)[:, 1:]
        self._fixed = fixed
        self._context: AbstractContextManager[Any] = fixed_numerics(model) if fixed else nullcontext()

    def seconds(self, *, backward: bool) -> float:
        """Of one step, from idle to idle."""
        with self._context:
            _wait(self._targets.device)
            began = time.perf_counter()
            with nullcontext() if backward else torch.no_grad():
                logits = self._model(**self._given).logits[:, :-1]
                found = self._logprobs(logits)
                if backward:
                    (-found.mean()).backward()
            _wait(self._targets.device)
            took = time.perf_counter() - began
        self._model.zero_grad()
        return took

    def _logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        if self._fixed:
            return logprobs_of_logits(logits, self._targets)
        table = logits.float().log_softmax(dim=-1)
        return table.gather(-1, self._targets.clamp(min=0)[..., None])[..., 0] * (self._targets >= 0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sides(shape: dict[str, Any], rows: int, width: int, device: torch.device) -> tuple[Side, Side]:
    """The library's own, and the fixed one with the same weights. Half of the sequences are padded by a quarter."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    models = []
    for _ in range(2):
        with device:
            model: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape), dtype=torch.bfloat16)
        models.append(model.train())
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, shape["vocab_size"], (rows, width), device=device)
    mask = torch.ones_like(ids)
    mask[::2, width - width // 4 :] = 0
    return Side(models[0], ids, mask, fixed=False), Side(models[1], ids, mask, fixed=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="small", help="24 layers of 64 experts: large")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=at_least_one, default=16, help="sequences of a batch")
    parser.add_argument("--width", type=at_least_one, default=512, help="tokens of each")
    parser.add_argument("--pairs", type=at_least_one, default=5, help="steps of each side")
    options = parser.parse_args()
    device = torch.device(options.device)
    title = "trainer_step: a trainer's step with fixed numerics, and the library's own"
    report = Report(title, gpus=int(device.type == "cuda"))
    report.conditions |= {"shape": SHAPES[options.size], "batch": [options.rows, options.width]}
    both = sides(SHAPES[options.size], options.rows, options.width, device)
    for backward in (False, True):
        took: tuple[list[float], list[float]] = ([], [])
        # the first turn compiles and warms up
        for turn in range(options.pairs + 1):
            for number in (0, 1) if turn % 2 else (1, 0):
                seconds = both[number].seconds(backward=backward)
                if turn:
                    took[number].append(seconds * 1e3)
        what = "step" if backward else "forward"
        default, fixed = (report.add(f"{what}_ms_{name}", took[at]) for at, name in enumerate(("default", "fixed")))
        aim = _AIM if backward and options.size == "large" and device.type == "cuda" else None
        report.add(f"{what}_fixed_over_default", [fixed / default], aim=aim)
    report.finish(options.json_path)
