"""The synthetic model in closed form: its outputs as a function of tokens and weights alone, without blocks.

The KV of a token is 64 bits of (token, position, weights). The next token and the routing row at a position are a
function of a weighted sum of *all* KV words up to that position, and of the weights. Tests compare the engine with this
module; `steps.py` computes the same through paged KV.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from fdasync.result import TopLogprobs
from fdasync.runner.synthetic.grammar import Matcher, rule_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.request import Grammar

U64 = np.uint64
#: pretended logit of the token that a step would sample; all others have 0
PICK_LOGIT = 20.0
#: layers of the pretended model that have an indexer
CHOSEN_LAYERS = (0, 2)
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_MIX = (U64(0x9E3779B97F4A7C15), U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB))


class SyntheticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the pretended model, and the costs of its steps.

    Attributes:
        num_moe_layers, top_k, num_experts: of the routing; 0 layers is a dense model.
        vocab_size: token ids are below it.
        max_context_tokens, block_tokens, num_blocks: what the runner offers where the engine's settings are "auto".
        seed: of the spread of times.
        weights_id: seed of the weights.
        eos_id: sampled like any other token; -1: none.
        state_words: words of 64 bits of a recurrent state that each sequence has besides its KV; 0: none.
        num_snapshots: places of snapshots of it on the device.
        chosen_top_k: positions that each of two indexers chooses for a token, among those it sees; 0: no indexers.
        kv_shares: parts of equal size that a block's bytes have; in a group each rank writes its own to the host.
        max_run_tokens: a step yields 1 to so many tokens of a decoding sequence; how many, its position says
            (`Oracle.run_length`). The tokens are the same as with one token a step.
        values_spec: also write the second aux spec, "values", float16 [4] per token.
        pass_stamp: KV and a third aux spec, "stamp", uint32 [1], carry the number of the pass (step) that wrote
            them; stamps never influence tokens or rows (docs/design.md, rule 25).
        stamp_base: added to that number, so that passes of several instances can be told apart.
        step_s, token_s: seconds of a step, fixed and per token; 0 completes in the next loop turn.
        copy_s: seconds of a copy of blocks between device and host.
        load_s: seconds of loading new weights; steps and copies are refused meanwhile, as by a real model.
        sleep_s: seconds of releasing memory, and of taking back each part of it.
        fail_wakes: so many calls to take a part back fail, before the first that succeeds.
        jitter: relative spread of a step's time, drawn from `seed`.
        free: steady decode steps cost next to nothing and compute nothing (benchmarks): a token is
            the last one plus 1, never among the topmost 16 ids; rows are constant, there are no log-probs of
            samples, no bias, no grammars, no runs and no stamps.
        fail_step: this step fails; -1: none.
        hang_step: this step never completes; -1: none.
    """

    num_moe_layers: int = 4
    top_k: int = 2
    num_experts: int = 16
    vocab_size: int = 1000
    eos_id: int = -1
    max_context_tokens: int = 4096
    block_tokens: int = 16
    num_blocks: int = 256
    weights_id: int = 1
    state_words: int = 0
    num_snapshots: int = 16
    chosen_top_k: int = 0
    kv_shares: int = 1
    max_run_tokens: int = 1
    values_spec: bool = False
    pass_stamp: bool = False
    stamp_base: int = 0
    step_s: Seconds = 0.0
    token_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    load_s: Seconds = 0.0
    sleep_s: Seconds = 0.0
    fail_wakes: int = 0
    jitter: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    seed: int = 0
    free: bool = False
    fail_step: int = -1
    hang_step: int = -1


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, element-wise: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        words = words + _MIX[0]
        words = (words ^ (words >> U64(30))) * _MIX[1]
        words = (words ^ (words >> U64(27))) * _MIX[2]
        return words ^ (words >> U64(31))


