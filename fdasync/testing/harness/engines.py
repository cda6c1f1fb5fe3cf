"""Builds engines on the synthetic runner, and compares their answers with the oracle's.

`synthetic_engine` builds an engine in a line, `held_engine` an engine whose steps a test releases by hand. `expected`
gives the end of an uninterrupted sample; `check_sample` compares a sample with it: tokens, log-probs and every row of
every spec. Knows engines by their public face only. Called by tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from fdasync.engine.config import EngineConfig
from fdasync.engine.engine import Engine
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import Oracle, SyntheticConfig
from fdasync.testing.harness.fault_runner import FaultRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.cache.store.base import Store
    from fdasync.drafting import Drafter
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import RunStep
    from fdasync.request import SamplingParams
    from fdasync.result import Delta, Result, Sample
    from fdasync.runner.base import Runner
    from fdasync.testing.harness.fault_runner import StepFault
    from fdasync.testing.harness.pass_model import Read

# host blocks of an engine with a store: as many as its device has
_HOST_BLOCKS = 64
# of real time, in which `until` looks at every turn; its rest between two looks after that
_MOMENT_S, _REST_S = 0.02, 0.001
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterTokenizer:
    """One letter for one token id, ids above 25 wrap around: text for stop strings, without a vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [_LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([_LETTERS[token % 26] for token in token_ids])


def synthetic_config(runner: Mapping[str, Any] | None = None, **values: Any) -> EngineConfig:
    """A small engine's configuration: in this process, blocks of 4 tokens, both further aux specs on.

    Requests that name no deadline have one of 300 s; starting, closing and the store's calls have limits of minutes.
    """
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
        # minutes: what stalls ends a test, and a busy machine ends none
        "store_open_deadline_s": 120.0,
        "store_deadline_s": 120.0,
        "store_kill_s": 240.0,
        "request_deadline_s": 300.0,
        "prepare_deadline_s": 120.0,
        "close_deadline_s": 120.0,
    }
    return EngineConfig(runner="synthetic", runner_config=own, **{**defaults, **values})


