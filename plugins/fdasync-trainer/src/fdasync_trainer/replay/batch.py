"""Replay of rollouts in a trainer: a plain transformers model runs forward and backward with the recorded experts.

The rows of a micro-batch are checked, laid out once per forward pass, and forced through `force.RouterHook`, with no
code of any family; a token without a row is routed live. `forward_pass.py` forces the rows of one pass, also when
checkpointing recomputes a part of it later. Knows no engines. Called by training code; torch.compile is refused.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.model.not_copied import NotCopied
from fdasync_transformers.model.probe import ProbeLog

from fdasync.errors import BadInput, UnsupportedModel
from fdasync_trainer.replay.force import RouterSite, find_routers
from fdasync_trainer.replay.forward_pass import (
    CHECKPOINTING,
    Checkpointing,
    Covered,
    Forcing,
    Pass,
    Recomputing,
    Together,
    compiled,
)
from fdasync_trainer.replay.layout import Layout, derived
from fdasync_trainer.replay.packing import refuse_mixing
from fdasync_trainer.replay.rows import Table, checked_rows, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fdasync.result import Routing


@contextmanager
def replay_routing(
    model: torch.nn.Module,
    routing: Sequence[Routing | None],
    *,
    layout: Layout | None = None,
    request_ids: Sequence[str] = (),
    partial: bool = False,
) -> Iterator[Replay]:
    """Within the context, forward passes of `model` choose the experts that a rollout chose.

    Gate weights are computed from the live router logits at the recorded ids, and gradients reach the routers as in any
    pass. Tokens without a row are routed live: padding, positions before `start`, the last sampled token, sequences
    with None. Backward may run within or after the context, and any number of contexts may be opened before the first
    backward; of nested ones the innermost acts. Under the library's gradient checkpointing (reentrant or not) each
    recomputation forces the rows of its own pass; for other checkpointing see `checkpoint_contexts`. Every pass within
    must be of `model` itself and of the same sequences, whole, without a filled KV cache.

    Args:
        model: a transformers causal LM, or its base model; not a wrapper around one (of `DDP(model)`, give `model`).
            Hooks are put on it and its routers, and removed at the end; a deep copy would keep them for ever, so
            within the context `copy.deepcopy` and pickling of it raise BadInput.
        routing: one record per sequence of the batch, in order, or None. Must not change while the context is open.
        layout: where the sequences lie; None reads it off the arguments of each pass (`layout.derived`).
        request_ids: names of the sequences, for errors.
        partial: take rows that end early, and route the rest of their sequence live: of an aborted request, of later
            parts of a conversation without rows. Otherwise rows must reach the last token or the one before it, as the
            rows of a whole rollout do, so that a cut record, or one of another request, does not pass in silence.

    Yields:
        Counts of the last pass: see `Replay`.

    Raises:
        RoutingMismatch: rows that do not fit the model (at once) or the length of their sequence (in the pass). Names
            sequence, layer and position.
        BadInput: arguments that do not determine the sequences, or another number of sequences than of records; a
            filled cache; a pass of a part of the model; checkpointing that would recompute with live routing; a
            compiled model.
        UnsupportedModel: llama4 (its experts take no ids); phimoe (gradients through its forced rows are of no use); a
            model without experts; a fused router; noise on router inputs in training mode; packed sequences that would
            attend to each other (`packing.py`); routers that the model does not call, or whose selection is not seen
            exactly once.
    """
    replay = Replay(model, routing, layout, request_ids, partial)
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(replay._begin, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(replay._end, always_call=True).remove)
        for site in replay._sites.values():
            stack.callback(site.router.register_forward_pre_hook(replay._guard).remove)
        stack.callback(replay._undo_pass)
        yield replay


def checkpoint_contexts(model: torch.nn.Module) -> Callable[[], tuple[Any, Any]]:
    """A `context_fn` for checkpointing that the library does not do itself.

    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts(model))`, or the same
    argument of torch's `checkpoint_wrapper`. It gives the recomputation the rows of the pass that runs when it is
    called, and its fixed numerics; it does nothing outside `replay_routing` and `fixed_numerics` of the same model, so
    it may be set once for good.
    """

    def contexts() -> tuple[Any, Any]:
        owners = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        owners.append(vars(model).get("forward"))
        pairs = [owner.contexts() for owner in owners if isinstance(owner, Recomputing)]
        first, again = zip(*filter(None, pairs), strict=True) if any(pairs) else ((), ())
        return Together(first), Together(again)

    return contexts


class Replay(NotCopied, Recomputing):
    """An open `replay_routing`, which makes it.

    Attributes:
        replayed_tokens: tokens of the last pass with a row; 0 before the first pass has ended.
        live_tokens: its real tokens without a row.
        padding_tokens: its other tokens.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        routing: Sequence[Routing | None],
        layout: Layout | None,
        request_ids: Sequence[str],
        partial: bool,
    ) -> None:
        self.replayed_tokens = self.live_tokens = self.padding_tokens = 0
        if not isinstance(routing, list | tuple):
            raise BadInput("routing", f"is a {type(routing).__name__}", limit="a list, one entry per sequence")
        if layout is not None and not isinstance(layout, Layout):
            raise BadInput("layout", f"is a {type(layout).__name__}", limit="Padded, Packed or None")
        self._model = model
        self._kind, self._sites = _replayable(model)
        self._top_k = [int(site.top_k or 0) for site in self._sites.values()]
        self._request_ids = request_ids
        self._rows = checked_rows(routing, self._sites, self._top_k, request_ids)
        self._layout = layout
        self._partial = partial
        self._parameters = list(signature(model.forward).parameters)
        # modules that may be checkpointed, each with the routers that its recomputation runs
        self._checkpointable = [
            (module, self._inside(module)) for module in model.modules() if hasattr(module, "gradient_checkpointing")
        ]
        routers = {id(site.router): site for site in self._sites.values()}
        self._beside = [
            (routers[id(part)].layer, part, block)
            for block in model.modules()
            for part in block.children()
            if id(part) in routers
        ]
        self._pass: Pass | None = None
        self._undo = ExitStack()
        self._probed = False

    def contexts(self) -> tuple[Covered, Forcing] | None:
        """See `Recomputing`."""
        work = self._pass
        return None if work is None else (Covered(work), Forcing(work, list(work.sites.values())))

    def _begin(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get("fd_ctx"), ProbeLog):
            self._probed = True  # `fixed_numerics` looks at the model: no pass of a batch
            return
        if next(_open_replays(self._model)) is not self:
            return
        if torch.compiler.is_compiling():
            raise compiled()
        for layer, *modules in self._beside:
            for module in modules:
                _refuse_noise(self._kind, layer, module)
        self._undo_pass()  # of a pass that was interrupted
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        work = Pass(self._sites, self._table(arguments))
        with ExitStack() as stack:
            stack.enter_context(Forcing(work, list(self._sites.values()), watch=True))
            for module, sites in self._checkpointable:
                own = vars(module).get(CHECKPOINTING)
                if own is not None:
                    setattr(module, CHECKPOINTING, Checkpointing(own, work, Covered(work), Forcing(work, sites)))
                    stack.callback(setattr, module, CHECKPOINTING, own)
            self._undo = stack.pop_all()
        self._pass = work

    def _end(self, _model: Any, _args: tuple[Any, ...], output: Any) -> None:
        # there is no pass if another replay acted, or `_begin` raised: this hook is always called
        work, self._probed = self._pass, False
        self._undo_pass()
        if work is None or output is None:  # None: the model raised
            return
        silent = [layer for layer in self._sites if layer not in work.seen]
        if silent:
            raise UnsupportedModel(self._kind, f"the routers of layers {silent} were not called in the forward pass")
        table = work.table
        self.replayed_tokens, self.live_tokens, self.padding_tokens = table.replayed, table.live, table.padding

    def _undo_pass(self) -> None:
        # also called when the context ends and when the next pass begins: an interrupt skips all hooks
        if self._pass is not None:
            self._undo.close()
            self._pass.running = False
            self._pass = None

    def _inside(self, module: torch.nn.Module) -> list[RouterSite]:
        parts = {id(part) for part in module.modules()}
        return [site for site in self._sites.values() if id(site.router) in parts]

    def _guard(self, _router: Any, _args: Any) -> None:
        # a call in backward is a recomputation, of a pass with rows, which brings them, or of a plain pass
        if torch._C._current_graph_task_id() != -1 or self._probed:
            return
        if not any(replay._pass is not None for replay in _open_replays(self._model)):
            raise BadInput(
                "model",
                "a part of it was called within replay_routing, and would be routed live",
                hint="call the model that replay_routing was given",
            )

    def _table(self, arguments: dict[str, Any]) -> Table:
        given = arguments.get("input_ids")
        if given is None:
            given = arguments.get("inputs_embeds")
        if given is None or given.ndim < 2:
            raise BadInput("model", "was called without input_ids [B, T] or inputs_embeds [B, T, H]")
        cache: Any = arguments.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise BadInput("past_key_values", "holds earlier tokens", hint="replay takes whole sequences")
        batch, width = int(given.shape[0]), int(given.shape[1])
        spans = derived(arguments, batch, width) if self._layout is None else self._layout.spans(batch, width)
        if batch == 1 and len(spans.lengths) > 1:
            refuse_mixing(self._kind, self._model, arguments, spans)
        num_experts = max(site.num_experts for site in self._sites.values())
        sizes = len(self._sites), max(self._top_k), num_experts
        return table_of(self._rows, spans, *sizes, self._request_ids, partial=self._partial)


def _open_replays(model: torch.nn.Module) -> Iterator[Replay]:
    """Replays that are open on a model, the innermost first, found by their hooks."""
    for hook in reversed(model._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Replay):
            yield owner


def _replayable(model: torch.nn.Module) -> tuple[str, dict[int, RouterSite]]:
    """Name and routers of a model that can be replayed; raises as `replay_routing` says."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if any(getattr(part, "_compiled_call_impl", None) or "_orig_mod" in part._modules for part in model.modules()):
        raise compiled()
    if not isinstance(kind, str):
        raise BadInput("model", f"{type(model).__name__} is no transformers model", hint="give the one it wraps")
    sites = find_routers(model)
    if not sites:
        raise UnsupportedModel(kind, "it has no experts")
    for layer, site in sites.items():
        name = f"layer {layer}: {type(site.router).__name__}"
        if site.dense:
            raise UnsupportedModel(kind, "its experts take no ids, so its routing cannot be forced")
        if site.by_max:
            raise UnsupportedModel(
                kind, "it samples its experts in training, and gradients through forced ones are of no use"
            )
        forward = vars(site.router).get("forward")
        if getattr(forward, "__module__", "") == "fdasync_transformers.fused.routers":
            raise UnsupportedModel(kind, f"{name} is fused and has no gradient; give the trainer a model of its own")
        if site.top_k is None:
            raise UnsupportedModel(kind, f"{name} does not tell how many experts it chooses")
    return kind, sites


def _refuse_noise(kind: str, layer: int, module: torch.nn.Module) -> None:
    """Refuse noise on a router's inputs in training: gate weights would come from other logits than the rollout's."""
    if not module.training:
        return
    for name, value in vars(module).items():
        if "jitter" in name and isinstance(value, int | float) and value:
            raise UnsupportedModel(kind, f"layer {layer}: {name} is {value} in training; set it to 0")
