"""The contract of aux producers: plugins that record one kind of row for every token, on the device, in each step.

A producer is a class under the entry point group `fdasync.aux` (docs/write-a-datum.md). It names modules of the model,
and makes rows of what each of them returns. It writes within the forward pass, so that a CUDA graph contains its
writes, and it waits for nothing. It knows no sequences and no arenas. The producers of a runner are made by
`start/aux_producers.py`, and called together by `aux_data.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from fdasync.cache.aux import AuxSpec
from fdasync.errors import BadInput, RunnerError
from fdasync.gpu.capture import StepRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers


class NotRecorded(RunnerError):
    """A producer raised, or gave no rows, or rows of another shape.

    Attributes:
        name: of the datum.
    """

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, (BadInput, RunnerError)):
            words = error.text if isinstance(error, BadInput) else error.problem
        super().__init__(f"{name!r} cannot be recorded: {words}")


@dataclass(frozen=True)
class AuxSource:
    """The model whose data are recorded.

    Attributes:
        model: on the meta device where only sizes are asked for.
        moe: its MoE layers, by hidden layer; None: it has none, or their routing is not captured.
        routers: its fused routers, which record for the routing.
        debug: the routing is positions, not expert ids.
    """

    model: PreTrainedModel
    moe: MoELayers | None
    routers: FusedRouters | None = None
    debug: bool = False


class Watched(NamedTuple):
    """A module whose calls a producer sees.

    Attributes:
        module: its name in the model (`named_modules`).
        before: the producer gets the positional arguments before the call, not what the call returns.
    """

    module: str
    before: bool = False


class AuxProducer(ABC):
    """Records one kind of row. Made when the model is open; the runner attaches it for as long as it serves.

    A pass is `begin`, the model's forward, `end`, `stage`.

    Args:
        name: of the entry point; rows have it in results.

    Attributes:
        fixed: whether a row's bits depend on its token and those before it alone, given that the model's do. Without
            this promise an engine with fixed numerics refuses the producer.
        by_name: results have the rows only where a request names them.
        spec: name, shape and dtype of a token's row.
    """

    fixed: ClassVar[bool] = False
    by_name: ClassVar[bool] = False

    def __init__(self, name: str, source: AuxSource) -> None:
        self.source = source
        self.spec = AuxSpec(name, *self.row(), by_name=self.by_name)
        self._buffer: StepRows | None = None
        self._hooks: list[RemovableHandle] = []
        # tokens of the running pass, -1 if `begin` got no positions; None between passes
        self._tokens: int | None = None

    @abstractmethod
    def row(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of one token's row: (parts,) or (parts, width), of a dtype of `AuxSpec`.

        Raises BadInput, or anything else, where the model has no such data: the start is refused."""

    @abstractmethod
    def watched(self) -> Sequence[Watched]:
        """The modules, one for each part of a row, in the order of the parts. Each is called once in a pass."""

    @abstractmethod
    def record(self, part: int, seen: Any, /) -> torch.Tensor:
        """A part of the rows of a pass's T tokens, [T], or [T, width] where rows have a width; columns that a part has
        not stay zero. It is rounded to the row's dtype.

        Called in each pass that is computed by Python, and while a CUDA graph is captured, which repeats its operations
        from then on. So it queues operations on the current stream whose shapes follow from the shapes that it is
        given, waits for nothing, and changes nothing that it sees.

        Args:
            seen: what the module returned (mostly a tensor [1, T, ...] or [T, ...], or a tuple of them), or its
                positional arguments.
        """

    def attach(self, max_step_tokens: int) -> None:
        """Hook the modules and allocate the buffer that they fill, for passes of at most so many tokens.

        Raises NotRecorded where there are no such modules, or no such rows. `close` detaches what was attached."""
        self._naming(self._attach, max_step_tokens)

    def _attach(self, max_step_tokens: int) -> None:
        self._buffer = self.make_buffer(max_step_tokens)
        watched = self.watched()
        if len(watched) != self.spec.shape[0]:
            raise RunnerError(f"{len(watched)} modules are watched where rows are {list(self.spec.shape)}")
        for part, (name, before) in enumerate(watched):
            if self.watches(part):
                self._hooks.append(self._hook(self.source.model.get_submodule(name), part, before=before))

    def make_buffer(self, max_step_tokens: int) -> StepRows:
        """Rows of a pass, on the model's device."""
        return StepRows(max_step_tokens, self.spec, self.source.model.device)

    def watches(self, part: int) -> bool:  # noqa: ARG002
        """Whether a part needs a hook. Those that kernels write need none."""
        return True

    @property
    def buffer(self) -> StepRows:
        """While it is attached."""
        assert self._buffer is not None
        return self._buffer

    def begin(self, positions: torch.Tensor | None = None) -> None:
        """Call before a forward pass of tokens at these positions (int64 [T], on the device)."""
        self._tokens = -1 if positions is None else len(positions)
        self.buffer.begin()

    def end(self) -> None:
        """Call after the forward pass. Raises NotRecorded if a part was not written."""
        self._tokens = None
        self._naming(self.buffer.expect)

    def stage(self, count: int) -> torch.Tensor:
        """Copy the rows of the last pass's `count` tokens aside on the device; see `StepRows.stage`."""
        return self.buffer.stage(count)

    def rows(self, count: int) -> NDArray[np.generic]:
        """Rows of the pass's `count` tokens, as the spec's dtype; valid until the next pass.

        Waits for the device. Raises NotRecorded if a part was not written.
        """
        self.end()
        host: NDArray[np.generic] = self.buffer.buffer[:count].cpu().numpy()
        return host.view(self.spec.dtype)

    def check(self, rows: NDArray[np.generic], positions: NDArray[np.int64]) -> None:  # noqa: B027
        """Raise InvariantBroken where these rows cannot be of these positions. Most producers cannot tell."""

    def close(self) -> None:
        """Detach from the model; may be called twice, and attached again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def write(self, part: int, seen: Any) -> None:
        """Write a part of the running pass's rows to the buffer."""
        values = self.record(part, seen)
        if self._tokens not in (-1, len(values)):
            raise RunnerError(f"{len(values)} rows of a pass of {self._tokens} tokens")
        self.buffer.write(values, part)

    def _hook(self, module: torch.nn.Module, part: int, *, before: bool) -> RemovableHandle:
        def called(seen: Any) -> None:
            # a module may be called beside a pass: by the head, over kept states
            if self._tokens is not None:
                self._naming(self.write, part, seen)

        if before:
            return module.register_forward_pre_hook(lambda _, args: called(args))
        return module.register_forward_hook(lambda _, _args, output: called(output))

    def _naming(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call, and name the datum where that fails."""
        try:
            call(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a plugin may raise anything
            raise NotRecorded(self.spec.name, error) from error
