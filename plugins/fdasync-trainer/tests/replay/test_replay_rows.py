"""Rows and layouts of a replay: every bad input named, and any batch laid out as one token at a time would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fdasync_trainer import Packed, Padded, replay_routing
from fdasync_trainer.replay.layout import Spans, derived
from fdasync_trainer.replay.rows import Rows, checked_rows, table_of
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from replay_helpers import random_routing

from fdasync import Routing
from fdasync.errors import BadInput, RoutingMismatch

LAYERS = (1, 3)
SITES: Any = {layer: SimpleNamespace(num_experts=8) for layer in LAYERS}
TOP_K = (2, 3)


def good(count: int = 4, **changes: Any) -> Routing:
    array = np.tile(np.array([[[5, 0, 0], [7, 0, 2]]], dtype=np.uint8), (count, 1, 1))
    record = Routing(array=array, start=2, layer_ids=LAYERS, num_experts=8, top_k_by_layer=TOP_K)
    return msgspec.structs.replace(record, **changes)


def with_ids(row: int, place: int, ids: list[int], dtype: Any = np.int16) -> Routing:
    array = good().array.astype(dtype)
    array[row, place] = ids
    return good(array=array)


def test_what_an_engine_gives_is_taken_as_it_is() -> None:
    record = good()
    (rows, none) = checked_rows([record, None], SITES, TOP_K, [])
    assert none is None
    assert rows is not None
    assert rows.array is record.array
    assert rows.start == 2


def test_layers_in_another_order_are_put_in_order() -> None:
    record = good(array=good().array[:, ::-1], layer_ids=LAYERS[::-1], top_k_by_layer=TOP_K[::-1])
    (rows,) = checked_rows([record], SITES, TOP_K, [])
    assert rows is not None
    assert np.array_equal(rows.array, good().array)


def test_columns_past_a_layers_own_k_are_not_read() -> None:
    checked_rows([with_ids(1, 0, [5, 0, 99])], SITES, TOP_K, [])


BAD = [
    # record, problem, layer, position
    (with_ids(1, 1, [7, 8, 2]), "expert 8 does not exist", 3, 3),
    (with_ids(2, 0, [-1, 3, 0]), "expert -1 does not exist", 1, 4),
    (with_ids(0, 1, [4, 6, 4]), "an expert twice", 3, 2),
    (with_ids(3, 0, [0, 0, 0]), "an expert twice", 1, 5),
    (with_ids(3, 0, [6, 0, 0], np.float32), "dtype float32", -1, -1),
    (with_ids(3, 0, [1, 0, 0], bool), "dtype bool", -1, -1),
    (good(array=np.zeros((4, 6), dtype=np.uint8)), "shape (4, 6)", -1, -1),
    (good(array=good().array[:, :1]), "of 1 layers and names 2", -1, -1),
    (good(array=good().array[:, :1], layer_ids=(1,)), "of layers [1], the model experts in [1, 3]", 3, -1),
    (good(layer_ids=(1, 2)), "of layers [1, 2]", 2, -1),
    (good(layer_ids=(1, 1)), "of layers [1, 1]", 3, -1),
    (good(array=good().array[:, :, :2]), "2 experts per token, the model chooses 3", -1, -1),
    (good(num_experts=9), "of 9 experts, the model has 8", 1, -1),
    (good(top_k_by_layer=(2, 2)), "2 experts per token, the model chooses 3", 3, -1),
    (good(top_k_by_layer=(2,)), "of 1 layers and names 2", -1, -1),
    (good(start=-1), "starts at position -1", -1, -1),
    (good().array, "is no routing record", -1, -1),
    (good(start=1.7), "is no routing record", -1, -1),
    (good(start=True), "True is no integer", -1, -1),
    (good(num_experts=8.9), "is no routing record", -1, -1),
    (good(layer_ids=(1.0, 3)), "is no routing record", -1, -1),
]


@pytest.mark.parametrize(("record", "problem", "layer", "position"), BAD, ids=range(len(BAD)))
def test_bad_rows_are_named(record: Any, problem: str, layer: int, position: int) -> None:
    for names in ([], ["a", "b", "c"]):
        with pytest.raises(RoutingMismatch) as caught:
            checked_rows([None, good(), record], SITES, TOP_K, names)
        error = caught.value
        assert problem in error.problem
        found = (error.sequence, error.request_id, error.layer, error.position)
        assert found == (2, "c" if names else "", layer, position)


def test_rows_past_their_sequence_are_named() -> None:
    spans = Padded(np.array([[1, 1, 0], [1, 1, 1]])).spans(2, 3)
    record = Rows(good(1).array, 2)
    assert table_of([None, record], spans, 2, 3, 8, []).replayed == 1
    for rows, position in ((Rows(good(2).array, 2), 3), (Rows(good(1).array, 7), 7), (Rows(good(0).array, 7), 7)):
        with pytest.raises(RoutingMismatch, match="the sequence 3 tokens") as caught:
            table_of([None, rows], spans, 2, 3, 8, ["a", "b"])
        assert (caught.value.sequence, caught.value.request_id, caught.value.position) == (1, "b", position)
    with pytest.raises(BadInput, match="has 1 entries"):
        table_of([record], spans, 2, 3, 8, [])
    with pytest.raises(BadInput, match="request_ids"):
        checked_rows([None], SITES, TOP_K, ["a", "b"])


def test_errors_come_before_the_forward_pass_and_leave_no_hook() -> None:
    model = make_tiny_model("qwen3_moe")
    layers = (0, 2, 3)
    array = np.tile(np.arange(3, dtype=np.uint8), (5, 3, 1))
    record = Routing(array=array, start=1, layer_ids=layers, num_experts=8)
    ids = torch.ones((1, 6), dtype=torch.long)
    with replay_routing(model, [record], request_ids=["r1"]) as replay:
        model(input_ids=ids)
        ran: list[int] = []
        handle = model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(RoutingMismatch, match="request 'r1', position 5"):
            model(input_ids=ids[:, :5])
        with pytest.raises(BadInput, match=r"has 1 entries .limit: the batch's 2"):
            model(input_ids=ids.expand(2, 6))
        handle.remove()
        assert not ran
        model(input_ids=ids)
    assert replay.replayed_tokens == 5
    array[2, 1] = [1, 2, 9]
    with pytest.raises(RoutingMismatch, match="layer 2, position 3"), replay_routing(model, [record]):
        pass
    assert not model._forward_pre_hooks
    assert not model.model.layers[0].mlp.gate._forward_pre_hooks


@st.composite
def batches(draw: Any) -> tuple[list[int], list[tuple[int, int] | None]]:
    """Lengths, and for each sequence (start, rows) or None."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    records: list[tuple[int, int] | None] = []
    for length in lengths:
        start = draw(st.integers(0, length))
        records.append(draw(st.none() | st.just((start, draw(st.integers(0, length - start))))))
    return lengths, records


