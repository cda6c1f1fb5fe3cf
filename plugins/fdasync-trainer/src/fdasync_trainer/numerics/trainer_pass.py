"""One forward pass of a trainer's model with fixed numerics: where it begins, and how parts of it are recomputed.

The dispatch mode is entered on the thread that runs the pass, and again by each recomputation, on the thread that runs
that. Checkpointing whose recomputation would not enter it is refused in the forward pass.

A function mode for `linear` (`mode.py`) is given each attribute of each tensor too, which costs a part of a step. So
plain linear layers get a forward of their own, which gives torch rows, and the function mode is entered only where the
first pass finds that other code calls `linear` with more than rows. Knows no batches. Called by `trainer.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial, update_wrapper
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from fdasync_transformers.fixed.mode import FixedNumerics, linear_of_rows
from fdasync_transformers.model.not_copied import NotCopied
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fdasync.errors import BadInput, RunnerError
from fdasync_trainer.replay.forward_pass import Recomputing, within_function, within_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class FixedPass:
    """One forward pass.

    Attributes:
        running, covered: see `replay.forward_pass.Recomputed`.
        is_open: whether the model's numerics are still fixed.
        linears, known: as `FixedNumerics` has them.
    """

    def __init__(
        self,
        is_open: Callable[[], bool],
        *,
        linears: bool = True,
        known: dict[Any, Callable[..., Any] | None] | None = None,
    ) -> None:
        self.running = True
        self.covered = 0
        self.is_open = is_open
        self.linears = linears
        self.known = {} if known is None else known
        self._with_grad = torch.is_grad_enabled()
        # checkpointing of the whole model may have switched gradients off before the pass
        self._within_function = not self._with_grad and within_function()

    def watch(self) -> None:
        """Called by each attention layer: raise if it would be recomputed without these numerics, or is."""
        if self.running:
            reentrant = self._within_function or (self._with_grad and not torch.is_grad_enabled())
            if not self.covered and (reentrant or within_hooks()):
                raise _refused()
        elif not isinstance(_get_current_dispatch_mode(), FixedNumerics):
            raise _refused()

    def watch_product(self) -> None:
        """As `watch`, for what may run without gradients too."""
        if self.running and not self.covered and within_hooks():
            raise _refused()


class Within(AbstractContextManager[None]):
    """Entered by checkpointed functions of a pass, and by their recomputations. May be entered again meanwhile."""

    def __init__(self, work: FixedPass) -> None:
        self._work = work
        self._modes: list[PassMode | None] = []

    def __enter__(self) -> None:
        work = self._work
        if not work.running and not work.is_open():
            raise BadInput(
                "model",
                "backward recomputes a part of a pass whose fixed_numerics was closed",
                hint="call backward within the context",
            )
        mode = None
        # above selective checkpointing's mode, if there is one, in the pass and in its recomputation alike
        if not isinstance(_get_current_dispatch_mode(), FixedNumerics):
            mode = PassMode(work)
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._modes.append(mode)
        work.covered += 1

    def __exit__(self, *error: Any) -> None:
        self._work.covered -= 1
        mode = self._modes.pop()
        if mode is not None:
            mode.__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here


class PassMode(FixedNumerics):
    """A trainer's: refuses random operations too, and products that would be recomputed without it."""

    def __init__(self, work: FixedPass) -> None:
        super().__init__(linears=work.linears, known=work.known)
        self._work = work

    def _way(self, func: Any) -> Callable[..., Any]:
        if "scaled_dot_product" in func.name():
            # torch calls it random, for the dropout that it could have
            return partial(_raise, f"{func.name()}: attention that does not go through the library's interface")
        if torch.Tag.nondeterministic_seeded in func.tags:
            return partial(_raise, f"{func.name()} is random; switch dropout and noise off, or call model.eval()")
        way = super()._way(func)
        return partial(self._watched, way) if func in _PRODUCTS else way

    def _watched(self, way: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._work.watch_product()
        return way(*args, **kwargs)


def _raise(problem: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise RunnerError(f"fixed numerics: {problem}")


class FixedForward(NotCopied, Recomputing):
    """A module's forward while its numerics are fixed."""

    def __init__(self, run: Callable[..., Any], own: Callable[..., Any]) -> None:
        update_wrapper(self, own)
        self.work: FixedPass | None = None
        self._run = run
        self._own = own
        self._parameters = list(signature(own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "fd_ctx" in kwargs:
            return self._own(*args, **kwargs)  # within a pass
        return self._run(self, self._own, dict(zip(self._parameters, args, strict=False)) | kwargs)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]] | None:
        """See `Recomputing`."""
        return None if self.work is None else (Within(self.work), Within(self.work))

    def end(self) -> None:
        """The pass has ended."""
        if self.work is not None:
            self.work.running = False
        self.work = None


class HeadForward(NotCopied):
    """The output head's forward while its model's numerics are fixed: called alone, it has the bits of a pass."""

    def __init__(self, run: Callable[..., Any], own: Callable[..., Any]) -> None:
        update_wrapper(self, own)
        self._run = run
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(_get_current_dispatch_mode(), FixedNumerics):
            return self._own(*args, **kwargs)  # within a pass
        return self._run(self._own, args, kwargs)


class LinearForward(NotCopied):
    """The forward of a plain `nn.Linear`."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module
        return linear_of_rows(input, module.weight, module.bias)


def plain_linears(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LinearForward]]:
    """The modules that are no more than a linear layer, and what their forward becomes."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            yield module, LinearForward(module)


class OtherLinears(TorchFunctionMode):
    """While entered, looks for calls of `linear` with more than rows.

    Attributes:
        seen: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        if func is linear and (args[0] if args else named["input"]).dim() != 2:
            self.seen = True
        return func(*args, **named)


def _refused() -> BadInput:
    return BadInput(
        "model",
        "a part of it is checkpointed, and not by the library: it would be recomputed with other numerics",
        hint="use gradient_checkpointing_enable(), or context_fn=checkpoint_contexts(model)",
    )
