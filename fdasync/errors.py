"""Every error that fdasync raises.

One small tree. Fields, not text, carry the facts; `TransientError` and `PermanentError` tell a caller by type whether
the same call may succeed later. Bad input is also a `ValueError`. This module knows no other module of the package;
every module may import it.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

#: what ends a process, or a notebook's cell: where it comes in an engine's own work, the engine fails by it, and it
#: reaches the program all the same
INTERRUPTS = (KeyboardInterrupt, SystemExit)

#: errors of a plugin's call that waits for nothing: a CancelledError is its own, and cancels no caller
PLUGIN_ERRORS = (Exception, asyncio.CancelledError)


class FdasyncError(Exception):
    """Base of every error of this package. Each keeps its constructor's arguments as attributes of the same names.

    Attributes:
        words: which argument says in words what is wrong; "": none does.
    """

    words: ClassVar[str] = "problem"

    def fields(self) -> dict[str, Any]:
        """The constructor's arguments, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def told_by(self, who: str) -> Self:
        """The same error, whose words begin with who told it; only of errors that have words."""
        fields = self.fields()
        return type(self)(**{**fields, self.words: f"{who}: {fields[self.words]}"})


class TransientError(FdasyncError):
    """The same call may succeed later, or elsewhere."""


class PermanentError(FdasyncError):
    """The same call will fail again until something outside it changes."""


# -- input ----------------------------------------------------------------------------------------


class BadInput(PermanentError, ValueError):
    """A value from the caller cannot be used; nothing was started for it.

    Attributes:
        field: dotted name of the offending field, as the caller wrote it.
        problem: what is wrong with it, in words.
        limit: the bound that was broken, or None where there is none.
        hint: the way out, or "".
        other: another field, with whose name the problem goes on; "": none.
        text: the error in words, without the field.
    """

    def __init__(self, field: str, problem: str, *, limit: Any = None, hint: str = "", other: str = "") -> None:
        self.field = field
        self.problem = problem
        self.limit = limit
        self.hint = hint
        self.other = other
        self.text = f"{problem} {other}" if other else problem
        if limit is not None:
            self.text += f" (limit: {limit})"
        if hint:
            self.text += f"; {hint}"
        super().__init__(f"{field}: {self.text}")


