"""Engines on the synthetic runner, and what they must answer.

`synthetic_engine` builds one in a line, `held_engine` one whose steps a test releases by hand. `expected`
says how a sample ends if nobody interrupts it, by the oracle; `check_sample` holds a sample against that:
tokens and every row of every spec. Knows engines by their public face only. Called by tests and by
`simulation.py`.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fdasync.config import EngineConfig
from fdasync.engine import Engine
from fdasync.runner.oracle import Oracle, SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing.edges import EdgeRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.request import SamplingParams
    from fdasync.result import Sample
    from fdasync.runner.base import Runner
    from fdasync.testing.edges import Fault
    from fdasync.testing.passes import Read
    from fdasync.tokenizer import Tokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterTokenizer:
    """One letter for one token id, ids above 25 wrap around: text for stop strings, without a vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [_LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([_LETTERS[token % 26] for token in token_ids])


def synthetic_config(runner: Mapping[str, Any] | None = None, **values: Any) -> EngineConfig:
    """A small engine's configuration: in this process, blocks of 4 tokens, both further aux specs on."""
    own = {
        "vocab_size": 100,
        "block_tokens": 4,
        "num_blocks": 64,
        "max_context_tokens": 256,
        "values_spec": True,
        "pass_stamp": True,
        **(runner or {}),
    }
    defaults: dict[str, Any] = {
        "process": "inline",
        "max_running": 8,
        "max_step_tokens": 32,
        "trace_turns": 1 << 16,
        # a request that stalls ends a test, and does not hold it up
        "request_deadline_s": 20.0,
    }
    return EngineConfig(runner="synthetic", runner_config=own, **{**defaults, **values})


def synthetic_engine(
    config: EngineConfig | None = None, *, runner: Runner | None = None, tokenizer: Tokenizer | None = None
) -> Engine:
    """An engine that is not started yet."""
    return Engine(config or synthetic_config(), runner=runner, tokenizer=tokenizer)


def held_engine(config: EngineConfig | None = None, *, fault: Fault | None = None, on_launch: Any = None) -> Held:
    """An engine, not started, whose steps a test holds back and releases by hand; see `EdgeRunner`."""
    config = config or synthetic_config()
    inner = SyntheticRunner(oracle_of(config).config, config.runner_limits())
    edge = EdgeRunner(inner, Random(0), fault=fault, on_launch=on_launch)
    return Held(Engine(config, runner=edge, tokenizer=LetterTokenizer()), edge)


async def until(condition: Callable[[], bool], deadline_s: float = 10.0, every_s: float = 0.0) -> None:
    """Let the loop turn until the condition holds; in virtual time, which stands still meanwhile, give `every_s`."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - it is for what nobody announces
            await asyncio.sleep(every_s)


def oracle_of(config: EngineConfig) -> Oracle:
    """The oracle of the synthetic runner that this configuration names."""
    return Oracle(msgspec.convert(config.runner_config, SyntheticConfig))


class Held(NamedTuple):
    """An engine and the edge of its runner."""

    engine: Engine
    edge: EdgeRunner


class Ending(msgspec.Struct, frozen=True):
    """How a sample ends when nobody interrupts it."""

    token_ids: tuple[int, ...]
    reason: str
    text: str


def expected(
    prompt: Sequence[int], params: SamplingParams, index: int, oracle: Oracle, seen: Sequence[Read] | None = None
) -> Ending:
    """How sample `index` of a request ends when nobody interrupts it. `params` needs a seed unless greedy.

    `seen`: what its passes read (`PassModel.seen`), where weights changed; it ends where they end.
    """
    assert params.seed is not None or params.temperature == 0, "without a seed nobody can say"
    seed = params.seed or 0
    if seen is None:
        tokens = oracle.generate(prompt, params.max_tokens, temperature=params.temperature, seed=seed, index=index)
    else:
        tokens = _generate_seen(prompt, params, index, oracle, seen)
    ends = set(params.stop_token_ids)
    if oracle.config.eos_id >= 0 and not params.ignore_eos:
        ends.add(oracle.config.eos_id)
    letters = LetterTokenizer()
    for count in range(1, len(tokens) + 1):
        kept = tuple(tokens[:count])
        if params.stop:
            text = letters.decode(kept)
            found = [at for stop in params.stop if (at := text.find(stop)) >= 0]
            if found:
                return Ending(kept, "stop", text[: min(found)])
        if kept[-1] in ends and count >= params.min_tokens:
            return Ending(kept, "stop", letters.decode(kept))
    return Ending(tuple(tokens), "length", letters.decode(tokens))


def _generate_seen(
    prompt: Sequence[int], params: SamplingParams, index: int, oracle: Oracle, seen: Sequence[Read]
) -> list[int]:
    """Tokens of a request whose passes read KV of several weights."""
    tokens = list(prompt)
    for position in range(len(prompt) - 1, min(len(seen), len(prompt) + params.max_tokens - 1)):
        noise = oracle.noise(params.seed or 0, index, position + 1) if params.temperature > 0 else 0
        digest = _digest(tokens, position, oracle, seen)
        tokens.append(int(oracle.sample(digest, np.array([noise], np.uint64), seen[position].weights_id)[0]))
    return tokens[len(prompt) :]


def _digest(tokens: Sequence[int], position: int, oracle: Oracle, seen: Sequence[Read]) -> NDArray[np.uint64]:
    weights = seen[position].kv_weights
    return oracle.digests(tokens[: position + 1], weights[0] if len(weights) == 1 else weights)[-1:]


def check_sample(
    sample: Sample,
    prompt: Sequence[int],
    params: SamplingParams,
    oracle: Oracle,
    *,
    start: int = 0,
    rows: bool = True,
    seen: Sequence[Read] | None = None,
) -> None:
    """Raise AssertionError unless the sample is what the oracle says, as far as it went.

    Args:
        rows: aux rows must be there; False: must not.
        seen: see `expected`.
    """
    want = expected(prompt, params, sample.index, oracle, seen)
    count = len(sample.token_ids)
    if sample.finish_reason in ("stop", "length"):
        assert sample.token_ids == want.token_ids, f"tokens {sample.token_ids}, oracle {want.token_ids}"
        assert sample.finish_reason == want.reason, f"ended by {sample.finish_reason}, oracle {want.reason}"
    else:
        assert sample.token_ids == want.token_ids[:count], f"tokens {sample.token_ids}, oracle {want.token_ids}"
    tokens = [*prompt, *want.token_ids]
    if seen is None:
        digests = oracle.digests(tokens)
        weights = [oracle.config.weights_id] * len(tokens)
    else:
        seen = seen[: len(tokens)]
        parts = [_digest(tokens, position, oracle, seen) for position in range(len(seen))]
        digests = np.concatenate([*parts, np.zeros(len(tokens) - len(seen), np.uint64)])
        weights = [read.weights_id for read in seen]
    _check_logprobs(sample, len(prompt), params, oracle, digests, weights)
    if not rows:
        assert sample.routing is None
        assert not sample.aux
        return
    assert sample.routing is not None, "a request that wanted routing got none"
    routing = sample.routing.array
    assert sample.routing.start == start
    if count:
        whole = len(prompt) + count - 1 - start
        assert len(routing) == whole, f"{len(routing)} rows, {whole} positions were forwarded"
    stop = start + len(routing)
    digests = digests[start:stop]
    assert routing.dtype == oracle.row_dtype
    assert np.array_equal(routing, oracle.rows(digests)), "routing rows are not the oracle's"
    assert ("values" in sample.aux) == oracle.config.values_spec
    if "values" in sample.aux:
        assert sample.aux["values"].dtype == np.float16
        assert np.array_equal(sample.aux["values"], oracle.values(digests)), "values are not the oracle's"
    assert ("stamp" in sample.aux) == oracle.config.pass_stamp
    assert all(len(values) == len(routing) for values in sample.aux.values())


def _check_logprobs(
    sample: Sample,
    prompt_len: int,
    params: SamplingParams,
    oracle: Oracle,
    digests: NDArray[np.uint64],
    weights: Sequence[int],
) -> None:
    assert (sample.raw_logprobs is not None) == (params.logprobs in ("raw", "both"))
    assert (sample.processed_logprobs is not None) == (params.logprobs in ("processed", "both"))
    if params.logprobs == "none":
        return
    tokens = np.array(sample.token_ids, np.int64)
    first = prompt_len - 1
    want = np.zeros(len(tokens))
    for weights_id in sorted(set(weights[first : first + len(tokens)])):
        chosen = [at for at in range(len(tokens)) if weights[first + at] == weights_id]
        places = [first + at for at in chosen]
        want[chosen] = oracle.logprobs(digests[places], tokens[chosen], weights_id)
    for have, factor in ((sample.raw_logprobs, 1.0), (sample.processed_logprobs, 0.5)):
        if have is not None:
            assert np.allclose(have, want * factor, atol=1e-6), "log-probs are not the oracle's"
