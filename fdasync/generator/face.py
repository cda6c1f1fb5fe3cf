"""`Generator`: the methods that an engine and a router have in common, and what each promises. It does one of them,
`complete_all`, by another.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from fdasync.generator.batch import complete_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Literal, Self, Unpack

    from fdasync.generator.load import Load
    from fdasync.generator.streams import DeltaStream, Generation
    from fdasync.request import (
        Doing,
        GenerateOptions,
        MemoryPart,
        PauseMode,
        Prompt,
        SamplingParams,
        SleepMode,
        WakeTag,
        WeightsFingerprint,
        WeightsGroup,
        WeightSource,
    )
    from fdasync.result import Result
    from fdasync.runner.facts import ModelFacts
    from fdasync.telemetry.sight.sight import Watched


class Generator(Protocol):
    """`async with` starts and closes it; `start` and `aclose` do the same from different tasks."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.aclose()

    @abstractmethod
    async def start(self) -> None:
        """Return when requests can be made. A start that raises leaves nothing behind."""

    @abstractmethod
    async def aclose(self) -> None:
        """Abort live requests and free everything; idempotent. Their callers get the results so far, with finish_reason
        "abort"."""

    @abstractmethod
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation[DeltaStream]:
        """A request's deltas: `async for delta in it.generate(...): ...`, or with its result and an end that is waited
        for: `async with it.generate(...) as stream: async for delta in stream: ...`.

        Args:
            prompt: text, or token ids (a sequence of ints, or an array with `tolist`); copied, never changed.
            params: how to sample; default SamplingParams().
            options: see `GenerateOptions`.

        Calling, entering or iterating it raises BadInput, DuplicateRequestId, EngineClosed. Leaving early aborts the
        request.
        """

    @abstractmethod
    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Result:
        """The whole result, without deltas; arguments and errors as in `generate`. Cancelling it aborts the request."""

    async def complete_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        at_once: int | None = None,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]:
        """The results of many prompts, in their order.

        Args:
            prompts: as `generate` takes them.
            params: of all, or one for each prompt.
            at_once: most requests that are submitted and have not ended; None: twice as many as have a place
                (`facts().max_requests`, of every instance).
            progress: keep a line on stderr of what is done, and how fast, where that is a terminal.
            options: of each request. A `request_id` is a prefix: the first is named "ID/0".

        The first error is raised, and ends the other requests; so does cancelling it. Raises as `complete` does, and
        BadInput for other arguments.
        """
        facts = self.facts()
        places = 2 * facts.max_requests * max(facts.num_instances, 1) if at_once is None else at_once
        return await complete_all(self.complete, prompts, params, options, at_once=places, progress=progress)

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """End a live request now; it returns normally, with its result so far and finish_reason "abort".

        True if a request of that name is live; aborting twice, an ended request or an unknown name does no harm.
        Raises BadInput for a `request_id` that is no string.
        """

    @abstractmethod
    def abort_all(self, prefix: str = "") -> int:
        """End every live request whose `request_id` starts with `prefix` ("": every one), as `abort` does: also
        requests that wait for a place or are being prepared, and have no tokens yet. Later requests are not affected.

        Returns the number of live requests that match. Calling it again does no harm; a request counts until it has
        ended, which takes a turn of the loop on an engine, and an answer of its instance on a router. Raises BadInput
        for a `prefix` that is no string.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Plan no more steps; returns when none is in flight. New requests wait until `resume`. Deadlines and aborts go
        on. Idempotent; a further pause applies its mode to what is inside by then.

        Args:
            mode: what happens to the requests that are inside. All keep their tokens and rows.
                "in_place": they stay where they are, and go on after it with the KV that they have.
                "retract": running ones give their KV up as in a preemption, and go back to the queue. Their cached
                blocks still match, unless the weights change or `reset_cache` is called; what no longer matches is
                computed again.
                "abort": all end at once with what they have, and finish_reason "abort".
                "wait": requests that have begun run to their end first; requests that have not wait. Where a pause is
                there already nothing runs, so this pause changes nothing.

        Raises BadInput for another mode.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Go on after a pause of any mode; a pause that still waits ends, too, and is undone. Idempotent."""

    @abstractmethod
    async def sleep(
        self, level: Literal[0, 1, 2] = 1, mode: SleepMode = "keep", *, tags: Sequence[MemoryPart] | None = None
    ) -> None:
        """Give the device's memory to others until `wake`; returns when it is free. New requests wait, deadlines and
        aborts go on.

        Args:
            level: 0: nothing is released, as in a pause that `wake` ends. 1: blocks and graphs go, weights move to host
                memory. 2: weights are dropped: an update, or the folder that they came from, brings them back.
            mode: what happens to the requests that are inside. "keep": they give their blocks up, as in a preemption,
                and go on after a wake; "abort": all end at once with what they have; "wait": requests that have begun
                run to their end first.
            tags: the parts to release, where it is not all of them.

        Cached blocks of the device are forgotten with "kv_cache"; blocks of host and store stay. Idempotent; a further
        call releases what is still there, and a deeper sleep drops weights that an earlier one kept. A pause from
        before, or one that begins meanwhile, goes on until `resume`, which does not end a sleep.

        Raises BadInput for other arguments, and while an update is under way UpdateUnderWay.
        """

    @abstractmethod
    async def wake(self, tags: Sequence[WakeTag] | None = None) -> Doing:
        """Take memory back after a sleep, and go on as soon as all of it is there. Idempotent; does nothing where there
        was no sleep.

        Args:
            tags: the parts to take back; None or an empty one: all. Graphs ("cuda_graph") come back with the last part
                of the others, named or not: they hold its addresses. "scheduling" names none: without memory to take
                back it ends a sleep of level 0, as any wake does. Weights may be updated once "weights" is there.

        Dropped weights that no update has brought by then are loaded once more from their folder; where they came as
        tensors, the generator waits for an update, and requests with it.

        Returns what it does now: "asleep" where parts are still released, "waits_for_weights", "paused" where a pause
        is left. On a router: what the instance farthest from "running" does.

        Raises WakeFailed where the device does not give the memory (it sleeps on, and may be woken again); BadInput for
        other tags; UpdateUnderWay while an update is under way.
        """

    @abstractmethod
    async def reset_cache(self) -> None:
        """Forget every cached block on device and host; returns when none of them matches any more.

        Requests go on undisturbed, paused or not. Running ones keep the blocks that they use. No other request matches
        these, and they are freed with their last user. A store keeps its blocks, which are valid for these weights:
        later requests may fetch them again. (Under a new `cache_salt`, or new weights, they match nothing.)
        """

    @abstractmethod
    async def update_weights(
        self,
        version: str | int | None,
        source: WeightSource,
        mode: Literal["abort", "keep"] = "abort",
        *,
        expected: str | WeightsFingerprint | None = None,
    ) -> None:
        """Load new weights, forget every cached block, go on (unless it was paused before).

        Args:
            version: the caller's label, text of 1 to 256 characters; an integer from 0 on is its digits. Results name
                the version and the weights id of each span of their tokens. The first one is the configuration's
                weight_version. None: the version in use with its last run of digits counted one up ("0" to "1",
                "step-9" to "step-10"; "-1" is appended where there are no digits).
            source: a checkpoint folder (every generator takes one), (name, dtype, shape, buffer) tuples, which a router
                refuses with SourceUnsupported, or `GroupTensors`, which the trainer broadcasts meanwhile. While an
                update in parts is open (`begin_weight_update`), these are its next part, and nothing else is taken.
            mode: "abort": requests that ran end with their results so far, and finish_reason "abort"; requests that
                waited run under the new weights. "keep": all go on; requests with KV on the device use it to their end,
                the others start again from their tokens under the new weights.
            expected: the fingerprint of the caller's weights (`fdasync_transformers.weights_fingerprint`), or its 32
                hex digits alone. Once the weights are in place they are hashed and compared. With the digests of
                tensors the error names the first tensor that differs (a router compares the hex digits alone). None:
                nothing is compared.

        A version is the caller's word, and may return with other weights, as from a trainer that starts again; it is
        the weights id that tells weights apart. Tensors are always carried out. A folder that comes under the version
        in use is compared first: if it holds the weights in use nothing is loaded, and no request ends or starts again
        (where others are expected, BadInput says so). While the caller's own pause lasts no step runs, so a group's
        tensors may come in several updates under one version: a version of None then means the last update's.

        Raises BadInput; UpdateUnderWay; WeightsRejected if the weights do not fit (nothing has changed);
        WeightsBroken if loading failed half-way; WeightsDiffer if the weights in place are not the expected ones (no
        step uses them); EngineClosed. Cancelling stops the waiting: the update goes on to
        its end.
        """

    @abstractmethod
    async def join_weights_group(self, group: WeightsGroup) -> None:
        """Become ranks of a trainer's process group, from which `update_weights` takes `GroupTensors`.

        Returns once all ranks have met, the trainer's among them (NCCL's ranks meet at their first broadcast). Steps
        run until a store answers at the group's address, and no more until the ranks have met. The call may be
        repeated; another group of the same name is left first. A group over which an update failed has been left. gloo
        and NCCL authenticate nobody: workers listen on the loopback interface, or on the interface that the
        configuration names (`EngineConfig.weights_interface`).

        Raises BadInput naming the field, also for another machine's address without that setting; WeightsRejected where
        the ranks do not meet within `group.timeout_s`, or the group is left meanwhile; UpdateUnderWay; EngineClosed.
        Cancelling ends the join, in a moment.
        """

    @abstractmethod
    async def leave_weights_group(self, name: str) -> None:
        """Leave a group; its other ranks see the connection end. A join of it that is under way ends. Does nothing
        where there is none of that name. No step runs meanwhile. Cancelling stops the waiting.

        Raises UpdateUnderWay while an update is under way, or an update in parts is open; EngineClosed.
        """

    @abstractmethod
    async def begin_weight_update(self, mode: Literal["abort", "keep"] = "keep") -> None:
        """Begin an update in parts: no step runs until it ends. Its parts are calls of `update_weights` with
        `GroupTensors`; a version that they name is the update's.

        Args:
            mode: as in `update_weights`.

        If a part is refused and none came before it, the update ends with nothing changed. If a part fails, or is
        refused after others, or nobody goes on with the update in time, the weights are broken (WeightsBroken) until
        another update has replaced what this one did.

        Raises BadInput; UpdateUnderWay while another update is open; EngineClosed.
        """

    @abstractmethod
    async def end_weight_update(
        self, version: str | int | None = None, *, expected: str | WeightsFingerprint | None = None
    ) -> None:
        """End an update in parts: all of them came, and steps run on the new weights. Without parts nothing changes.

        Args:
            version, expected: as in `update_weights`. None: the version of the last part that named one.

        Raises BadInput where no update is open; WeightsBroken; WeightsDiffer; EngineClosed.
        """

    @abstractmethod
    async def abandon_weight_update(self) -> None:
        """End an update in parts that is not whole: the weights are broken where a part of it came. Does nothing where
        none is open. Raises UpdateUnderWay while tensors are being received; EngineClosed."""

    @abstractmethod
    async def set_weight_version(self, version: str | int) -> None:
        """Give the weights in use another label, without loading anything: tokens that are sampled from now on carry
        it, and cached blocks stay usable.

        Args:
            version: as in `update_weights`. The label in use changes nothing. Nor does the label that the parts of an
                open update named: its weights get it once the update has ended.

        Raises BadInput; UpdateUnderWay; WeightsBroken; EngineClosed.
        """

    @abstractmethod
    async def weights_fingerprint(self) -> str:
        """Hash the weights that are in place, and return their fingerprint: 32 hex digits, as `update_weights` takes
        them for `expected`. No step runs meanwhile; requests go on after it. Cancelling stops the waiting only.

        Raises UpdateUnderWay; Asleep while the weights are released or dropped; WeightsBroken; ConfigError where the
        runner cannot tell it; on a router WeightsDiffer where instances that get requests have different weights;
        EngineClosed.
        """

    @abstractmethod
    async def profile(self, seconds: float) -> dict[str, str]:
        """Record for so long what the processes of the model do. Requests go on, more slowly, and stop for some
        seconds while the files are written.

        Returns the folder of the files for each engine, by its name; on a router for every instance that is up, each on
        its own machine. Perfetto and Chrome's tracing open the files, one for each rank. Cancelling ends it on an
        engine; on a router it stops the waiting only.

        Args:
            seconds: at most `MOST_PROFILE_S`.

        Raises BadInput, also where a profile is being recorded already, or the runner records none; DeadlineExceeded
        where the files are not written in time; EngineClosed.
        """

    @abstractmethod
    def facts(self) -> ModelFacts:
        """The model and its limits, now. Waits for nothing and costs little. Raises EngineClosed before the start; on a
        router PeerUnreachable where no instance has answered yet."""

    @abstractmethod
    def load(self) -> Load:
        """How busy it is, now. Waits for nothing and costs little. Raises EngineClosed before the start, and the error
        that ended it."""

    @abstractmethod
    async def watch(self) -> tuple[Watched, ...]:
        """What every engine shows of itself to people: gauges, counters, latencies, its last minutes, the experts
        chosen (`telemetry/sight/sight.py`); on a router one for each instance, in the order in which they were named.

        A router asks each instance at most once a second, however many watch, and waits a second at most; if an
        instance does not answer, its last answer stands. Cancelling stops the waiting only. Raises EngineClosed before
        the start, and the error that ended it.
        """