class TooLong(BadInput):
    """A request needs more tokens than the context or the KV blocks of an engine hold; another engine may have more.

    Attributes:
        prompt_tokens: of the request; for a text that was not tokenised, a lower bound.
    """

    def __init__(self, field: str, problem: str, *, limit: Any = None, hint: str = "", prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        super().__init__(field, problem, limit=limit, hint=hint)


class UpdateUnderWay(BadInput):
    """Weights are being updated already, by this caller or another; nothing was started, the version is not used up.

    Attributes:
        where: in words: whose update it is ("of this engine"), or which instance refused ("says d0").
        what: in words: what is under way, where that is no update.
    """

    words = "what"

    def __init__(self, where: str, what: str = "another update is under way") -> None:
        self.where = where
        self.what = what
        super().__init__("update_weights", f"{what} ({where})", hint="wait for its end")

    def told_by(self, who: str) -> Self:
        return type(self)(f"says {who}", self.problem)


class Asleep(BadInput):
    """The memory that the call needs was released by a sleep; nothing was started.

    Attributes:
        call: what was asked for.
        parts: the parts whose memory is not there ("weights", "kv_cache", "cuda_graph").
    """

    words = ""

    def __init__(self, call: str, parts: tuple[str, ...]) -> None:
        self.call = call
        self.parts = parts
        super().__init__(call, f"this engine sleeps, {', '.join(parts)} released", hint="wake the weights first")

    def told_by(self, who: str) -> Self:
        return type(self)(who, self.parts)


class SourceUnsupported(BadInput):
    """Weights were given in a form that this generator does not take, though another may; nothing was started.

    Attributes:
        given: the form, in words.
        supported: the forms that it takes.
    """

    words = ""

    def __init__(self, given: str, supported: str) -> None:
        self.given = given
        self.supported = supported
        super().__init__("source", f"{given} cannot be loaded here", limit=supported)


class RoutingMismatch(BadInput):
    """Recorded rows do not fit the model or the sequence that they are to be replayed on.

    Attributes:
        problem: what does not fit, in words.
        sequence: number of the sequence in the batch.
        request_id: the caller's name for it, or "".
        layer: hidden-layer number; -1: the error concerns no single layer.
        position: absolute; -1: the error concerns no single position.
    """

    def __init__(
        self, problem: str, *, sequence: int, request_id: str = "", layer: int = -1, position: int = -1
    ) -> None:
        self.sequence = sequence
        self.request_id = request_id
        self.layer = layer
        self.position = position
        where = [f"routing[{sequence}]"]
        where += [f"request {request_id!r}"] if request_id else []
        where += [f"layer {layer}"] if layer >= 0 else []
        where += [f"position {position}"] if position >= 0 else []
        super().__init__(", ".join(where), problem)


class ConfigError(BadInput):
    """A configuration value or key is wrong."""


class DuplicateRequestId(BadInput):
    """A live request already has this id.

    Attributes:
        request_id: the id.
    """

    words = ""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(
            "request_id", f"{request_id!r} names a request that is still live", hint="wait for it, or use another id"
        )


class CheckpointError(PermanentError):
    """A checkpoint folder cannot be loaded.

    Attributes:
        path: the file or folder.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class TokenizerFailed(PermanentError):
    """A tokenizer raised, or returned something else than token ids; nothing was started for the text.

    Attributes:
        tokenizer: its name in `fdasync.tokenizers`, or the class of a tokenizer that was given as an object.
        problem: the error that it raised, or the value that it returned.
    """

    def __init__(self, tokenizer: str, problem: str) -> None:
        self.tokenizer = tokenizer
        self.problem = problem
        super().__init__(f"tokenizer {tokenizer}: {problem}")


class ChatUnsupported(BadInput):
    """A tokenizer makes no tokens of chat messages: its plugin cannot, or its checkpoint has no chat template.

    Attributes:
        tokenizer: its class.
    """

    def __init__(self, tokenizer: str, problem: str) -> None:
        self.tokenizer = tokenizer
        super().__init__("messages", f"tokenizer {tokenizer} {problem}", hint="give text or token ids")


class UnsupportedModel(PermanentError):
    """The model loads but cannot be served correctly.

    Attributes:
        model: model type or folder.
        reason: why not.
    """

    words = "reason"

    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        self.reason = reason
        super().__init__(f"{model}: {reason}")


class PluginError(PermanentError):
    """A plugin that was asked for by name is missing or broken.

    Attributes:
        group: entry-point group, e.g. `fdasync.runners`.
        name: entry-point name.
        distribution: the distribution that declares it; "": none does.
        problem: what is wrong.
    """

    def __init__(self, group: str, name: str, distribution: str, problem: str) -> None:
        self.group = group
        self.name = name
        self.distribution = distribution
        self.problem = problem
        origin = f" (from {distribution})" if distribution else ""
        super().__init__(f"plugin {name!r} of {group}{origin}: {problem}")


# -- the life of an engine ----------------------------------------------------------------------


class EngineClosed(PermanentError):
    """The engine was not started, is draining, or has been closed.

    Attributes:
        state: the engine's state at the call.
    """

    words = ""

    def __init__(self, state: str) -> None:
        self.state = state
        super().__init__(f"the engine is {state} and takes no new requests")


class WrongLoop(PermanentError):
    """A call came from another event loop, or another thread, than its object was started on. Nothing was done.

    Attributes:
        what: the object: "engine", "instance" or "router".
    """

    words = "what"

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"the {what} was started on another event loop: it is used and closed on that one")


class TaskCancelled(PermanentError):
    """A task that an engine runs on was cancelled from outside, together with all tasks of the loop, for example.

    Attributes:
        task: its name.
    """

    words = ""

    def __init__(self, task: str) -> None:
        self.task = task
        super().__init__(f"task {task!r}, which is the engine's own, was cancelled from outside")


class EngineBusy(TransientError):
    """The engine has no place for a request of another instance now.

    Attributes:
        live: samples inside.
        limit: most samples inside (`max_requests`).
    """

    words = ""

    def __init__(self, live: int, limit: int) -> None:
        self.live = live
        self.limit = limit
        super().__init__(f"{live} samples are inside (limit: {limit})")


class EngineFailed(PermanentError):
    """The engine hit an error that it cannot go on from; every pending and later call raises this.

    Attributes:
        cause: the error that stopped the engine.
        partial: the `Result` so far of the request that was waiting; None: there is none.
    """

    words = ""

    def __init__(self, cause: BaseException, partial: Any = None) -> None:
        self.cause = cause
        self.partial = partial
        super().__init__(f"the engine failed: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class DecodeFailed(PermanentError):
    """The tokenizer could not make text of a request's tokens; the request was ended, others go on.

    Attributes:
        cause: the tokenizer's error.
        partial: the `Result` so far; its text ends before the tokens that could not be decoded.
    """

    words = ""

    def __init__(self, cause: BaseException, partial: Any = None) -> None:
        self.cause = cause
        self.partial = partial
        super().__init__(f"the tokenizer could not decode: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class GrammarFailed(PermanentError):
    """A request's grammar could not be kept any further; the request was ended, others go on.

    Attributes:
        problem: the limit that it met, in the words of the grammar's library.
        partial: the `Result` so far.
    """

    def __init__(self, problem: str, partial: Any = None) -> None:
        self.problem = problem
        self.partial = partial
        super().__init__(f"the grammar could not be kept: {problem}")


class ProcessorFailed(PermanentError):
    """A logits processor failed in a request that asked for it; the request was ended, others go on.

    Attributes:
        problem: the processor's name, and what went wrong.
        partial: the `Result` so far.
    """

    def __init__(self, problem: str, partial: Any = None) -> None:
        self.problem = problem
        self.partial = partial
        super().__init__(f"the logits could not be processed: {problem}")


class InvariantBroken(PermanentError):
    """A rule that fdasync itself must keep did not hold: a defect here or in a plugin.

    Attributes:
        what: the rule and how it was broken.
        story: the latest events that led there, oldest first.
    """

    words = "what"

    def __init__(self, what: str, story: Sequence[str] = ()) -> None:
        self.what = what
        self.story = tuple(story)
        super().__init__("\n  ".join([what, *self.story]))


class DeadlineExceeded(TransientError, TimeoutError):
    """A wait ended at its deadline.

    Attributes:
        what: the work that did not end.
        deadline_s: how long the wait was, in seconds.
    """

    words = "what"

    def __init__(self, what: str, deadline_s: float) -> None:
        self.what = what
        self.deadline_s = deadline_s
        super().__init__(f"{what} did not end within {deadline_s:g} s")


# -- runners and their processes ----------------------------------------------------------------


class RunnerError(PermanentError):
    """A runner failed in a step or at start-up.

    Attributes:
        step_id: the step, or -1 outside one.
        problem: the runner's own words.
    """

    def __init__(self, problem: str, step_id: int = -1) -> None:
        self.problem = problem
        self.step_id = step_id
        super().__init__(problem if step_id < 0 else f"step {step_id}: {problem}")


class DeviceFailed(PermanentError):
    """The device reported an error: its work in flight is lost, and nothing more can be run there.

    Attributes:
        problem: the device's own words.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"the device failed: {problem}")


class BuffersOut(TransientError):
    """A pool of buffers is at its limit, and those in use have not come back yet.

    Attributes:
        pool: its name.
        wanted_nbytes: the size that was requested, rounded up as the pool does.
        limit_nbytes: most bytes of the pool.
        out: bytes in use, by name of their holds.
    """

    words = ""

    def __init__(self, pool: str, wanted_nbytes: int, limit_nbytes: int, out: dict[str, int]) -> None:
        self.pool = pool
        self.wanted_nbytes = wanted_nbytes
        self.limit_nbytes = limit_nbytes
        self.out = out
        held = ", ".join(f"{name} {nbytes}" for name, nbytes in out.items()) or "nothing"
        super().__init__(f"{pool}: no room for {wanted_nbytes} bytes (limit: {limit_nbytes}; in use: {held})")


class WorkerDied(TransientError):
    """A child process ended that should have gone on.

    Attributes:
        name: the purpose of the process.
        pid: its process id.
        exit_status: its return code; negative: the signal that ended it; None: not known.
    """

    words = ""

    def __init__(self, name: str, pid: int, exit_status: int | None) -> None:
        self.name = name
        self.pid = pid
        self.exit_status = exit_status
        how = "with an unknown status"
        if exit_status is not None:
            how = f"by signal {-exit_status}" if exit_status < 0 else f"with status {exit_status}"
        super().__init__(f"the {name} process {pid} ended {how}")


class WorkerStuck(TransientError):
    """A child process did not finish its work by the deadline, and was killed.

    Attributes:
        name: the purpose of the process.
        pid: its process id.
        what: the work.
        deadline_s: the deadline, in seconds.
    """

    words = "what"

    def __init__(self, name: str, pid: int, what: str, deadline_s: float) -> None:
        self.name = name
        self.pid = pid
        self.what = what
        self.deadline_s = deadline_s
        super().__init__(f"the {name} process {pid} did not finish {what} within {deadline_s:g} s")


class ProtocolError(PermanentError):
    """A message broke the protocol: too large, of an unknown type, or out of order.

    Attributes:
        problem: what was wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


# -- stores and weights -------------------------------------------------------------------------


class StoreUnavailable(TransientError):
    """A store cannot perform a call now.

    Attributes:
        store: its name.
        problem: in words.
    """

    def __init__(self, store: str, problem: str) -> None:
        self.store = store
        self.problem = problem
        super().__init__(f"store {store}: {problem}")


class StoreTimeout(StoreUnavailable, TimeoutError):
    """A call to a store did not end by its deadline; the call goes on.

    Attributes:
        deadline_s: how long the caller waited, in seconds.
        ended: done, with the call's result or error, when the call has really ended: only then are its buffers free.
    """

    words = "what"

    def __init__(self, store: str, what: str, deadline_s: float, ended: asyncio.Future[Any]) -> None:
        self.deadline_s = deadline_s
        self.ended = ended
        super().__init__(store, f"{what} did not end within {deadline_s:g} s")


class StoreBusy(StoreUnavailable):
    """A call waited in line until its deadline and never began, which does not say whether the store works."""


class StoreRejected(PermanentError):
    """A call, a configuration or a place that a store can never take.

    Attributes:
        store: its name.
        problem: in words.
        hint: the way out, or "".
    """

    def __init__(self, store: str, problem: str, hint: str = "") -> None:
        self.store = store
        self.problem = problem
        self.hint = hint
        super().__init__(f"store {store}: {problem}" + (f"; {hint}" if hint else ""))


class WakeFailed(TransientError):
    """Memory that a sleep released could not be had back, as where another process still has it. The engine goes on
    sleeping, without this part; a later wake tries again.

    Attributes:
        part: "weights", "kv_cache" or "cuda_graph".
        problem: what failed.
    """

    def __init__(self, part: str, problem: str) -> None:
        self.part = part
        self.problem = problem
        super().__init__(f"the engine still sleeps, {part} could not be woken: {problem}")


class WeightsRejected(PermanentError):
    """New weights do not fit the model; nothing was changed, and the old ones are in use.

    Attributes:
        problem: which tensor or file, and what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"the weights were not taken: {problem}")


