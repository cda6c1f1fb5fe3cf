"""Which weights each token of the chaos harness may have, and whether an answer is right under weights that changed.

Every label of an update names one number, the synthetic model's weights. A token's label says under which weights it
was sampled; no request may have a token of a label that an update had replaced before the request came. With `keep` a
request's KV may be of older weights than its next token: of those in use until the update, up to some position, or of
the new ones alone, where it was computed again. From outside nobody knows which; so an answer is right if some such
history gives every token, log-prob and row of it. Knows no requests but their answers. Used by `load.py`, and by
what updates (`weights.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.runner.synthetic.oracle import Oracle, SyntheticConfig
from fdasync.testing.harness.engines import check_sample, expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fdasync.request import SamplingParams
    from fdasync.result import Sample

U64 = np.uint64
#: what instances start with
FIRST_LABEL, FIRST_NUMBER = "0", 1


class _Used(msgspec.Struct):
    """A label: `order` among all; `since`: when its update began; `until`: when a later one was there everywhere."""

    order: int
    number: int
    since: float
    until: float


class Windows:
    """Times in which something may happen to requests."""

    def __init__(self) -> None:
        self._windows: list[list[float]] = []

    @contextlib.contextmanager
    def open(self, grace_s: float) -> Iterator[None]:
        """From now on to the end of the block, and so long after it: word of it takes a while."""
        loop = asyncio.get_running_loop()
        window = [loop.time(), np.inf]
        self._windows.append(window)
        try:
            yield
        finally:
            window[1] = loop.time() + grace_s

    def met(self, began: float) -> bool:
        """Whether one was open since then."""
        return any(last >= began for _, last in self._windows)


class Versions:
    """See the module.

    Args:
        config: of the runner.

    Attributes:
        mixed: answers with weights that changed under them.
        aborts: when an update or a sleep may have ended what ran.
        broken: when instances may refuse requests for broken weights.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.mixed = 0
        self._config = config
        self._oracles: dict[int, Oracle] = {}
        self._used: dict[str, _Used] = {FIRST_LABEL: _Used(0, FIRST_NUMBER, 0.0, np.inf)}
        self.aborts, self.broken = Windows(), Windows()

    def begins(self, label: str, number: int) -> None:
        """An update to this label begins; it may be at some instances from now on."""
        self._used[label] = _Used(len(self._used), number, asyncio.get_running_loop().time(), np.inf)

    def agreed(self, label: str) -> None:
        """Its call has returned: no request that comes later may have a token of an earlier label."""
        now = asyncio.get_running_loop().time()
        order = self._used[label].order
        for used in self._used.values():
            if used.order < order:
                used.until = min(used.until, now)

    # -- answers ----------------------------------------------------------------------------------------

    def oracle(self, number: int) -> Oracle:
        if number not in self._oracles:
            self._oracles[number] = Oracle(msgspec.structs.replace(self._config, weights_id=number))
        return self._oracles[number]

    def numbers(self, began: float) -> list[int]:
        """Of all labels that a request may have met that came then, in their order."""
        now = asyncio.get_running_loop().time()
        used = sorted(self._used.values(), key=lambda one: one.order)
        return list(dict.fromkeys(one.number for one in used if one.until >= began and one.since <= now))

    def check(
        self, sample: Sample, prompt: Sequence[int], params: SamplingParams, began: float, start: int,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Raise AssertionError unless the sample is right; arguments as in `check_sample`."""
        known = self.numbers(began)
        if sample.token_ids and not sample.weight_version:
            # a router ended it by itself: it has the tokens that had come
            _check_shape(sample, prompt, params, start, names, self.oracle(known[0]))
            self.check_beginning(sample.token_ids, prompt, params, sample.index, began)
            return
        numbers = self._numbers_of(sample, began)
        problem = "weights changed under it"
        if len(set(numbers)) < 2:
            try:
                self._check_alone(sample, prompt, params, set(numbers or known), start, names)
                return
            except AssertionError as error:
                if len(known) == 1:
                    raise
                problem = str(error)
        try:
            self._check_mixed(sample, prompt, params, numbers, known, start, names)
        except AssertionError as error:
            spans = sample.weight_version
            raise AssertionError(f"{error}; of weights {known}, spans {spans}, alone: {problem}") from error
        self.mixed += 1

    def _check_alone(
        self, sample: Sample, prompt: Sequence[int], params: SamplingParams, numbers: set[int], start: int,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """As if one set of weights gave all of it."""
        problem: AssertionError | None = None
        for number in numbers:
            try:
                check_sample(sample, prompt, params, self.oracle(number), start=start, names=names)
            except AssertionError as error:
                problem = error
            else:
                return
        assert problem is not None
        raise problem

    def _numbers_of(self, sample: Sample, began: float) -> list[int]:
        """The weights of each token. Raises AssertionError where a label is not one that it may have."""
        numbers: list[int] = []
        now = asyncio.get_running_loop().time()
        last = -1
        for span in sample.weight_version:
            used = self._used.get(span.version)
            assert used is not None, f"tokens are of version {span.version!r}, which nobody gave"
            assert span.start == len(numbers), f"spans {sample.weight_version}"
            assert used.order > last, f"versions go back: {sample.weight_version}"
            assert used.until >= began, f"version {span.version} was replaced {began - used.until:.2f} s before it came"
            assert used.since <= now, f"version {span.version} came after it"
            last = used.order
            numbers += [used.number] * (span.stop - span.start)
        assert len(numbers) == len(sample.token_ids), f"spans {sample.weight_version} of {len(sample.token_ids)} tokens"
        return numbers

    def _check_mixed(
        self, sample: Sample, prompt: Sequence[int], params: SamplingParams, numbers: list[int], known: list[int],
        start: int, names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        tokens = [*prompt, *sample.token_ids]
        _check_shape(sample, prompt, params, start, names, self.oracle(known[0]))
        found = self._rows_of(sample)
        sums = {number: self.oracle(number).digests(tokens, number) for number in known}
        # a history of KV is known by its digest up to the last position
        histories = np.zeros(0, U64)
        for index, number in enumerate(numbers):
            at = len(prompt) - 1 + index
            own = sums[number]
            # what ran on, or was computed again
            going = np.append(histories + np.diff(own[max(at - 1, 0) : at + 1]), own[at])
            matching = self._matching(going, number, sample, params, tokens, at, found)
            if not len(matching) or not index:
                # an update came while it was computed, for the first time or again
                earlier = known[: known.index(number) + 1]
                torn = np.concatenate([_torn(sums[older], own, at) for older in earlier])
                matching = np.append(matching, self._matching(torn, number, sample, params, tokens, at, found))
            assert len(matching), f"no history of its KV gives token {index} of {sample.token_ids}, or its rows"
            histories = np.unique(matching)
        pairs = [(sums[older], sums[newer]) for at, newer in enumerate(known) for older in known[: at + 1]]
        for at in range(start, len(prompt) - bool(numbers)):
            digests = np.concatenate([_torn(older, newer, at) for older, newer in pairs])
            fits = self._row_fits(digests, at - start, found).any()
            assert fits, f"no history of its KV gives the rows of position {at}"

    def _matching(
        self, digests: NDArray[U64], number: int, sample: Sample, params: SamplingParams, tokens: list[int],
        position: int, found: dict[str, NDArray[np.generic]],
    ) -> NDArray[U64]:  # fmt: skip
        """Those that give the token behind a position, its log-prob and the position's rows."""
        oracle = self.oracle(number)
        noise = oracle.noise(params.seed or 0, sample.index, position + 1) if params.temperature > 0 else 0
        fits = oracle.sample(digests, np.full(len(digests), noise, U64), number) == tokens[position + 1]
        if sample.raw_logprobs is not None:
            index = position + 1 - (len(tokens) - len(sample.token_ids))
            wanted = oracle.logprobs(digests, np.full(len(digests), tokens[position + 1]), number)
            fits &= np.isclose(wanted, sample.raw_logprobs[index], atol=1e-6)
        kept: NDArray[U64] = digests[fits & self._row_fits(digests, position - sample.start, found)]
        return kept

    def _row_fits(self, digests: NDArray[U64], row: int, found: dict[str, NDArray[np.generic]]) -> NDArray[np.bool_]:
        oracle = next(iter(self._oracles.values()))
        fits = np.ones(len(digests), bool)
        for name, rows in found.items():
            if 0 <= row < len(rows):
                wanted = oracle.rows(digests) if name == "routing" else oracle.values(digests)
                fits &= (wanted == rows[row]).reshape(len(digests), -1).all(axis=1)
        return fits

    @staticmethod
    def _rows_of(sample: Sample) -> dict[str, NDArray[np.generic]]:
        found = {name: rows for name, rows in sample.aux.items() if name != "stamp"}
        if sample.routing is not None:
            found["routing"] = sample.routing.array
        return found

    def check_beginning(
        self, streamed: Sequence[int], prompt: Sequence[int], params: SamplingParams, index: int, began: float
    ) -> None:
        """Raise AssertionError unless these are first tokens of sample `index`, whose labels nobody knows."""
        known = self.numbers(began)
        whole = [expected(prompt, params, index, self.oracle(number)).token_ids for number in known]
        if any(tuple(streamed) == tokens[: len(streamed)] for tokens in whole):
            return
        assert len(known) > 1, f"deltas {tuple(streamed)}, the oracle says {whole[0]}"
        # sampled under one of them and going on under later ones; what its KV held is seen where it has ended
        first = [tokens for tokens in whole if tokens[:1] == tuple(streamed[:1])]
        assert first, f"deltas {tuple(streamed)}, the oracles of {known} say {whole}"


def _torn(older: NDArray[U64], newer: NDArray[U64], at: int) -> NDArray[U64]:
    """Digests up to a position of every history whose first positions are of older weights, and the others of newer
    ones; arguments: the digests of those alone."""
    return np.append(older[:at] + (newer[at] - newer[:at]), newer[at])


def _check_shape(
    sample: Sample, prompt: Sequence[int], params: SamplingParams, start: int, names: Sequence[str] | None,
    oracle: Oracle,
) -> None:  # fmt: skip
    """What does not depend on weights: the end, and how many rows and log-probs there are."""
    tokens, stops = sample.token_ids, set(params.stop_token_ids)
    assert not stops & set(tokens[:-1]), f"tokens {tokens} go on behind a stop of {stops}"
    stopped = bool(tokens) and tokens[-1] in stops
    if sample.finish_reason == "stop":
        assert stopped, f"it stopped, and {tokens} end with none of {stops}"
    elif sample.finish_reason == "length":
        assert len(tokens) == params.max_tokens, f"{len(tokens)} of {params.max_tokens} tokens, ended by length"
        assert not stopped
    assert len(tokens) <= params.max_tokens
    found = {**sample.aux, **({} if sample.routing is None else {"routing": sample.routing.array})}
    config = oracle.config
    written = {"routing": config.num_moe_layers > 0, "values": config.values_spec, "stamp": config.pass_stamp}
    wanted = [name for name, is_written in written.items() if is_written] if names is None else names
    assert sorted(found) == sorted(wanted), f"there are rows of {sorted(found)}, rows of {sorted(wanted)} were wanted"
    assert sample.start == start
    if tokens:
        whole = len(prompt) + len(tokens) - 1 - start
        assert all(len(rows) == whole for rows in found.values()), f"{len(found)} kinds of rows, not {whole} of each"
    for have in (sample.raw_logprobs, sample.processed_logprobs):
        assert (have is not None) == (params.logprobs == "both")
        assert have is None or len(have) == len(tokens)
