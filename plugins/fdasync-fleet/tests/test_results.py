"""A result as messages, and messages as a result."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fdasync_fleet import results
from fdasync_fleet.instance import token_streams as streams
from fdasync_fleet.messages import (
    LeaseDrop,
    Outputs,
    Progress,
    Rows,
    SampleEnd,
    ScoredPrompt,
    WeightSpan,
    brief,
    decode,
    encode,
)
from fdasync_fleet.results import Incoming, answer_message, delta_of, sample_messages, score_messages
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.aux import AuxSpec
from fdasync.errors import ProtocolError
from fdasync.result import CachedTokens, Delta, Result, Routing, Sample, TopLogprobs
from fdasync.runner.base import PromptScores
from fdasync.runner.prompt_scores import PromptLogprobs
from tests.support.helpers import case_settings
from tests.support.router_scene import FACTS

SPECS = (AuxSpec("routing", (3, 2), "uint8"), AuxSpec("values", (4,), "float16"))
MODEL = msgspec.structs.replace(FACTS, moe_layer_ids=(1, 3, 5), num_experts=16)
LOGPROBS = st.floats(-50, 0, width=32)


@st.composite
def scores_of(draw, count):
    """Log-probs of a whole prompt of so many tokens, in the runs of some chunks."""
    scores = PromptLogprobs(draw(st.integers(0, count - 1)), draw(st.integers(0, 2)))
    while scores.stop < count:
        length = draw(st.integers(1, count - scores.stop))
        values = draw(st.lists(LOGPROBS, min_size=length, max_size=length))
        ids = draw(st.lists(st.integers(-1, 299), min_size=length * scores.top, max_size=length * scores.top))
        best = draw(st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids)))
        packed = [np.array(part, kind).tobytes() for part, kind in ((values, "<f4"), (ids, "<i4"), (best, "<f4"))]
        scores.add(PromptScores(5, scores.stop, packed[0], scores.top, *packed[1:]))
    return scores


@st.composite
def results_of(draw):
    samples = []
    prompt = draw(st.lists(st.integers(0, 299), min_size=1, max_size=6))
    names, start = draw(st.sets(st.sampled_from(["routing", "values"]))), draw(st.integers(0, len(prompt) - 1))
    for index in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 299), max_size=6))
        count = len(tokens)
        rows = {}
        if names:
            number = draw(st.integers(0, 9))
            for spec in [spec for spec in SPECS if spec.name in names]:
                size = number * spec.token_nbytes
                data = draw(st.binary(min_size=size, max_size=size))
                rows[spec.name] = np.frombuffer(data, spec.dtype).reshape(number, *spec.shape).copy()
        routing = rows.pop("routing", None)
        floats = st.lists(LOGPROBS, min_size=count, max_size=count).map(lambda each: np.array(each, np.float32))
        top = st.just(TopLogprobs((1, 2), (-0.5, -1.5)))
        samples.append(
            Sample(
                index=index,
                token_ids=tuple(tokens),
                text=draw(st.text(max_size=5)),
                raw_logprobs=draw(st.none() | floats),
                processed_logprobs=draw(st.none() | floats),
                top_logprobs=draw(st.none() | st.tuples(*[st.none() | top] * count)),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort", "deadline"])),
                cached=CachedTokens(4, 0, 8),
                weight_version=(WeightSpan(0, count, "3"),),
                routing=None if routing is None else Routing(
                    array=routing, start=start, layer_ids=MODEL.moe_layer_ids, num_experts=MODEL.num_experts
                ),
                aux=rows,
                start=start,
                stop_token_id=draw(st.none() | st.integers(0, 299)),
                stop_string=draw(st.sampled_from(["", "AA", "<|im_end|>"])),
            )
        )  # fmt: skip
    scores = draw(st.none() | scores_of(len(prompt)))
    values = None if scores is None else scores.values()
    best = None if scores is None else scores.alternatives()
    return Result(
        request_id="mine", prompt_token_ids=tuple(prompt), samples=tuple(samples), prompt_logprobs=values,
        prompt_top_logprobs=best,
    ), start, scores  # fmt: skip


def arrive(result, start, most_rows=100, scores=None):
    first = result.samples[0]
    specs = [spec for spec in SPECS if spec.name in first.aux or (spec.name == "routing" and first.routing is not None)]
    wanted = None if scores is None else PromptLogprobs(scores.start, scores.top)
    incoming = Incoming(specs, len(result.samples), most_rows, start, wanted)
    # each sample when it has ended
    for sample in reversed(result.samples):
        take_sample(incoming, sample)
    for scored in score_messages("r", 0, scores) if scores is not None else ():
        incoming.add_scores(decode(encode(scored)), 300)
    return incoming.result("mine", result.prompt_token_ids)


def take_sample(incoming, sample, **changes):
    """Over the wire: every message is encoded and decoded; `changes` are of the last one."""
    for words, payload in sample_messages("r", sample):
        message = decode(encode(words))
        if isinstance(message, Rows):
            incoming.add(message, bytes(payload))
        elif isinstance(message, Outputs):
            incoming.add_outputs(message)
        else:
            whole = incoming.add_end(msgspec.structs.replace(message, **changes), MODEL)
    return whole


def arrays(sample):
    routing = None if sample.routing is None else sample.routing.array
    return [routing, sample.raw_logprobs, sample.processed_logprobs, *[sample.aux[name] for name in sorted(sample.aux)]]


def plain(sample):
    routing = None if sample.routing is None else msgspec.structs.replace(sample.routing, array=None)
    return msgspec.structs.replace(sample, routing=routing, raw_logprobs=None, processed_logprobs=None, aux={})


@case_settings(60)
@given(results_of())
def test_a_result_comes_back_as_it_went(given_result):
    result, start, scores = given_result
    back = arrive(result, start, scores=scores)
    assert back.prompt_top_logprobs == result.prompt_top_logprobs
    assert (back.prompt_logprobs is None) == (scores is None)
    if scores is not None:
        assert back.prompt_logprobs.tobytes() == result.prompt_logprobs.tobytes()
        assert back.prompt_logprobs.flags.writeable
    assert (back.request_id, back.prompt_token_ids) == (result.request_id, result.prompt_token_ids)
    assert back.usage == result.usage
    for ours, theirs in zip(back.samples, result.samples, strict=True):
        assert plain(ours) == plain(theirs)
        assert sorted(ours.aux) == sorted(theirs.aux)
        for one, other in zip(arrays(ours), arrays(theirs), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
                # it is the caller's
                assert one.flags.writeable


def test_a_sample_without_rows_is_one_message():
    sample = msgspec.structs.replace(sample_with(1), routing=None, token_ids=(3, 1, 2), text="abc")
    answer = decode(encode(answer_message("r", sample)))
    incoming = Incoming([], 1, 10, 0)
    incoming.add_outputs(answer.outputs)
    assert incoming.add_end(answer.end, MODEL) == sample
    assert answer.request == answer.end.request == answer.outputs.request == "r"


def test_rows_or_more_than_a_run_are_no_single_message():
    sample = msgspec.structs.replace(sample_with(1), routing=None)
    assert answer_message("r", sample_with(1)) is None
    assert answer_message("r", msgspec.structs.replace(sample, token_ids=(1,) * (results.RUN_TOKENS + 1))) is None
    assert answer_message("r", msgspec.structs.replace(sample, text="a" * (results.RUN_CHARS + 1))) is None
    assert answer_message("r", msgspec.structs.replace(sample, token_ids=(1,) * results.RUN_TOKENS)) is not None


def sample_with(rows, index=0):
    array = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2)
    routing = Routing(array=array, start=0, layer_ids=(1, 3, 5), num_experts=16)
    return Sample(
        index=index, token_ids=(1,), text="", raw_logprobs=None, processed_logprobs=None, top_logprobs=None,
        finish_reason="length", cached=CachedTokens(), weight_version=(), routing=routing, aux={},
    )  # fmt: skip


def test_rows_travel_in_runs_that_a_link_takes(monkeypatch):
    monkeypatch.setattr(results, "MAX_PAYLOAD_NBYTES", 20)
    result = Result(request_id="mine", prompt_token_ids=(1,), samples=(sample_with(8), sample_with(2, 1)))
    sent = [pair for sample in result.samples for pair in sample_messages("r", sample)]
    runs = [(words.index, words.start, words.count, len(data)) for words, data in sent if isinstance(words, Rows)]
    assert runs == [(0, 0, 3, 18), (0, 3, 3, 18), (0, 6, 2, 12), (1, 0, 2, 12)]
    back = arrive(result, 0)
    assert (back.samples[0].routing.array == result.samples[0].routing.array).all()


@case_settings(60)
@given(st.permutations(range(4)), st.integers(0, 50), st.integers(-2, 2))
def test_runs_of_rows_are_placed_by_position_and_by_nothing_else(order, start, shift):
    incoming = Incoming(SPECS, 1, 100, start)
    shift = max(shift, -start)
    runs = [(Rows("r", 0, "routing", start + 2 * at + shift, 2), bytes([at]) * 12) for at in order]
    placed = 0
    for words, payload in runs:
        if words.start == start + 2 * placed:
            incoming.add(words, payload)
            placed += 1
            continue
        with pytest.raises(ProtocolError, match=f"rows of position {words.start} .* position {start + 2 * placed}"):
            incoming.add(words, payload)
    assert (placed == 4) == (order == sorted(order) and not shift)


@pytest.mark.parametrize(
    ("words", "payload"),
    [
        (Rows("r", 0, "routing", 1, 1), bytes(6)),  # not the next ones
        (Rows("r", 1, "routing", 0, 1), bytes(6)),  # no such sample
        (Rows("r", 0, "unheard of", 0, 1), bytes(6)),
        (Rows("r", 0, "routing", 0, 1), bytes(5)),
        (Rows("r", 0, "routing", 0, 2), bytes(6)),
        (Rows("r", 0, "routing", 0, 1), None),
        (Rows("r", 0, "routing", 0, 11), bytes(66)),  # more than it can have
    ],
)
def test_rows_that_are_not_what_they_should_be_are_refused(words, payload):
    incoming = Incoming(SPECS, 1, 10, 0)
    with pytest.raises(ProtocolError):
        incoming.add(words, payload)
    # and change nothing
    incoming.add(Rows("r", 0, "routing", 0, 10), bytes(60))
    with pytest.raises(ProtocolError):
        incoming.add(Rows("r", 0, "routing", 10, 1), bytes(6))


def scored(first=3, values=(-1.0, -2.0), ids=(1, 2), best=(-0.5, -0.5), top=1):
    parts = [np.array(part, kind).tobytes() for part, kind in ((values, "<f4"), (ids, "<i4"), (best, "<f4"))]
    return ScoredPrompt("r", 0, first, parts[0], top, *parts[1:])


@pytest.mark.parametrize(
    "message",
    [
        scored(first=2),
        scored(first=4),
        scored(first=9),
        scored(values=()),
        scored(values=(-1.0, float("nan"))),
        scored(best=(-1.0, float("nan"))),
        scored(ids=(1, 300)),
        scored(ids=(-2, 3)),
        scored(ids=(1, 2, 3)),
        scored(best=(-1.0,)),
        scored(top=2),
        scored(top=0, ids=(), best=()),
        msgspec.structs.replace(scored(), top_ids=bytes(7)),
        msgspec.structs.replace(scored(), logprobs=bytes(7)),
    ],
)
def test_log_probs_of_a_prompt_that_are_not_what_they_should_be_are_refused(message):
    incoming = Incoming((), 1, 10, 0, PromptLogprobs(3, 1))
    with pytest.raises(ProtocolError):
        incoming.add_scores(message, 300)
    # and change nothing
    incoming.add_scores(scored(), 300)
    with pytest.raises(ProtocolError):
        incoming.add_scores(scored(), 300)
    with pytest.raises(ProtocolError):
        Incoming((), 1, 10, 0).add_scores(scored(), 300)


def test_a_result_lacks_no_log_prob_of_its_prompt():
    sample = msgspec.structs.replace(sample_with(0), routing=None)
    whole = Result(request_id="mine", prompt_token_ids=(1, 2, 3, 4, 5), samples=(sample,))
    for message in (None, scored(), scored(values=(-1.0,), ids=(1,), best=(-1.0,))):
        incoming = Incoming((), 1, 10, 0, PromptLogprobs(3, 1))
        take_sample(incoming, sample)
        if message is not None:
            incoming.add_scores(message, 300)
        if message is not None and len(message.logprobs) == 8:
            assert incoming.result("mine", whole.prompt_token_ids).prompt_logprobs.tolist() == [-1.0, -2.0]
            continue
        with pytest.raises(ProtocolError, match="it has 5"):
            incoming.result("mine", whole.prompt_token_ids)


def test_an_end_that_does_not_fit_its_rows_is_refused():
    sample = sample_with(3)
    specs = SPECS[:1]

    def end(**changes):
        return take_sample(Incoming(specs, 1, 10, 0), sample, **changes)

    assert len(end().routing.array) == 3
    other = AuxSpec("routing", (3, 3), "uint8")
    for changes in (
        {"num_rows": 2},
        {"num_rows": 4},
        {"num_rows": None},
        {"aux": (other,)},
        {"aux": ()},
        {"aux": (), "num_rows": None},
        {"aux": (*specs, SPECS[1])},
        {"num_tokens": 0},
        {"num_tokens": 2},
        {"index": 1},
    ):
        with pytest.raises(ProtocolError):
            end(**changes)
    incoming = Incoming(SPECS, 1, 10, 0)
    with pytest.raises(ProtocolError, match=r"rows of \['routing'\] .* of \['routing', 'values'\] were asked for"):
        take_sample(incoming, sample)
    incoming = Incoming(specs, 1, 10, 0)
    incoming.add(Rows("r", 0, "routing", 0, 3), bytes(18))
    with pytest.raises(ProtocolError, match="0 tokens"):
        incoming.add_end(SampleEnd("r", 0, 1, "length", (0, 0, 0), (), None, 3, specs), MODEL)


def test_a_sample_ends_once_and_a_result_has_every_one():
    incoming = Incoming(SPECS[:1], 2, 10, 0)
    take_sample(incoming, sample_with(3, 1))
    with pytest.raises(ProtocolError, match="1 samples came, 2 were asked for"):
        incoming.result("mine", (1,))
    for late in (Rows("r", 1, "routing", 3, 1), outputs(first=1, index=1)):
        with pytest.raises(ProtocolError, match="not expected"):
            incoming.add(late, bytes(6)) if isinstance(late, Rows) else incoming.add_outputs(late)
    with pytest.raises(ProtocolError, match="sample 1 of 2"):
        incoming.add_end(SampleEnd("r", 1, 1, "length", (0, 0, 0), (), None, 3, SPECS[:1]), MODEL)
    first = take_sample(incoming, sample_with(2))
    assert incoming.result("mine", (1,)).samples[0] is first


def outputs(first=0, tokens=4, text="", raw=None, processed=None, top=None, index=0):
    return Outputs("r", index, first, bytes(tokens), text, raw, processed, top)


@pytest.mark.parametrize(
    "words",
    [
        outputs(first=1),  # not the next ones
        outputs(index=1),  # no such sample
        outputs(tokens=5),
        outputs(tokens=44),  # more than it can have
        outputs(text="x" * 3000),
        outputs(raw=bytes(8)),
        outputs(processed=bytes(3)),
        outputs(top=()),
    ],
)
def test_outputs_that_are_not_what_they_should_be_are_refused(words):
    incoming = Incoming(SPECS, 1, 10, 0)
    with pytest.raises(ProtocolError):
        incoming.add_outputs(words)
    # and change nothing
    incoming.add_outputs(outputs(tokens=20, raw=bytes(20)))
    with pytest.raises(ProtocolError, match="fit together"):
        incoming.add_outputs(outputs(first=5, tokens=20))
    incoming.add_outputs(outputs(first=5, tokens=20, raw=bytes(20)))


def test_a_result_may_be_larger_than_a_message():
    count = 3 * results.RUN_TOKENS + 5
    samples = tuple(
        Sample(
            index=index, token_ids=tuple(range(count)), text="abc" * count, raw_logprobs=np.zeros(count, np.float32),
            processed_logprobs=np.ones(count, np.float32),
            top_logprobs=(TopLogprobs(tuple(range(20)), (-1.0,) * 20),) * count, finish_reason="length",
            cached=CachedTokens(), weight_version=(), routing=None, aux={},
        )
        for index in range(2)
    )  # fmt: skip
    incoming = Incoming((), 2, count, 0)
    for sample in samples:
        take_sample(incoming, sample)
    back = incoming.result("mine", (1,))
    assert [plain(one) for one in back.samples] == [plain(one) for one in samples]


def test_a_long_delta_goes_in_several_messages():
    count = 2 * results.RUN_TOKENS + 1
    delta = Delta(index=0, token_ids=tuple(range(count)), text="y" * 10, finish_reason="length")
    pieces = streams._runs("r", delta)
    sent = [decode(encode(Progress(group))) for group in streams.groups(pieces)]
    assert len(sent) == 3
    back = [delta_of(piece) for message in sent for piece in message.pieces]
    assert tuple(token for one in back for token in one.token_ids) == delta.token_ids
    assert ("".join(one.text for one in back), back[-1].finish_reason) == (delta.text, "length")
    assert [one.finish_reason for one in back[:-1]] == [None, None]


def test_words_of_an_error_are_cut_to_what_a_message_carries():
    for text in ("x" * 10_000, "\ud800 lone", "\U0001f600" * 5000, ""):
        words = decode(encode(LeaseDrop("r", 0, brief(text))))
        assert len(words.reason) <= 4096
        assert words.reason[:1] == (text[:1].encode(errors="replace").decode())