class WeightsBroken(PermanentError):
    """Loading new weights failed half-way: the engine stays paused and takes only `update_weights` or `aclose`.

    Attributes:
        problem: what failed.
    """

    #: what happened, before the problem
    _told = "loading new weights failed half-way, load them again"

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"{self._told}: {problem}")


class WeightsDiffer(WeightsBroken):
    """The weights that an update brought are not the weights that its caller expected. They are in place, and no step
    uses them: the engine stays paused and takes only `update_weights` or `aclose`.

    Attributes:
        expected: fingerprint of the caller's weights, hex XXH3-128.
        held: fingerprint of the weights in place.
        tensor: name of the first tensor, by name, that differs or that one side lacks; "" where the caller gave no
            digests of tensors, or where another instance holds the weights.
        where: name of the instance that holds them; "": the engine that was asked.
    """

    _told = "the new weights are not those that were expected, load them again"

    words = ""

    def __init__(self, expected: str, held: str, tensor: str = "", where: str = "") -> None:
        self.expected = expected
        self.held = held
        self.tensor = tensor
        self.where = where
        first = f", and the first tensor that differs is {tensor}" if tensor else ""
        problem = f"their fingerprint is {held}, the expected one is {expected}{first}"
        super().__init__(f"{where}: {problem}" if where else problem)

    def told_by(self, who: str) -> Self:
        return type(self)(self.expected, self.held, self.tensor, who)