def synthetic_engine(
    config: EngineConfig | None = None,
    *,
    runner: Runner | None = None,
    tokenizer: Tokenizer | None = None,
    store: Store | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """An engine that is not started yet.

    Args:
        config: `synthetic_config()` if None.
        runner, tokenizer, drafter: used in the place of what the configuration names.
        store: the tier behind a host tier, which is small unless the configuration sizes it. The engine closes the
            store; a store that shall serve a second engine overrides `aclose`.
    """
    config = config or synthetic_config()
    if store is not None and not config.store:
        config = msgspec.structs.replace(config, store="given")
    if store is not None and config.host_blocks == "auto":
        config = msgspec.structs.replace(config, host_blocks=_HOST_BLOCKS)
    return Engine(config, runner=runner, tokenizer=tokenizer, store=store, drafter=drafter)


def held_engine(
    config: EngineConfig | None = None,
    *,
    fault: StepFault | None = None,
    on_launch: Callable[[RunStep], None] | None = None,
) -> Held:
    """An engine, not started, whose steps a test holds back and releases by hand; see `FaultRunner`."""
    config = config or synthetic_config()
    inner = SyntheticRunner(oracle_of(config).config, config.runner_limits())
    faults = FaultRunner(inner, Random(0), fault=fault, on_launch=on_launch)
    return Held(Engine(config, runner=faults, tokenizer=LetterTokenizer()), faults)


async def until(condition: Callable[[], bool], deadline_s: float = 120.0, every_s: float = 0.0) -> None:
    """Let the loop turn until the condition holds; in virtual time, which stands still meanwhile, give `every_s`.

    What takes longer than a moment is mostly another process's work, which a loop that only turns would take the CPU
    from: it rests between turns then.
    """
    loop = asyncio.get_running_loop()
    moment = loop.time() + _MOMENT_S
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - for conditions that no event announces
            await asyncio.sleep(every_s or (_REST_S if loop.time() > moment else 0.0))


def oracle_of(config: EngineConfig) -> Oracle:
    """The oracle of the synthetic runner that this configuration names."""
    return Oracle(msgspec.convert(config.runner_config, SyntheticConfig))


class Held(NamedTuple):
    """An engine and the `FaultRunner` between it and its runner."""

    engine: Engine
    faults: FaultRunner

    def assert_struck(self) -> None:
        """See `FaultRunner`."""
        self.faults.assert_struck()


class Ending(msgspec.Struct, frozen=True):
    """The end of an uninterrupted sample.

    Attributes:
        token_ids: all sampled tokens.
        reason: "stop" or "length".
        text: of the tokens, up to a stop string.
    """

    token_ids: tuple[int, ...]
    reason: Literal["stop", "length"]
    text: str


def expected(
    prompt: Sequence[int], params: SamplingParams, index: int, oracle: Oracle, seen: Sequence[Read] | None = None
) -> Ending:
    """How sample `index` of a request ends if nothing interrupts it. `params` needs a seed unless greedy.

    `seen`: what the sample's passes read (`PassModel.seen`), where weights changed; the sample ends where they end.
    """
    assert params.seed is not None or params.temperature == 0, "a sample without a seed cannot be foretold"
    seed = params.seed or 0
    if seen is None:
        tokens = oracle.generate(
            prompt, params.max_tokens, temperature=params.temperature, seed=seed, index=index,
            logit_bias=params.logit_bias, grammar=params.grammar,
        )  # fmt: skip
    else:
        tokens = _generate_seen(prompt, params, index, oracle, seen)
    ends = set(params.stop_token_ids)
    if oracle.config.eos_id >= 0 and not params.ignore_eos:
        ends.add(oracle.config.eos_id)
    letters = LetterTokenizer()
    for count in range(1, len(tokens) + 1):
        kept = tuple(tokens[:count])
        # a letter for each token, so a stop string ends with the last one
        if params.stop and count > params.min_tokens:
            text = letters.decode(kept)
            found = [len(stop) for stop in params.stop if text.endswith(stop)]
            if found:
                return Ending(kept, "stop", text[: -max(found)])
        if kept[-1] in ends and count >= params.min_tokens:
            return Ending(kept, "stop", letters.decode(kept))
    return Ending(tuple(tokens), "length", letters.decode(tokens))


def _generate_seen(
    prompt: Sequence[int], params: SamplingParams, index: int, oracle: Oracle, seen: Sequence[Read]
) -> list[int]:
    """Tokens of a request whose passes read KV of several weights."""
    tokens = list(prompt)
    matcher = oracle.matcher(params.grammar)
    for position in range(len(prompt) - 1, min(len(seen), len(prompt) + params.max_tokens - 1)):
        noise = oracle.noise(params.seed or 0, index, position + 1) if params.temperature > 0 else 0
        digest = _digest(tokens, position, oracle, seen)
        token = int(oracle.sample(digest, np.array([noise], np.uint64), seen[position].weights_id)[0])
        token = oracle.biased(token, params.logit_bias)
        tokens.append(token if matcher is None else matcher.take(token))
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
    names: Sequence[str] | None = None,
    seen: Sequence[Read] | None = None,
) -> None:
    """Raise AssertionError unless the sample is the oracle's, as far as it went.

    Args:
        start: of its rows.
        names: the specs whose rows must be there, and no others: "routing" is one; None: all specs that the
            oracle's model writes.
        seen: see `expected`.
    """
    want = expected(prompt, params, sample.index, oracle, seen)
    count = len(sample.token_ids)
    if sample.finish_reason in ("stop", "length"):
        assert sample.token_ids == want.token_ids, f"tokens {sample.token_ids}, oracle {want.token_ids}"
        assert sample.finish_reason == want.reason, f"ended by {sample.finish_reason}, oracle {want.reason}"
    else:
        assert sample.token_ids == want.token_ids[:count], f"tokens {sample.token_ids}, oracle {want.token_ids}"
    digests, weights = _passes([*prompt, *want.token_ids], oracle, seen)
    _check_logprobs(sample, len(prompt), params, oracle, digests, weights)
    found = dict(sample.aux)
    if sample.routing is not None:
        assert sample.routing.start == start
        found["routing"] = sample.routing.array
    wanted = _names(oracle) if names is None else names
    assert sorted(found) == sorted(wanted), f"there are rows of {sorted(found)}, rows of {sorted(wanted)} were wanted"
    assert sample.start == start
    for name, array in found.items():
        if count:
            whole = len(prompt) + count - 1 - start
            assert len(array) == whole, f"{len(array)} rows of {name}, {whole} positions were forwarded"
        own = digests[start : start + len(array)]
        if name == "stamp":
            assert array.dtype == np.uint32
            assert array.shape[1:] == (1,)
            continue
        want_rows = oracle.rows(own) if name == "routing" else oracle.values(own)
        assert array.dtype == want_rows.dtype
        assert np.array_equal(array, want_rows), f"rows of {name} are not the oracle's"
    assert len({len(array) for array in found.values()}) <= 1