@pytest.mark.ci
@given(batches(), st.sampled_from(["left", "right", "packed"]), st.integers(0, 2), st.randoms(use_true_random=False))
def test_any_batch_is_laid_out_token_by_token(batch: Any, where: str, extra: int, random: Any) -> None:
    lengths, records = batch
    routing: list[Any] = []
    for record in records:
        if record is None:
            routing.append(None)
            continue
        rows = [[[*random.sample(range(8), 2), 0], random.sample(range(8), 3)] for _ in range(record[1])]
        array = np.array(rows, dtype=np.uint8).reshape(-1, 2, 3)
        routing.append(good(array=array, start=record[0]))
    width = (sum(lengths) if where == "packed" else max(lengths)) + extra
    rows_of_batch = 1 if where == "packed" else len(lengths)
    # one token at a time: which sequence and position it is
    owner: dict[int, tuple[int, int]] = {}
    for index, length in enumerate(lengths):
        begin = {"packed": sum(lengths[:index]), "right": index * width, "left": (index + 1) * width - length}[where]
        owner |= {begin + position: (index, position) for position in range(length)}
    mask = np.array([int(t in owner) for t in range(rows_of_batch * width)]).reshape(rows_of_batch, width)
    places = np.array([owner[t][1] if t in owner else 1 for t in range(mask.size)]).reshape(mask.shape)
    layout = Packed(lengths) if where == "packed" else Padded(torch.from_numpy(mask))
    spans = layout.spans(*mask.shape)
    read = derived({"attention_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(places)}, *mask.shape)
    for found in (spans, read):
        assert found.offsets.tolist() == spans.offsets.tolist()
        assert found.lengths.tolist() == lengths
        table = table_of(checked_rows(routing, SITES, TOP_K, []), found, 2, 3, 8, [], partial=True)
        counts = {"replayed": 0, "live": 0, "padding": mask.size - len(owner)}
        for token in range(mask.size):
            index, position = owner.get(token, (0, -1))
            record = routing[index]
            offset = position - (0 if record is None else record.start)
            has = position >= 0 and record is not None and 0 <= offset < len(record.array)
            if position >= 0:
                counts["replayed" if has else "live"] += 1
            expected = record.array[offset] if has else np.full((2, 3), -1)
            assert np.array_equal(table.ids[:, token], expected)
        assert (table.replayed, table.live, table.padding) == tuple(counts.values())


def positions(*values: int) -> torch.Tensor:
    return torch.tensor([values])


ONE = torch.ones((1, 5), dtype=torch.long)
LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("arguments", "offsets", "lengths"),
    [
        ({}, [0], [5]),
        ({"attention_mask": ONE}, [0], [5]),
        ({"attention_mask": ONE, "position_ids": positions(0, 1, 2, 0, 1)}, [0, 3], [3, 2]),
        ({"position_ids": positions(0, 1, 2, 0, 1)}, [0, 3], [3, 2]),
        ({"position_ids": positions(0, 0, 0, 1, 0)}, [0, 1, 2, 4], [1, 1, 2, 1]),
        ({"attention_mask": positions(0, 0, 1, 1, 1), "position_ids": positions(1, 1, 0, 1, 2)}, [2], [3]),
        ({"attention_mask": positions(1, 1, 1, 1, 0), "position_ids": positions(0, 1, 0, 1, 0)}, [0, 2], [2, 2]),
        ({"attention_mask": positions(0, 0, 0, 0, 0), "position_ids": positions(0, 1, 2, 3, 4)}, [0], [0]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, [0, 2], [2, 2]),
    ],
)
def test_what_the_arguments_of_one_row_tell(arguments: Any, offsets: list[int], lengths: list[int]) -> None:
    spans = derived(arguments, 1, 5)
    assert (spans.offsets.tolist(), spans.lengths.tolist(), spans.total) == (offsets, lengths, 5)


def test_rows_without_a_mask_are_whole_sequences() -> None:
    for arguments in ({}, {"position_ids": torch.arange(4)[None]}, {"position_ids": torch.arange(4).expand(2, 4)}):
        spans: Spans = derived(arguments, 2, 4)
        assert (spans.offsets.tolist(), spans.lengths.tolist(), spans.total) == ([0, 4], [4, 4], 8)


@pytest.mark.parametrize(
    ("arguments", "batch", "problem"),
    [
        ({"attention_mask": torch.ones((1, 1, 5, 5))}, 1, "not .B, T."),
        ({"attention_mask": {"full_attention": None}}, 1, "not .B, T."),
        ({"attention_mask": torch.ones((1, 6))}, 1, "shape .1, 6."),
        ({"attention_mask": positions(1, 1, 0, 1, 1)}, 1, "row 0 .* one piece"),
        ({"attention_mask": positions(1, 1, 2, 2, 0)}, 1, "other values"),
        ({"position_ids": positions(1, 2, 3, 4, 5)}, 1, "count up from 0"),
        ({"position_ids": positions(0, 1, 3, 4, 5)}, 1, "count up from 0"),
        ({"position_ids": positions(0, 2, 0, 1, 2)}, 1, "count up from 0"),
        ({"position_ids": torch.zeros((3, 1, 5))}, 1, "tell no sequences"),
        ({"position_ids": positions(0, 1, 2, 0, 1)}, 2, "row 0"),
        ({"position_ids": torch.arange(5).expand(2, 5) + 3}, 2, "row 0"),
        ({"attention_mask": ONE.expand(2, 5), "position_ids": positions(0, 1, 2, 0, 1)}, 2, "row 0"),
        ({"attention_mask": ONE.expand(2, 5), "position_ids": torch.arange(10).reshape(2, 5)}, 2, "row 1"),
        ({"attention_mask": LEFT, "position_ids": torch.arange(5)[None]}, 2, "row 1"),
        ({"cu_seq_lens_q": torch.tensor([1, 2, 4])}, 1, "from 0 on"),
        ({"cu_seq_lens_q": torch.tensor([[0, 2, 4]])}, 1, "from 0 on"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 2.0])}, 1, "from 0 on"),
        ({"cu_seq_lens_q": torch.tensor([], dtype=torch.int32)}, 1, "from 0 on"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 2])}, 1, "flat list"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, 1, "6 packed tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, 2, "one row"),
    ],
)
def test_arguments_that_tell_no_layout(arguments: Any, batch: int, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        derived(arguments, batch, 5)


@pytest.mark.parametrize("lengths", [[1.5], [-1, 2], [[1, 2]], 3])
def test_lengths_that_are_none(lengths: Any) -> None:
    with pytest.raises(BadInput, match="flat list"):
        Packed(lengths).spans(1, 5)


def test_rows_that_end_early_are_refused_unless_meant() -> None:
    spans = Padded(np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])).spans(2, 5)
    for start in range(4):
        for count in range(6 - start):
            rows = [None, Rows(good(count).array, start)]
            table = table_of(rows, spans, 2, 3, 8, ["a", "b"], partial=True)
            assert table.replayed == count
            if start + count >= 4:
                assert np.array_equal(table_of(rows, spans, 2, 3, 8, ["a", "b"]).ids, table.ids)
                continue
            with pytest.raises(
                RoutingMismatch, match=f"to {start + count}, and the sequence 5 tokens.*partial"
            ) as caught:
                table_of(rows, spans, 2, 3, 8, ["a", "b"])
            assert (caught.value.sequence, caught.value.request_id) == (1, "b")
            assert caught.value.position == start + count


def test_a_record_of_another_request_is_refused_in_the_pass() -> None:
    model = make_tiny_model("qwen3_moe")
    ids = torch.arange(3, 17)[None]
    short, whole = random_routing(model, 3), random_routing(model, 14)
    with replay_routing(model, [short], request_ids=["r7"]), pytest.raises(RoutingMismatch, match=r"r7.* 14 tokens"):
        model(input_ids=ids)
    with replay_routing(model, [short], partial=True) as replay:
        model(input_ids=ids)
    assert (replay.replayed_tokens, replay.live_tokens) == (3, 11)
    with replay_routing(model, [whole]) as replay:
        model(input_ids=ids)
    assert (replay.replayed_tokens, replay.live_tokens) == (14, 0)