def place(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd factor, so that no bit of a word is lost; different at every position."""
    return positions * U64(2) + U64(1)


class Oracle:
    """The closed form: what the synthetic model answers, from tokens and weights alone."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.row_dtype = np.uint8 if config.num_experts <= 256 else np.uint16

    def kv(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], weights_id: int) -> NDArray[np.uint64]:
        """KV words [T] of tokens [T] at positions [T]."""
        weights = mix(np.array([weights_id], U64))
        return mix(tokens.astype(U64) ^ (positions.astype(U64) << U64(32)) ^ weights)

    def rows(self, digests: NDArray[np.uint64]) -> NDArray[np.generic]:
        """Routing rows [T, L, K] from the digest of all KV up to each position [T]."""
        config = self.config
        layers = np.arange(config.num_moe_layers, dtype=U64)
        first = mix(digests[:, None] ^ (layers << U64(40))) % U64(config.num_experts)
        ranks = np.arange(config.top_k, dtype=U64)
        ids = (first[:, :, None] + ranks) % U64(config.num_experts)
        return ids.astype(self.row_dtype)

    def chosen(self, digests: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Positions [T, 2, chosen_top_k] that the indexers of two layers choose, from the digests up to each of these
        positions [T]; -1 behind the last where fewer are seen."""
        ranks = np.arange(self.config.chosen_top_k, dtype=U64)
        first = mix(digests[:, None] ^ (np.arange(len(CHOSEN_LAYERS), dtype=U64) << U64(44)))
        seen = positions.astype(U64)[:, None, None] + U64(1)
        with np.errstate(over="ignore"):
            chosen = ((first % seen[:, :, 0])[:, :, None] + ranks) % seen
        return np.where(ranks < seen, chosen.astype(np.int32), np.int32(-1))

    def values(self, digests: NDArray[np.uint64]) -> NDArray[np.generic]:
        """Rows [T, 4] float16 of the second spec."""
        words = mix(digests[:, None] ^ (np.arange(4, dtype=U64) << U64(48)))
        return (words % U64(1024)).astype(np.float16)

    def sample(self, digests: NDArray[np.uint64], noise: NDArray[np.uint64], weights_id: int) -> NDArray[np.int64]:
        """Tokens [N]; `noise` is 0 for greedy ones."""
        words = mix(digests ^ noise ^ mix(np.array([weights_id], U64) + U64(1)))
        return (words % U64(self.config.vocab_size)).astype(np.int64)

    def biased(self, token: int, bias: Mapping[int, float]) -> int:
        """The token that a logit bias puts in a sampled one's place: it has the largest pretended logit with the bias,
        and the lowest id among equals."""
        if not bias:
            return token
        logits = np.zeros(self.config.vocab_size)
        logits[token] = PICK_LOGIT
        logits[list(bias)] += list(bias.values())
        return int(logits.argmax())

    def matcher(self, grammar: Grammar | None, answer: Sequence[int] = (), *, key: int = -1) -> Matcher | None:
        """A matcher for sequence `key`, its answer so far as given; None without a grammar. Raises BadInput."""
        if grammar is None:
            return None
        config = self.config
        return Matcher(
            key, rule_of(grammar, config.vocab_size, config.eos_id), config.vocab_size, config.eos_id, answer
        )

    def logprobs(self, digests: NDArray[np.uint64], tokens: NDArray[np.int64], weights_id: int) -> NDArray[np.float64]:
        """Pretended raw log-probs [N] of these tokens; the greedy one's is above -1, all others' are below.

        The processed ones are half of them.
        """
        words = mix(digests ^ (tokens.astype(U64) << U64(24))) % U64(999) + U64(1)
        best = self.sample(digests, np.zeros(len(digests), U64), weights_id)
        return -(words.astype(np.float64) / 1000.0) * np.where(tokens == best, 1.0, 9.0) - np.where(
            tokens == best, 0, 1
        )

    def top(self, digest: np.uint64, count: int, weights_id: int) -> TopLogprobs:
        """Pretended alternatives: the greedy token and the best of the lowest 64 ids."""
        digests = np.array([digest], U64)
        greedy = self.sample(digests, np.zeros(1, U64), weights_id)
        ids = np.union1d(greedy, np.arange(min(64, self.config.vocab_size)))
        values = self.logprobs(np.full(len(ids), digest), ids, weights_id)
        best = np.argsort(-values, kind="stable")[:count]
        return TopLogprobs(tuple(ids[best].tolist()), tuple(values[best].tolist()))

    def prompt_scores(
        self, digests: NDArray[np.uint64], tokens: NDArray[np.integer], top: int, weights_id: int
    ) -> tuple[NDArray[np.float32], list[TopLogprobs]]:
        """Pretended raw log-probs [N] of a prompt's tokens, float32, each from the digest one position before it; and
        `top` alternatives of each, where `top` is not 0."""
        values = self.logprobs(digests, tokens.astype(np.int64), weights_id).astype(np.float32)
        return values, [self.top(digest, top, weights_id) for digest in digests] if top else []

    @staticmethod
    def noise(seed: int, index: int, position: int) -> int:
        """Noise of one token: a function of seed, sample index and position alone."""
        text = f"{seed},{index},{position}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def run_length(self, position: int) -> int:
        """Tokens that a step yields whose first one is forwarded at `position`, where there is room for them."""
        return 1 + int(mix(np.array([position], U64))[0]) % self.config.max_run_tokens

    def digests(self, tokens: Sequence[int], weights_id: int | Sequence[int] | None = None) -> NDArray[np.uint64]:
        """Digest up to each position; `weights_id` may differ by position (KV written under other weights)."""
        ids = self.config.weights_id if weights_id is None else weights_id
        every = np.broadcast_to(np.asarray(ids, U64), (len(tokens),))
        positions = np.arange(len(tokens))
        words = np.zeros(len(tokens), U64)
        array = np.asarray(tokens, np.int64)
        for value in np.unique(every):
            chosen = every == value
            words[chosen] = self.kv(array[chosen], positions[chosen], int(value))
        sums = self.running_sums(words)
        if not self.config.state_words:
            return sums
        return sums ^ self.folded(self.states(words, np.zeros(self.config.state_words, U64)))

    def states(self, words: NDArray[np.uint64], state: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The recurrent state [T, state_words] behind each of these KV words [T], from the state before them.

        s <- a s + w for each word s of the state, with an odd a of its own: no bit is lost, and the order counts.
        """
        count = self.config.state_words
        with np.errstate(over="ignore"):
            odd = mix(np.arange(count, dtype=U64)) | U64(1)
            # Newton's iteration doubles the right bits: of 3, 6, 12, 24, 48, 96
            inverse = odd.copy()
            for _ in range(5):
                inverse *= U64(2) - odd * inverse
            powers = np.cumprod(np.broadcast_to(odd, (len(words), count)), axis=0, dtype=U64)
            inverses = np.cumprod(np.broadcast_to(inverse, (len(words), count)), axis=0, dtype=U64)
            return powers * (state + np.cumsum(words[:, None] * inverses, axis=0, dtype=U64))

    @staticmethod
    def folded(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[T] of states [T, words]: every bit of a state counts."""
        numbers = np.arange(states.shape[1], dtype=U64) << U64(52)
        folded: NDArray[np.uint64] = np.bitwise_xor.reduce(mix(states ^ numbers), axis=1)
        return folded

    @staticmethod
    def running_sums(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Digest up to each position of KV words [T] in their order: exchanged words change it."""
        with np.errstate(over="ignore"):
            return np.cumsum(words * place(np.arange(len(words), dtype=U64)), dtype=U64)

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, temperature: float = 0.0, seed: int = 0, index: int = 0,
        stop_ids: frozenset[int] = frozenset(), logit_bias: Mapping[int, float] | None = None,
        grammar: Grammar | None = None,
    ) -> list[int]:  # fmt: skip
        """Output tokens of a request that nothing interrupts."""
        tokens = list(prompt)
        matcher = self.matcher(grammar)
        digest = self.digests(tokens)[-1:]
        for _ in range(max_tokens):
            noise = self.noise(seed, index, len(tokens)) if temperature > 0 else 0
            token = int(self.sample(digest, np.array([noise], U64), self.config.weights_id)[0])
            token = self.biased(token, logit_bias or {})
            token = token if matcher is None else matcher.take(token)
            tokens.append(token)
            if token in stop_ids:
                break
            if self.config.state_words:
                digest = self.digests(tokens)[-1:]
                continue
            word = self.kv(np.array([token]), np.array([len(tokens) - 1]), self.config.weights_id)
            with np.errstate(over="ignore"):
                digest = digest + word * place(np.array([len(tokens) - 1], U64))
        return tokens[len(prompt) :]
