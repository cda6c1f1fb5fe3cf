"""Prepares requests: validates, tokenises and hashes a prompt, and makes its `RequestPrepared` events.

Bad input ends here, before any work, with an error that names the field and the limit. A child process tokenises long
texts; hashing a long prompt yields to the loop. Knows no blocks and no schedule. Called by `frontend.py`; the driver
uses `Rehasher`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from fdasync.cache.aux import FINAL_HIDDEN, ROUTING
from fdasync.cache.identity import PromptHashes, block_keys, root_key
from fdasync.engine.chosen_output import chosen_nbytes, chosen_starts
from fdasync.engine.tokenizer_process import token_ids
from fdasync.errors import BadInput, TaskCancelled, TooLong
from fdasync.events.catalog import Hashed, RequestPrepared
from fdasync.request import MAX_SALT_CHARS, SamplerSpec, SamplingParams, check_text, check_trace, checked_aux, no_tokens
from fdasync.runner.grammar_checks import GrammarChecks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.engine.tokenizer_process import TokenizerProcess
    from fdasync.events.actions import HashAgain
    from fdasync.events.bus import EventBus
    from fdasync.request import GenerateRequest, Grammar
    from fdasync.runner.base import Capacity

_HASH_SLICE_BLOCKS = 256
# no tokenizer has longer tokens: a text beyond this many characters for each token of the context cannot fit
_MAX_TOKEN_CHARS = 256
# and text and tokens must fit in a frame of the tokenizer's process
_MAX_PROMPT_CHARS = 1 << 25
_MAX_ID_CHARS = 256


def namespace_of(capacity: Capacity) -> bytes:
    """Root identity of every block of this model under these weights (docs/design.md, section 4, Namespace)."""
    parts: tuple[object, ...] = (
        1,  # schema of identities
        capacity.fingerprint,
        capacity.weights_id,
        capacity.kv_layout,
        capacity.kv_dtype,
        capacity.block_tokens,
        [(spec.name, spec.shape, spec.dtype) for spec in capacity.aux_specs],
    )
    if capacity.routing_debug:
        # blocks with debug rows never match blocks with expert ids
        parts = (*parts, "routing_debug")
    if capacity.numerics != "default":
        # blocks of other bits; the default adds nothing, so that older stores stay in use (docs/design.md, rule 39)
        parts = (*parts, f"numerics={capacity.numerics}")
    if capacity.sum_slices > 1:
        parts = (*parts, f"sum_slices={capacity.sum_slices}")
    if capacity.state_specs:
        parts = (*parts, [(spec.name, spec.shape, spec.dtype, spec.layers) for spec in capacity.state_specs])
        # which blocks' objects carry a state
        parts = (*parts, capacity.state_every_tokens)
    return root_key(msgspec.msgpack.encode(parts))


class Preparer:
    """Prepares requests for one engine.

    Args:
        capacity: of the runner; no request may need more.
        tokenizer: None means tokens in, tokens out.
        long_texts: tokenises texts beyond the config's inline_tokenise_chars.
        rng: draws seeds for requests that name none.
        check_grammar: the runner's check.

    Attributes:
        capacity, namespace: of the weights in use; `Weights` sets both at an update.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        tokenizer: Tokenizer | None,
        long_texts: TokenizerProcess | None,
        rng: Random,
        check_grammar: Callable[[Grammar], Awaitable[None]],
    ) -> None:
        self.capacity = capacity
        self.namespace = namespace_of(capacity)
        self._scores_hits = any(spec.name == FINAL_HIDDEN for spec in capacity.aux_specs)
        self._config = config
        self._tokenizer = tokenizer
        self._long_texts = long_texts
        self._rng = rng
        self._grammars = GrammarChecks(check_grammar, config.prepare_deadline_s)

    # -- validation, before anything is waited for --------------------------------------------------

    def check(self, ask: GenerateRequest, deadline_s: float) -> GenerateRequest:
        """Raise BadInput for everything that shows without tokenising.

        Returns a copy of the request: the caller may change its lists meanwhile.
        """
        params: Any = ask.params
        if not isinstance(params, SamplingParams):
            raise BadInput("params", f"a SamplingParams is needed, not {type(params).__name__}")
        params = params.validated(vocab_size=self.capacity.vocab_size)
        most = self._config.max_requests
        if params.n > most:
            raise BadInput("n", f"{params.n} samples are more than the engine takes", limit=most)
        if params.stop and self._tokenizer is None:
            raise BadInput("stop", "stop strings need a tokenizer", hint="give ids of tokens that stop it")
        if params.prompt_logprobs_start is not None and not self.capacity.scores_prompts:
            raise BadInput("prompt_logprobs_start", "was asked for, but this engine's runner scores no prompts")
        if params.chosen_positions_start is not None and self.capacity.chosen is None:
            problem = "was asked for, but this engine's model has no indexers, or its runner does not tell"
            raise BadInput("chosen_positions_start", problem)
        for name in params.processors:
            if name not in self.capacity.processors:
                there = ", ".join(self.capacity.processors) or "none"
                hint = "runner_config.processors says which ones an engine has"
                raise BadInput("processors", f"{name!r:.100} is none of this engine's: {there}", hint=hint)
        if params.grammar is not None and not self.capacity.grammars:
            raise BadInput("grammar", "was asked for, but this engine's runner samples under none")
        self._check_options(ask, deadline_s)
        ask = replace(ask, aux=self._check_aux(ask.aux))
        if isinstance(ask.prompt, str):
            self._check_text(ask.prompt)
            return replace(ask, params=params)
        tokens = self._check_tokens(ask.prompt)
        self._check_length(tokens, params, ask.start, elsewhere=ask.hand_off is not None)
        return replace(ask, prompt=tokens, params=params)

    def _check_options(self, ask: GenerateRequest, deadline_s: Any) -> None:
        request_id: Any = ask.request_id
        if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= _MAX_ID_CHARS):
            raise BadInput("request_id", f"{request_id!r:.100} is no name", limit=f"1 to {_MAX_ID_CHARS} characters")
        check_text("request_id", request_id or "")
        check_trace(ask.trace)
        if not _is_int(ask.priority) or not -(2**31) <= ask.priority < 2**31:
            raise BadInput("priority", f"{ask.priority!r} is not an integer of 32 bits")
        if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or not 0 < deadline_s <= 1e9:
            raise BadInput("deadline_s", f"{deadline_s!r} is out of range", limit="above 0, up to 1e9")
        if not _is_int(ask.start) or ask.start < 0:
            raise BadInput("start", f"{ask.start!r} is not a position", limit="0 up to the prompt's length")
        salt: Any = ask.cache_salt
        if not isinstance(salt, str):
            raise BadInput("cache_salt", "is not a string")
        if len(salt) > MAX_SALT_CHARS:
            raise BadInput("cache_salt", f"{len(salt)} characters are too many", limit=f"{MAX_SALT_CHARS} characters")
        check_text("cache_salt", salt)
        routing: Any = ask.routing
        if routing is not None and not isinstance(routing, bool):
            raise BadInput("routing", f"{routing!r} is neither True, False nor None")
        if routing and ROUTING not in [spec.name for spec in self.capacity.aux_specs]:
            raise BadInput(
                "routing",
                "was asked for, but this engine captures none",
                hint="the model has no MoE layers, or the engine was configured with routing=False",
            )

    def _check_aux(self, wanted: Any) -> bool | tuple[str, ...] | None:
        """A copy of the names of rows that are wanted besides routing."""
        aux = checked_aux(wanted)
        others = [spec.name for spec in self.capacity.aux_specs if spec.name != ROUTING]
        if aux is True and all(spec.by_name for spec in self.capacity.aux_specs if spec.name != ROUTING):
            raise BadInput("aux", "was asked for, but this engine has no rows besides routing")
        for name in () if isinstance(aux, bool | None) else aux:
            if name not in others:
                raise BadInput(
                    "aux", f"there are no rows of {name!r}", limit=", ".join(others) or "none besides routing"
                )
        return aux

    def _check_text(self, text: str) -> None:
        if self._tokenizer is None:
            raise BadInput("prompt", "is text, but the engine has no tokenizer", hint="give token ids")
        if not text:
            raise BadInput("prompt", "is empty", limit="at least one token")
        most = min(_MAX_TOKEN_CHARS * self.capacity.max_context_tokens, _MAX_PROMPT_CHARS)
        if len(text) > most:
            count = -(-len(text) // _MAX_TOKEN_CHARS)
            raise TooLong(
                "prompt", f"{len(text)} characters cannot fit in the context", limit=most, prompt_tokens=count
            )  # fmt: skip
        check_text("prompt", text)

    def _check_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A copy of the token ids."""
        most = self.capacity.max_context_tokens
        if isinstance(prompt, Sized) and getattr(prompt, "ndim", 1) == 1 and len(prompt) > most:
            # refused before it is read
            raise TooLong(
                "prompt", f"{len(prompt)} tokens leave no room to answer", limit=most, prompt_tokens=len(prompt)
            )  # fmt: skip
        if isinstance(prompt, array) and prompt.typecode == "i":
            # an array of C ints holds numbers only
            return self._check_vocabulary(prompt)
        tolist = getattr(prompt, "tolist", None)
        values = tolist() if callable(tolist) else prompt
        if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
            raise BadInput("prompt", f"{type(prompt).__name__} is neither text nor a sequence of token ids")
        try:
            tokens = array("q", values)
        except (TypeError, OverflowError) as error:
            raise no_tokens(values, error) from None
        if bool in set(map(type, values)):
            raise BadInput("prompt", "holds a bool, which is no token id")
        return self._check_vocabulary(tokens)

    def _check_vocabulary(self, tokens: array[int]) -> tuple[int, ...]:
        if not tokens:
            raise BadInput("prompt", "is empty", limit="at least one token")
        vocab = self.capacity.vocab_size
        view = np.asarray(tokens)
        low, high = int(view.min()), int(view.max())
        if low < 0 or high >= vocab:
            raise BadInput(
                "prompt", f"token id {low if low < 0 else high} is outside the vocabulary", limit=f"0 to {vocab - 1}"
            )
        return tuple(tokens)

    def _check_length(self, tokens: Sequence[int], params: SamplingParams, start: int, *, elsewhere: bool) -> None:
        capacity = self.capacity
        count = len(tokens)
        # where another instance decodes, only the prompt and the first token are computed here
        new = 1 if elsewhere else params.max_tokens
        if count + 1 > capacity.max_context_tokens:
            raise TooLong(
                "prompt", f"{count} tokens leave no room to answer",
                limit=capacity.max_context_tokens, prompt_tokens=count,
            )  # fmt: skip
        if count + new > capacity.max_context_tokens:
            raise TooLong(
                "max_tokens", f"prompt {count} + {params.max_tokens} new tokens are beyond the context",
                limit=capacity.max_context_tokens, prompt_tokens=count,
            )  # fmt: skip
        # the last token is never forwarded
        most = capacity.num_blocks * capacity.block_tokens + 1
        if count + new > most:
            raise TooLong(
                "max_tokens", f"prompt {count} + {params.max_tokens} new tokens are more than all KV blocks hold",
                limit=most, prompt_tokens=count,
            )  # fmt: skip
        if start >= count:
            raise BadInput("start", f"{start} is not inside the prompt", limit=f"0 to {count - 1}")
        scored = params.prompt_logprobs_start
        if scored is not None and scored >= count:
            raise BadInput("prompt_logprobs_start", f"{scored} is not inside the prompt", limit=f"0 to {count - 1}")
        chosen = params.chosen_positions_start
        if chosen is not None and chosen >= count:
            raise BadInput("chosen_positions_start", f"{chosen} is not inside the prompt", limit=f"0 to {count - 1}")
        most = self._config.chosen_positions_nbytes
        if chosen is not None and (nbytes := chosen_nbytes(self.capacity.chosen, params, count)) > most:
            raise BadInput(
                "chosen_positions_start", f"up to {nbytes} bytes of positions are more than the engine takes",
                limit=most, hint="ask from a later position on, for fewer tokens, or raise chosen_positions_nbytes",
            )  # fmt: skip

    # -- the work -----------------------------------------------------------------------------------

    async def prepare(
        self, ask: GenerateRequest, keys: list[int], *, rows: bool, arrived_at: float, deadline: float
    ) -> list[RequestPrepared]:
        """One event for each sample, not published yet. Raises BadInput, DeadlineExceeded, WorkerDied.

        Args:
            keys: internal numbers of the samples.
            rows: aux rows are wanted.
            arrived_at: engine time at which the caller asked.
            deadline: engine time at which the request ends.
        """
        params = ask.params
        if params.grammar is not None:
            await self.check_grammar(params.grammar)
        tokens = ask.prompt
        if isinstance(tokens, str):
            tokens = self._check_tokens(await self._tokenise(tokens))
            self._check_length(tokens, params, ask.start, elsewhere=ask.hand_off is not None)
        namespace = self.namespace
        root = salted(namespace, ask.cache_salt)
        hashes = await hash_blocks(root, tokens, self.capacity.block_tokens) if self._config.prefix_cache else ()
        given = PromptHashes(namespace, hashes)
        return self.events(ask, tokens, given, keys, rows=rows, arrived_at=arrived_at, deadline=deadline)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Have the runner check it, once. Raises BadInput, DeadlineExceeded, WorkerDied."""
        await self._grammars.check(grammar)

    def events(
        self,
        ask: GenerateRequest,
        tokens: tuple[int, ...],
        given: PromptHashes,
        keys: list[int],
        *,
        rows: bool,
        arrived_at: float,
        deadline: float,
        scores: bool = True,
    ) -> list[RequestPrepared]:
        """As `prepare`, of a prompt that is tokenised and hashed.

        `scores`: False: another instance computes the log-probs of the prompt.
        """
        params = ask.params
        hand_off = ask.hand_off
        eos = () if params.ignore_eos else self.capacity.eos_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        bias = params.logit_bias
        bias_ids, bias_values = array("i", bias).tobytes(), array("f", bias.values()).tobytes()
        processors = params.packed_processors()
        score_from = -1 if params.prompt_logprobs_start is None or not scores else params.prompt_logprobs_start
        chosen: tuple[int, ...] = (-1,) * len(keys)
        if params.chosen_positions_start is not None:
            chosen = chosen_starts(params, len(tokens))
        return [
            RequestPrepared(
                key=key,
                group=keys[0],
                tokens=tokens,
                block_keys=given.block_keys,
                # where another instance decodes, this one samples the first token and checks no stop
                max_tokens=params.max_tokens if hand_off is None else 1,
                min_tokens=params.min_tokens if hand_off is None else 0,
                stop_ids=stop_ids if hand_off is None else frozenset(),
                priority=ask.priority,
                deadline=deadline,
                # of a grammar or a processor that breaks, the tokens so far are told
                emits=params.logprobs != "none"
                or (hand_off is None and (ask.streams or bool(params.stop) or params.grammar is not None))
                or bool(processors),
                checks_stops=hand_off is None and bool(params.stop),
                start=ask.start if rows and hand_off is None else -1,
                decoders=() if hand_off is None else hand_off.decoders,
                samples=len(keys),
                arrived_at=arrived_at,
                namespace=given.namespace,
                root=salted(given.namespace, ask.cache_salt),
                salt=ask.cache_salt,
                sampler=SamplerSpec(
                    prompt_len=len(tokens),
                    seed=seed,
                    index=index,
                    temperature=params.temperature,
                    # runners know one word for all
                    top_k=params.top_k if 0 < params.top_k < self.capacity.vocab_size else 0,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    repetition_penalty=params.repetition_penalty,
                    presence_penalty=params.presence_penalty,
                    frequency_penalty=params.frequency_penalty,
                    min_tokens=params.min_tokens,
                    stop_ids=tuple(sorted(stop_ids)) if params.min_tokens else (),
                    raw=params.logprobs in ("raw", "both"),
                    processed=params.logprobs in ("processed", "both"),
                    top=params.top_logprobs,
                    bias_ids=bias_ids,
                    bias_values=bias_values,
                    grammar=b"" if params.grammar is None else params.grammar.packed(),
                    processors=processors,
                    scores_hits=self._scores_hits,
                    # for the request, by its first sample
                    score_from=score_from if index == 0 else -1,
                    score_top=params.prompt_top_logprobs,
                    chosen_from=chosen[index],
                ),
            )
            for index, key in enumerate(keys)
        ]

    async def _tokenise(self, text: str) -> Sequence[int]:
        assert self._tokenizer is not None
        if len(text) > self._config.inline_tokenise_chars and self._long_texts is not None:
            return await self._long_texts.encode(text, self._config.prepare_deadline_s)
        return token_ids(self._tokenizer, text)


class Rehasher:
    """Hashes waiting sequences again when the weights changed: one after the other, yielding to the loop.

    Args:
        namespace: returns the namespace in use.
        on_error: ends the engine with the error that it is called with.
    """

    def __init__(
        self,
        bus: EventBus,
        block_tokens: int,
        namespace: Callable[[], bytes],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._on_error = on_error
        self._queue: deque[HashAgain] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, action: HashAgain) -> None:
        """Queue the action; `Hashed` answers it."""
        self._queue.append(action)
        self._start()

    def _start(self) -> None:
        if self._task is None and self._queue:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="fdasync-rehasher")
            self._task.add_done_callback(self._ended)

    async def _work(self) -> None:
        while self._queue:
            action = self._queue.popleft()
            namespace = self._namespace()
            root = salted(namespace, action.salt)
            tokens = array("i", action.tokens)
            keys = await hash_blocks(root, tokens, self._block_tokens)
            self._bus.publish(Hashed(key=action.key, namespace=namespace, root=root, block_keys=keys))
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            if not self._closed:
                self._on_error(TaskCancelled(task.get_name()))
        elif (error := task.exception()) is not None:
            self._on_error(error)
        else:
            # for actions that were added after its last look
            self._start()

    async def aclose(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            # it only computes: a turn of the loop ends it
            await asyncio.wait([self._task])


def salted(namespace: bytes, salt: str) -> bytes:
    """Root identity of every prefix under a namespace and a caller's salt."""
    return root_key(namespace, salt.encode())


async def hash_blocks(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Identities of the full blocks of `tokens`, chained from `root`; long ones yield to the loop."""
    step = block_tokens * _HASH_SLICE_BLOCKS
    keys: list[bytes] = []
    for first in range(0, len(tokens), step):
        if first:
            await asyncio.sleep(0)
        keys += block_keys(keys[-1] if keys else root, tokens[first : first + step], block_tokens)
    return tuple(keys)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