def check_prompt_logprobs(
    result: Result, prompt: Sequence[int], params: SamplingParams, oracle: Oracle, seen: Sequence[Read] | None = None
) -> None:
    """Raise AssertionError unless the log-probs of the prompt are the oracle's: all of them, or the leading part where
    sample 0 has no token.

    `seen`: see `expected`, of sample 0.
    """
    first, found = params.prompt_logprobs_start, result.prompt_logprobs
    assert (found is not None) == (first is not None)
    assert (result.prompt_top_logprobs is not None) == bool(params.prompt_top_logprobs)
    if first is None or found is None:
        return
    if result.samples[0].token_ids:
        assert len(found) == len(prompt) - first, f"{len(found)} log-probs for {len(prompt) - first} tokens"
    digests, weights = _passes(prompt, oracle, seen)
    top = params.prompt_top_logprobs
    alternatives = result.prompt_top_logprobs or (None,) * len(found)
    for position, value, best in zip(range(first, first + len(found)), found, alternatives, strict=True):
        if position == 0:
            assert np.isnan(value)
            assert best is None
            continue
        at = slice(position - 1, position)
        wanted, tops = oracle.prompt_scores(digests[at], np.array(prompt[position : position + 1]), top, weights[at][0])
        assert value == wanted[0], f"log-prob {value} of the prompt's token {position}, oracle {wanted[0]}"
        if best is not None:
            assert best.token_ids == tops[0].token_ids
            assert np.allclose(best.logprobs, tops[0].logprobs, atol=1e-6)
        assert (best is not None) == bool(top)


def _passes(
    tokens: Sequence[int], oracle: Oracle, seen: Sequence[Read] | None
) -> tuple[NDArray[np.uint64], Sequence[int]]:
    """Digest up to each position, and the weights of the pass that computed it."""
    if seen is None:
        return oracle.digests(tokens), [oracle.config.weights_id] * len(tokens)
    seen = seen[: len(tokens)]
    parts = [_digest(tokens, position, oracle, seen) for position in range(len(seen))]
    digests = np.concatenate([*parts, np.zeros(len(tokens) - len(seen), np.uint64)])
    return digests, [read.weights_id for read in seen]


def _names(oracle: Oracle) -> list[str]:
    """Names of the specs that the synthetic model writes."""
    config = oracle.config
    written = {"routing": config.num_moe_layers > 0, "values": config.values_spec, "stamp": config.pass_stamp}
    return [name for name, is_written in written.items() if is_written]


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
    assert (sample.top_logprobs is not None) == bool(params.top_logprobs)
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
            assert len(have) == len(tokens)
            assert np.allclose(have, want * factor, atol=1e-6), "log-probs are not the oracle's"
    if sample.top_logprobs is not None:
        best = [oracle.top(digests[at], params.top_logprobs, weights[at]) for at in range(first, first + len(tokens))]
        assert list(sample.top_logprobs) == best, "alternatives are not the oracle's"


def check_deltas(deltas: Sequence[Delta], result: Result, *, whole: bool = True, ends: bool = True) -> None:
    """Raise AssertionError unless the deltas of a stream, joined, are its result: tokens, text, log-probs and ends.

    Args:
        whole: False: the caller left the stream, so the deltas are the beginning of the result.
        ends: each sample's last delta names its end; False: a router may have ended a sample without its instance.
    """
    for sample in result.samples:
        own = [delta for delta in deltas if delta.index == sample.index]
        streamed = tuple(token for delta in own for token in delta.token_ids)
        text = "".join(delta.text for delta in own)
        assert streamed == sample.token_ids[: len(streamed)], f"deltas {streamed}, result {sample.token_ids}"
        assert sample.text.startswith(text), f"the deltas' text {text!r} is not the result's {sample.text!r}"
        for name in ("raw_logprobs", "processed_logprobs", "top_logprobs"):
            want = getattr(sample, name)
            parts = [getattr(delta, name) for delta in own]
            assert {part is None for part in parts} <= {want is None}, f"{name} are in deltas or result alone"
            if want is None:
                continue
            joined = [value for part in parts for value in part]
            if name != "top_logprobs":
                joined, want = np.array(joined, np.float32).tolist(), want.tolist()
            assert joined == list(want[: len(streamed)]), f"{name} of the deltas are not the result's"
        if not whole:
            continue
        assert (len(streamed), text) == (len(sample.token_ids), sample.text), "the deltas end before the result"
        if not ends:
            continue
        assert [delta.finish_reason for delta in own if delta.finish_reason] == [sample.finish_reason]
        assert own[-1].finish_reason is not None, "a delta follows the end of its sample"
