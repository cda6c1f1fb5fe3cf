"""Log-probs, rows, deltas and ends on their way to the caller (`output.py`)."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.engine.request_state import RequestState
from fdasync.errors import InvariantBroken
from fdasync.events.actions import CopyRows, EmitTokens, FinishRequest, RowSpan
from fdasync.request import SamplingParams
from fdasync.result import TopLogprobs, WeightSpan
from fdasync.runner.base import StepOutput
from tests.engine.output_stage import ByteTokenizer, OutputStage, letters
from tests.support.helpers import case_settings, make_capacity

# -- the hub


async def test_deltas_joined_are_the_result():
    stage = OutputStage(ByteTokenizer())
    deltas = []
    tokens = letters("aé€ z")
    for number, token in enumerate(tokens):
        stage.emit(token)
        if number % 3:
            deltas += stage.deltas()
    stage.finish(tokens)
    deltas += stage.deltas()
    assert stage.deltas() == []
    assert sum((delta.token_ids for delta in deltas), ()) == tuple(tokens) == stage.sample.token_ids
    assert "".join(delta.text for delta in deltas) == "aé€ z" == stage.sample.text
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_a_slow_reader_gets_one_longer_delta():
    stage = OutputStage(ByteTokenizer())
    stage.emit_all(letters("hello"))
    (delta,) = stage.deltas()
    assert (delta.token_ids, delta.text) == (tuple(letters("hello")), "hello")
    assert stage.deltas() == []


async def test_an_end_without_new_tokens_is_still_told():
    stage = OutputStage()
    stage.emit(5)
    stage.deltas()
    stage.finish([5], "abort")
    (delta,) = stage.deltas()
    assert (delta.token_ids, delta.finish_reason) == ((), "abort")


async def test_without_a_tokenizer_text_is_empty():
    stage = OutputStage()
    stage.emit_all([5, 6])
    stage.finish([5, 6])
    assert stage.deltas()[0].text == stage.sample.text == ""


async def test_overrun_in_the_action_never_reaches_the_caller():
    stage = OutputStage(ByteTokenizer())
    stage.emit_all(letters("ab"))
    stage.finish(letters("ab"))
    assert stage.sample.token_ids == tuple(letters("ab"))


@pytest.mark.parametrize("text", ["", "short", "é" * 700])
async def test_final_only_equals_streamed(text):
    tokens = letters(text)
    streamed, final = (
        OutputStage(ByteTokenizer(), max_tokens=2000),
        OutputStage(ByteTokenizer(), streams=False, max_tokens=2000),
    )
    streamed.emit_all(tokens)
    streamed.deltas()
    for stage in (streamed, final):
        stage.finish(tokens)
        await stage.request.settle()
    assert streamed.sample.text == final.sample.text == text
    assert streamed.sample.token_ids == final.sample.token_ids == tuple(tokens)
    assert final.request.result(make_capacity()).ttft_s is None


async def test_long_outputs_are_decoded_in_slices():
    class Watched(ByteTokenizer):
        longest = 0

        def decode(self, token_ids):
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids)

    tokenizer = Watched()
    stage = OutputStage(tokenizer, streams=False, max_tokens=5000)
    stage.finish(letters("x" * 5000))
    turns = 0
    task = asyncio.ensure_future(stage.request.settle())
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert stage.sample.text == "x" * 5000
    assert turns > 10
    assert tokenizer.longest <= 2 * 256


# -- log-probs


def top(token):
    return TopLogprobs((token, 0), (-0.5, -3.0))


@pytest.mark.parametrize("kind", ["none", "raw", "processed", "both"])
async def test_logprobs_are_aligned_with_tokens(kind):
    stage = OutputStage(logprobs=kind, top_logprobs=0 if kind == "none" else 2)
    deltas = []
    for token in range(5):
        stage.emit(token, raw=(-float(token),), processed=(-10.0 - token,), top=(top(token),))
        if token % 2:
            deltas += stage.deltas()
    stage.finish(range(5))
    deltas += stage.deltas()
    sample = stage.sample
    raw, processed = kind in ("raw", "both"), kind in ("processed", "both")
    assert (sample.raw_logprobs is not None, sample.processed_logprobs is not None) == (raw, processed)
    if raw:
        assert sample.raw_logprobs.dtype == np.float32
        assert sample.raw_logprobs.tolist() == [0, -1, -2, -3, -4]
        assert sum((delta.raw_logprobs for delta in deltas), ()) == (0, -1, -2, -3, -4)
    if processed:
        assert sample.processed_logprobs.tolist() == [-10, -11, -12, -13, -14]
        assert sum((delta.processed_logprobs for delta in deltas), ()) == (-10, -11, -12, -13, -14)
    assert sample.logprobs is (sample.raw_logprobs if raw else sample.processed_logprobs)
    if kind != "none":
        assert [entry.token_ids[0] for entry in sample.top_logprobs] == list(range(5))
        assert sum((delta.top_logprobs for delta in deltas), ()) == sample.top_logprobs
    else:
        assert sample.top_logprobs is None


async def test_rows_of_the_output_are_picked_by_the_emits_row():
    stage = OutputStage(logprobs="raw", n=2)
    output = StepOutput(1, (10, 11, 12), raw=(-1.0, -2.0, -3.0))
    stage.processor.emit(EmitTokens(1, (1, 0), (12, 10), (2, 0)), output)
    assert [sample.raw for sample in stage.request.samples] == [[-1.0], [-3.0]]
    assert [sample.tokens for sample in stage.request.samples] == [[10], [12]]


# -- rows


def write(arena, slot, generation, first, count):
    index = slot * 4 + first + np.arange(count)
    values = {
        "routing": np.broadcast_to(index[:, None, None], (count, 3, 2)).astype(np.uint8),
        "values": np.broadcast_to(index[:, None], (count, 4)).astype(np.float16),
    }
    arena.scatter(index, np.full(count, generation), values)


async def test_rows_of_all_specs_come_with_the_end_cut_to_what_counts():
    stage = OutputStage(rows=True, start=1)
    write(stage.arena, 2, 9, 1, 3)
    write(stage.arena, 5, 4, 0, 3)
    stage.processor.copy_rows(CopyRows((RowSpan(0, (2,), (9,), 1, 3, 1), RowSpan(0, (5,), (4,), 0, 2, 4))).spans)
    stage.finish([7, 8], num_rows=4)
    sample = stage.sample
    assert sample.routing.array[:, 0, 0].tolist() == [9, 10, 11, 20]
    assert sample.routing.array.shape == (4, 3, 2)
    assert (sample.routing.start, sample.routing.layer_ids, sample.routing.num_experts) == (1, (1, 3, 5), 16)
    assert sample.aux["values"][:, 0].tolist() == [9, 10, 11, 20]
    assert set(sample.aux) == {"values"}
    assert (sample.weight_version[0].start, sample.weight_version[0].stop, sample.weight_version[0].version) == (
        0,
        2,
        "3",
    )
    stage.arena.close()


async def test_an_end_that_came_before_the_match_was_read_keeps_no_overrun():
    # an abort in the very turn that brought the matching token and one more
    stage = OutputStage(ByteTokenizer(), stop=("b",), logprobs="raw", rows=True)
    write(stage.arena, 1, 1, 0, 4)
    write(stage.arena, 2, 1, 0, 1)
    for token in letters("abc"):
        stage.emit(token, raw=(-1.0,))
    stage.processor.copy_rows((RowSpan(0, (1,), (1,), 0, 4, 0), RowSpan(0, (2,), (1,), 0, 1, 4)))
    stage.finish(letters("abc"), "abort", num_rows=5)
    (delta,) = stage.deltas()
    assert delta.token_ids == stage.sample.token_ids == tuple(letters("ab"))
    assert len(delta.raw_logprobs) == len(stage.sample.raw_logprobs) == 2
    assert stage.sample.text == "a"
    assert len(stage.sample.routing.array) == 3 + 2 - 1
    stage.arena.close()


async def test_rows_in_the_wrong_order_are_refused():
    stage = OutputStage(rows=True)
    write(stage.arena, 1, 1, 0, 4)
    write(stage.arena, 2, 1, 0, 4)
    first, second = RowSpan(0, (1,), (1,), 0, 4, 0), RowSpan(0, (2,), (1,), 0, 4, 4)
    with pytest.raises(InvariantBroken, match=r"rows of position 4 came .* is that of position 0"):
        stage.processor.copy_rows((second, first))
    stage.processor.copy_rows((first, second))
    with pytest.raises(InvariantBroken, match=r"rows of position 4 .* position 8"):
        stage.processor.copy_rows((second,))
    stage.arena.close()


@st.composite
def shuffled_spans(draw):
    """Spans of contiguous rows, cut at blocks and elsewhere, in any order; the position that they begin at."""
    start, count = draw(st.integers(0, 2)), draw(st.integers(1, 20))
    cuts = draw(st.lists(st.integers(start, start + count), max_size=3))
    edges = sorted({start, start + count, *cuts, *[at for at in range(0, start + count, 4) if at > start]})
    spans = [RowSpan(0, (low // 4,), (1,), low % 4, high - low, low) for low, high in pairwise(edges)]
    return start, draw(st.just(spans) | st.permutations(spans))


@case_settings(100)
@given(shuffled_spans())
def test_rows_are_placed_by_position_whatever_the_order_of_spans(drawn):
    start, spans = drawn

    async def play():
        stage = OutputStage(rows=True, start=start)
        try:
            for slot in range(8):
                write(stage.arena, slot, 1, 0, 4)
            have = start
            for span in spans:
                if span.start == have:
                    stage.processor.copy_rows((span,))
                    have += span.count
                else:
                    with pytest.raises(InvariantBroken):
                        stage.processor.copy_rows((span,))
            stage.finish([7], "abort", num_rows=have - start)
            sample = stage.sample
            # `write` puts the row's own place into it
            assert sample.routing.array[:, 0, 0].tolist() == list(range(start, have))
            assert sample.aux["values"][:, 0].tolist() == list(range(start, have))
            assert sample.start == start
        finally:
            stage.arena.close()

    asyncio.run(play())


async def test_rows_that_were_not_written_are_never_returned():
    stage = OutputStage(rows=True)
    with pytest.raises(InvariantBroken):
        stage.processor.copy_rows((RowSpan(0, (2,), (9,), 0, 1, 0),))
    stage.arena.close()


@pytest.mark.parametrize("rows", [True, False])
async def test_no_rows_is_an_empty_array_where_they_were_wanted_and_none_where_not(rows):
    stage = OutputStage(rows=rows)
    stage.finish([], "abort", spans=())
    assert (stage.sample.routing is not None) == rows
    if rows:
        assert stage.sample.routing.array.shape == (0, 3, 2)
        stage.arena.close()


async def test_weight_spans_cover_the_output():
    stage = OutputStage()
    stage.finish(range(5), spans=((0, "3", "a"), (2, "4", "b"), (4, "4", "c")))
    assert stage.sample.weight_version == (
        WeightSpan(0, 2, "3", "a"), WeightSpan(2, 4, "4", "b"), WeightSpan(4, 5, "4", "c")
    )  # fmt: skip


# -- ends


async def test_a_request_ends_with_its_last_sample():
    stage = OutputStage(n=3)
    stage.emit(1, 2, 3)
    stage.finish([3], key=2)
    stage.finish([1], key=0, reason="abort")
    assert (stage.request.done.done(), len(stage.processor), stage.ended) == (False, 1, [])
    stage.finish([2], key=1)
    assert (stage.request.done.done(), len(stage.processor), stage.ended) == (True, 0, [stage.request])
    result = stage.request.result(make_capacity())
    assert [(sample.index, sample.token_ids, sample.finish_reason) for sample in result.samples] == [
        (0, (1,), "abort"), (1, (2,), "length"), (2, (3,), "length"),
    ]  # fmt: skip
    assert (result.ttft_s, result.total_s, result.token_ids, result.finish_reason) == (4.0, 4.0, (1,), "abort")


async def test_a_waiting_reader_is_woken_by_tokens_and_by_the_end():
    stage = OutputStage()
    for act in (lambda: stage.emit(1), lambda: stage.finish([1])):
        stage.request.waiter = asyncio.get_running_loop().create_future()
        act()
        assert stage.request.waiter.done()
        act = None


async def test_failure_ends_every_request_with_what_it_has():
    stage = OutputStage(ByteTokenizer())
    stage.emit_all(letters("ab"))
    cause = OSError("disk")
    stage.processor.fail(cause, [])
    assert (stage.request.failure, stage.ended, len(stage.processor)) == (cause, [stage.request], 0)
    assert (stage.sample.finish_reason, stage.sample.text, stage.sample.token_ids) == ("failed", "ab", (97, 98))


async def test_what_the_scheduler_salvaged_is_in_the_partial_result():
    stage = OutputStage(ByteTokenizer(), rows=True, streams=False)
    write(stage.arena, 1, 1, 0, 4)
    stage.processor.fail(
        OSError("disk"),
        [
            CopyRows((RowSpan(0, (1,), (1,), 0, 4, 0),)),
            FinishRequest(0, "failed", (97, 98), 4, (0, 0, 0), ((0, "0", ""),)),
        ],
    )
    sample = stage.sample
    assert (sample.finish_reason, sample.text, sample.token_ids) == ("failed", "ab", (97, 98))
    assert len(sample.routing.array) == 4
    assert stage.ended == [stage.request]
    stage.arena.close()


@pytest.mark.parametrize("rows", [True, False])
async def test_a_request_cut_at_the_frontend_has_an_empty_result(rows):
    stage = OutputStage(rows=rows)
    request = RequestState("r", SamplingParams(n=2), start=0, now=1.0)
    request.specs = stage.request.specs
    stage.processor.cut(request, "deadline")
    result = request.result(make_capacity())
    assert [(sample.token_ids, sample.finish_reason) for sample in result.samples] == [((), "deadline")] * 2
    assert [sample.routing is not None for sample in result.samples] == [rows] * 2
    assert (request.done.done(), result.ttft_s, result.total_s) == (True, None, 4.0)
    if rows:
        stage.arena.close()


async def test_a_failure_leaves_the_rows_up_to_the_block_that_lacks_one():
    stage = OutputStage(rows=True, start=1)
    for slot in (1, 2):
        write(stage.arena, slot, 1, 0, 4)
    write(stage.arena, 3, 1, 0, 3)
    cause = RuntimeError("the runner died")
    stage.processor.fail(cause, [CopyRows((RowSpan(0, (1, 2, 3), (1, 1, 1), 1, 11, 1),))])
    assert stage.request.failure is cause
    assert stage.request.samples[0].num_rows == 7
    assert "rows 0 to 3 of slot 3" in cause.__notes__[0]
    stage.arena.close()


@given(st.integers(0, 3), st.integers(1, 20))
def test_a_span_of_several_slots_is_its_parts(offset, count):
    slots = tuple(range(-(-(offset + count) // 4)))
    span = RowSpan(5, slots, tuple(slot + 10 for slot in slots), offset, count, 100 + offset)
    parts = list(span.by_slot(4))
    assert [part.slots + part.generations for part in parts] == [(slot, slot + 10) for slot in slots]
    rows = [(part.slots[0] * 4 + part.offset + row, part.start + row) for part in parts for row in range(part.count)]
    assert rows == [(offset + row, 100 + offset + row) for row in range(count)]
