"""What start-up compiles of the sampler's kernels: each of them, in every variant that usual steps take."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fdasync_kernels import sampling
from fdasync_kernels.sampling.passes import draw_kernel
from fdasync_transformers.sampling.plan import plan_samples
from fdasync_transformers.sampling.warm_up import USUAL, warm_up
from sampling_keys import LANES, MAX_TOKENS, other_steps, sample_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS = Path(__file__).parent.parent / "support" / "sampling_keys.py"
VOCAB = 333


def kernels() -> dict[str, Any]:
    """Every function of the room that a runner launches: those that ask for their program's number."""
    modules = pkgutil.iter_modules(sampling.__path__, sampling.__name__ + ".")
    trainers = f"{sampling.__name__}.gradients"
    return {
        name: value
        for module in modules
        if module.name != trainers
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, type(draw_kernel)) and "tl.program_id(" in inspect.getsource(value.fn)
    }


def table() -> torch.Tensor:
    return torch.zeros((LANES, MAX_TOKENS), dtype=torch.int32, device=DEVICE)


@pytest.mark.ci
def test_the_warm_up_launches_every_kernel_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, int] = {}
    kind = type(draw_kernel)
    honest = kind.run

    def run(self: Any, *args: Any, **others: Any) -> Any:
        launched[self.fn.__name__] = launched.get(self.fn.__name__, 0) + 1
        return honest(self, *args, **others)

    monkeypatch.setattr(kind, "run", run)
    warm_up(VOCAB, torch.bfloat16, table())
    assert len(kernels()) >= 14
    assert set(launched) == set(kernels())
    # one of them only needs its largest logit
    assert launched["draw_kernel"] == len(USUAL) - 1 < 20


def test_one_row_of_the_warm_up_is_plain() -> None:
    assert [name for name, own in USUAL.items() if plan_samples([own], [2], [0]).plain] == ["greedy"]


@pytest.mark.ci
def test_a_table_that_holds_no_history_is_left_alone() -> None:
    warm_up(VOCAB, torch.float32, torch.zeros((1, 1), dtype=torch.int32, device=DEVICE))


@pytest.mark.ci
def test_steps_of_other_sizes_would_compile_nothing() -> None:
    """A process without the interpreter asks Triton which variant each launch would take."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [f"{vocab_size}:{dtype}" for vocab_size in (333, 32_000, 151_936) for dtype in ("bfloat16", "float32")]
    command = [sys.executable, str(KEYS), *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert list(told) == asked
    for warmed, new in told.values():
        assert warmed >= len(kernels())
        assert new == []


@pytest.mark.gpu
def test_steps_of_other_sizes_compile_nothing() -> None:
    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels().values())

    vocab_size = 151_936
    tokens = table()
    warm_up(vocab_size, torch.bfloat16, tokens)
    before = compiled()
    assert before >= len(kernels())
    logits = torch.randn((LANES, vocab_size), device=DEVICE).bfloat16()
    for _, own in other_steps():
        sample_step(logits, own, tokens)
    torch.cuda.synchronize()  # blocking: a test without a loop
    assert compiled() == before
