"""The step kernels that can be tried here: Triton's, on a GPU or in its interpreter; and on a CPU those of hosts."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.step_kernels import HostKernels, StepKernels

_ALL = [StepKernels()] if torch.cuda.is_available() else [StepKernels(), HostKernels()]
both = pytest.mark.parametrize("kernels", _ALL, ids=lambda kernels: type(kernels).__name__)
