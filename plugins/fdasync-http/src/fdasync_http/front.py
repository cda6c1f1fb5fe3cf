"""What every endpoint works with: the generator, its facts, the tokenizer, the settings, and requests as they run.

Knows no dialect. Made by `application.py`; held by every room of paths.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from fdasync_http import tracing
from fdasync_http.budget import Budget
from fdasync_http.failures import RETRY_AFTER_S, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Unpack

    from fdasync import DeltaStream, GenerateOptions, Generator, ModelFacts, PauseMode, Result, SamplingParams
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.request import Prompt
    from fdasync_http.config import HttpConfig


# of each path: names of ignored fields that are kept, and what counts the others
_MAX_NAMES = 100
_NAME_CHARS = 100
_OTHERS = "others"


def model_name(config: HttpConfig, facts: ModelFacts) -> str:
    """Name of the model in answers: as configured, else the checkpoint folder's, else as the runner names it.

    Clients send it back, so it has no spaces of ours in it.
    """
    return config.model or PurePath(facts.model_path).name or facts.model


def _traced(options: GenerateOptions) -> GenerateOptions:
    trace = tracing.current.get()
    return {**options, "trace": trace} if trace else options


class LastUpdate:
    """What came of the last update of weights, for clients that read no status of its calls.

    Attributes:
        state: "whole": none was refused since one began, or brought weights. "refused": one was. "unfinished": one
            was, and finished all the same, so that requests would be answered from other weights than the trainer's.
    """

    def __init__(self) -> None:
        self.state: Literal["whole", "refused", "unfinished"] = "whole"
        self._why = ""

    def begins(self) -> None:
        """An update has begun, or brought weights: what was refused before it is over."""
        self.state, self._why = "whole", ""

    def refuse(self, why: str) -> None:
        """It was refused; its client may not have heard."""
        if self.state == "whole":
            self.state, self._why = "refused", why

    def finish(self) -> None:
        """Its client says that it has ended. Raises Refused (400) where it was refused; requests are refused then."""
        if self.state == "whole":
            return
        self.state = "unfinished"
        raise self._refusal(400)

    def check(self) -> None:
        """Raises Refused (503) where it is unfinished."""
        if self.state == "unfinished":
            raise self._refusal(503)

    def _refusal(self, status: int) -> Refused:
        words = f"the weights are not the trainer's: an update was refused, and finished all the same: {self._why}"
        return Refused(status, words, code="unfinished")


class Front:
    """See the module.

    Attributes:
        generator: an engine or a router, started by its owner.
        config: the app's settings.
        tokenizer: makes text of tokens, and tokens of chats; None: paths that need one refuse.
        live: how many requests generate.
        bodies: bytes of bodies that are being read.
        is_draining: whether the front ends soon, and takes no more requests that generate.
        answers: how many answers were begun, by (path, status).
        ignored: how often a field came that changes nothing, by path and name.
        groups: names of the requests of a list that has one name, by that, while they are live.
        snapshot: fingerprint of weights that `/weights_checker` keeps; "": it keeps none.
        pulling: held while a checkpoint is pulled.
        local_checkpoint: folder that SkyRL's deltas go to; "": its client has named none.
        update: what came of the last update of weights.
        profile: the last profile that was begun; its result is the folder of each engine.
    """

    def __init__(
        self,
        generator: Generator,
        config: HttpConfig,
        tokenizer: Tokenizer | None,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.generator = generator
        self.config = config
        self.tokenizer = tokenizer
        self.live = 0
        self.is_draining = is_draining
        self.bodies = Budget(config.max_bodies_nbytes)
        self.answers: Counter[tuple[str, int]] = Counter()
        self.ignored: dict[str, Counter[str]] = {}
        self.groups: dict[str, list[str]] = {}
        self.snapshot = ""
        self.pulling = asyncio.Lock()
        self.local_checkpoint = ""
        self.update = LastUpdate()
        self.profile: asyncio.Future[dict[str, str]] | None = None
        # held by a reset that pauses; and how many clients' pauses are on their way
        self._resetting = asyncio.Lock()
        self._pausing = 0

    def ignore(self, path: str, field: str) -> None:
        """Count a field of a body that changes nothing there. Clients choose the names, so only so many are kept."""
        fields = self.ignored.setdefault(path, Counter())
        name = field[:_NAME_CHARS]
        fields[name if name in fields or len(fields) < _MAX_NAMES else _OTHERS] += 1

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for a request that generates. Raises Refused: 503 while the front drains and where the last
        update is "unfinished", 429 where `max_live` requests generate."""
        if self.is_draining():
            raise Refused(503, "the server drains, and ends", code="draining", retry_after_s=RETRY_AFTER_S)
        self.update.check()
        if self.live >= self.config.max_live:
            raise Refused(
                429,
                f"{self.live} requests are live; the limit is {self.config.max_live}",
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    async def pause(self, mode: PauseMode) -> None:
        """See `Generator.pause`; for a client, whose pause nothing ends but a resume."""
        async with self._resetting:
            self._pausing += 1
        try:
            await self.generator.pause(mode)
        finally:
            self._pausing -= 1

    async def reset_running(self) -> None:
        """Have running requests give their blocks up, and forget every cached block. In a client's pause, which goes
        on, requests that are inside keep their blocks."""
        async with self._resetting:
            if self._pausing or self.generator.load().paused:
                await self.generator.reset_cache()
                return
            await self.generator.pause("retract")
            try:
                await self.generator.reset_cache()
            finally:
                await self.generator.resume()

    def abort(self, name: str) -> int:
        """End a request, or the requests of a list, by the name that the client gave. Returns how many there are."""
        return sum([self.generator.abort(one) for one in dict.fromkeys((name, *self.groups.get(name, ())))])

    @contextmanager
    def group(self, name: str | None, names: Sequence[str | None]) -> Iterator[None]:
        """The requests of a list have one name beside their own until the block is left; None: they have none."""
        if name is None:
            yield
            return
        own = [one for one in names if one is not None]
        group = self.groups.setdefault(name, [])
        group += own
        try:
            yield
        finally:
            for one in own:
                group.remove(one)
            if not group:
                self.groups.pop(name, None)

    def generate(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """See `Generator.generate`; under the span of the request."""
        return self.generator.generate(prompt, params, **_traced(options))

    async def complete(self, prompt: Prompt, params: SamplingParams, **options: Unpack[GenerateOptions]) -> Result:
        """See `Generator.complete`; under the span of the request."""
        return await self.generator.complete(prompt, params, **_traced(options))

    @property
    def model(self) -> str:
        """Name of the model in answers."""
        return model_name(self.config, self.generator.facts())

    @property
    def num_hidden_layers(self) -> int:
        """Layers of expert rows in answers: all hidden ones; layers up to the last MoE layer where the runner does not
        say how many there are."""
        facts = self.generator.facts()
        return facts.num_hidden_layers or max(facts.moe_layer_ids, default=-1) + 1
