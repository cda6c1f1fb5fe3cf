"""One forward pass of a replay: forces its rows while it runs, and again where checkpointing recomputes a part of it.

Each checkpointed function carries the rows of its own pass, so a recomputation forces them whenever backward runs.
Checkpointing that does not allow this is refused in the forward pass, so that no recomputation routes live in silence.
Knows no sequences. Called by `batch.py`; fixed numerics of a trainer use its `Checkpointing` too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from inspect import currentframe
from typing import TYPE_CHECKING, Any, Protocol

import torch
from fdasync_transformers.model.not_copied import NotCopied
from torch.autograd.function import FunctionCtx

from fdasync.errors import BadInput
from fdasync_trainer.replay.force import RouterHook, RouterSite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync_trainer.replay.rows import Table

#: the library's name of a module's checkpointing function
CHECKPOINTING = "_gradient_checkpointing_func"


class Pass:
    """One forward pass: its rows, kept for as long as checkpointing may recompute a part of it.

    Attributes:
        sites: the model's routers, by layer.
        table: the rows.
        running: whether the forward pass runs; a call after its end is a recomputation.
        covered: above 0 while a function runs whose recomputation will bring these rows.
        seen: layers whose router ran.
    """

    def __init__(self, sites: dict[int, RouterSite], table: Table) -> None:
        self.sites = sites
        self.table = table
        self.running = True
        self.covered = 0
        self.seen: set[int] = set()
        self._places = {layer: place for place, layer in enumerate(sites)}
        self._with_grad = torch.is_grad_enabled()
        # checkpointing of the whole model may have switched gradients off before the pass
        self._within_function = not self._with_grad and within_function()
        self._on: dict[torch.device, torch.Tensor] = {}

    def rows(self, layer: int, device: torch.device) -> torch.Tensor:
        """The rows of a layer, int64 [T, K]; the table is copied once to each device."""
        if device not in self._on:
            self._on[device] = torch.from_numpy(self.table.ids).to(device)
        return self._on[device][self._places[layer]].long()

    def watch(self, site: RouterSite) -> None:
        """Note a call of a router in the forward pass; raise if it would be recomputed without these rows."""
        self.seen.add(site.layer)
        if torch.compiler.is_compiling():
            raise compiled()
        if self.covered:
            return
        # reentrant checkpointing, torch's or another library's, runs its forward without gradients
        reentrant = self._within_function or (self._with_grad and not torch.is_grad_enabled())
        if reentrant or within_hooks():
            raise BadInput(
                "model",
                f"layer {site.layer} is checkpointed, and not by the library: it would be recomputed with live routing",
                hint="use activation_checkpointing_enable(), or context_fn=checkpoint_contexts(model)",
            )


class Forcing(AbstractContextManager[None]):
    """While entered, the routers of `sites` choose the pass's rows. May be entered again meanwhile."""

    def __init__(self, work: Pass, sites: Sequence[RouterSite], *, watch: bool = False) -> None:
        self._work = work
        self._sites = sites
        self._watch = watch
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for site in self._sites:

                def rows(device: torch.device, layer: int = site.layer) -> torch.Tensor:
                    return self._work.rows(layer, device)

                def watch(_router: Any, _args: Any, site: RouterSite = site) -> None:
                    self._work.watch(site)

                hook = RouterHook(site, rows, None)
                if self._watch:
                    stack.callback(site.router.register_forward_pre_hook(watch).remove)
                stack.callback(site.router.register_forward_pre_hook(hook.before).remove)
                stack.callback(site.router.register_forward_hook(hook.after, always_call=True).remove)
                stack.callback(hook.close)
            self._open.append(stack.pop_all())

    def __exit__(self, *_: Any) -> None:
        self._open.pop().close()


class Recomputed(Protocol):
    """A forward pass that may be recomputed in part.

    Attributes:
        running: whether it runs; a call after its end is a recomputation.
        covered: above 0 while a function runs whose recomputation will be as this pass was.
    """

    running: bool
    covered: int


class Recomputing(ABC):
    """An open context of a model whose passes may be recomputed in part."""

    @abstractmethod
    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]] | None:
        """Contexts for a function of the running pass and its recomputation; None: no pass of this context runs."""


class Together(AbstractContextManager[None]):
    """Several contexts, which may be entered again."""

    def __init__(self, parts: Sequence[AbstractContextManager[None]]) -> None:
        self._parts = parts
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part)
            self._open.append(stack.pop_all())

    def __exit__(self, *_: Any) -> None:
        self._open.pop().close()


class Covered(AbstractContextManager[None]):
    """Entered by functions of the forward pass that will be recomputed as it was."""

    def __init__(self, work: Recomputed) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._work.covered += 1

    def __exit__(self, *_: Any) -> None:
        self._work.covered -= 1


class Checkpointing(NotCopied):
    """Replaces a module's checkpointing function during one pass: each checkpointed function carries the pass.

    In the pass it runs within `first`, and its recomputation within `again`; both may be entered again. After the pass,
    a shallow copy of the module made in the pass may still call it; then it calls the module's own.
    """

    def __init__(
        self,
        own: Callable[..., Any],
        work: Recomputed,
        first: AbstractContextManager[None],
        again: AbstractContextManager[None],
    ) -> None:
        self._own = own
        self._work = work
        self._first = first
        self._again = again

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work, first, again = self._work, self._first, self._again
        if not work.running:
            return self._own(function, *args, **kwargs)

        def as_before(*inner: Any, **named: Any) -> Any:
            with first if work.running else again:
                return function(*inner, **named)

        return self._own(as_before, *args, **kwargs)


def within_hooks() -> bool:
    """Whether torch's non-reentrant checkpointing runs; its saved-tensor hooks may lie under others (save_on_cpu)."""
    autograd: Any = torch._C._autograd
    above: list[Any] = []
    found = False
    while not found and (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
        found = getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        if not found:
            above.append(hooks)
            autograd._pop_saved_tensors_default_hooks()
    for hooks in reversed(above):
        autograd._push_saved_tensors_default_hooks(*hooks)
    return found


def within_function() -> bool:
    """Whether an autograd.Function's forward calls this, as reentrant checkpointing of any library does."""
    frame = currentframe()
    while frame is not None:
        code = frame.f_code
        first = code.co_varnames[0] if code.co_name == "forward" and code.co_argcount else ""
        if first and isinstance(frame.f_locals.get(first), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def compiled() -> BadInput:
    """The error about torch.compile."""
    return BadInput("model", "is compiled by torch.compile, which replay does not work under", hint="run it eagerly")