# -- instances and links ------------------------------------------------------------------------


class PeerUnreachable(TransientError):
    """Another instance does not answer, or went away; a new link may come about.

    Attributes:
        peer: its address, or its name.
        problem: what happened.
    """

    def __init__(self, peer: str, problem: str) -> None:
        self.peer = peer
        self.problem = problem
        super().__init__(f"{peer}: {problem}")


class PeerRefused(PermanentError):
    """Two instances do not fit together: one of them refused the other's handshake.

    Attributes:
        peer: address or name of the other side.
        field: what does not fit, e.g. "protocol", "shape.block_tokens".
        problem: in words, with both values.
    """

    def __init__(self, peer: str, field: str, problem: str) -> None:
        self.peer = peer
        self.field = field
        self.problem = problem
        super().__init__(f"{peer}: {field}: {problem}")


class PeerBusy(TransientError):
    """A link's window is full: the other side does not keep up. Nothing was sent.

    Attributes:
        peer: address or name of the other side.
        unacked_nbytes: bytes that are sent or queued, and not acknowledged.
    """

    words = ""

    def __init__(self, peer: str, unacked_nbytes: int) -> None:
        self.peer = peer
        self.unacked_nbytes = unacked_nbytes
        super().__init__(f"{peer}: {unacked_nbytes} bytes are on their way and not acknowledged")


class InstanceLost(TransientError):
    """The instance that served a request is gone, or did not end it in time, and no other one could serve it; trying
    again may help.

    Attributes:
        request_id: the caller's name for the request.
        problem: what happened.
        partial: the `Result` so far, with the rows that had arrived; None: there is none.
    """

    def __init__(self, request_id: str, problem: str, partial: Any = None) -> None:
        self.request_id = request_id
        self.problem = problem
        self.partial = partial
        super().__init__(f"request {request_id}: {problem}")


class RemoteError(PermanentError):
    """Another instance answered with an error that has no other form here.

    Attributes:
        peer: its name.
        error: name of the error's class there.
        problem: in words.
    """

    def __init__(self, peer: str, error: str, problem: str) -> None:
        self.peer = peer
        self.error = error
        self.problem = problem
        super().__init__(f"{peer}: {error}: {problem}")
