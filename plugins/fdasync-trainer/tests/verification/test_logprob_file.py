"""The file of log-probs: every bit comes back, other tools read it, what does not fit together is refused unread."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fdasync_trainer import LogprobTable, ScoredSequence, WeightsName, read_logprobs, write_logprobs
from fdasync_trainer.verification import logprob_file
from fdasync_trainer.verification.logprob_file import FORMAT
from safetensors.numpy import load_file, save_file

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


def sequence(name: str, count: int, **changes: Any) -> ScoredSequence:
    rng = np.random.default_rng(count)
    logprobs = (-rng.random(count)).astype(np.float32)
    logprobs[:2] = np.nan
    values: dict[str, Any] = {
        "request_id": name,
        "token_ids": rng.integers(0, 1000, count).astype(np.int32),
        "prompt_len": min(2, count),
        "logprobs": logprobs,
        "weights": np.where(np.isnan(logprobs), -1, count % 2).astype(np.int32),
        "digests": rng.integers(0, 1 << 63, (count, 3)).astype(np.uint64) * np.uint64(2),
    }
    return ScoredSequence(**{**values, **changes})


WEIGHTS = (WeightsName("0", "ab" * 16), WeightsName("step-1"))
TABLE = LogprobTable((sequence("a", 5), sequence("ü\n", 9, temperature=0.7), sequence("a", 6, sample=1)), WEIGHTS)


def assert_same(one: LogprobTable, other: LogprobTable) -> None:
    assert one.weights == other.weights
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        assert (ours.name, ours.prompt_len) == (theirs.name, theirs.prompt_len)
        # to the last bit: another float64 gives other log-probs
        assert ours.temperature == theirs.temperature
        for field in ("token_ids", "logprobs", "weights", "digests"):
            mine, its = getattr(ours, field), getattr(theirs, field)
            assert mine.tobytes() == its.tobytes(), field


def test_every_bit_comes_back(tmp_path: Path) -> None:
    write_logprobs(tmp_path / "one", TABLE)
    assert_same(read_logprobs(tmp_path / "one"), TABLE)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert TABLE.tokens == 5 + 9 + 6 - 3 * 2
    write_logprobs(tmp_path / "one", LogprobTable((), ()))
    assert read_logprobs(tmp_path / "one") == LogprobTable((), ())


def test_another_tool_reads_it_and_writes_its_own_log_probs(tmp_path: Path) -> None:
    """With the public library alone."""
    write_logprobs(tmp_path / "rollout", TABLE)
    tensors = load_file(tmp_path / "rollout")
    first, last = tensors["starts"][1:3]
    assert tensors["tokens"][first:last].tolist() == TABLE.sequences[1].token_ids.tolist()
    tensors["logprobs"] = tensors["logprobs"] - np.float32(1)
    del tensors["digests"]
    metadata = {"format": FORMAT, "request_ids": json.dumps(["a", "ü\n", "a"]), "weights": "[]"}
    save_file({**tensors, "weights": np.full_like(tensors["weights"], -1)}, tmp_path / "trainer", metadata)
    trainer = read_logprobs(tmp_path / "trainer")
    assert trainer.sequences[1].digests is None
    assert (trainer.sequences[1].logprobs[2:] == TABLE.sequences[1].logprobs[2:] - np.float32(1)).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": None}, "lacks the tensor tokens"),
        ({"tokens": np.zeros(3, np.int32)}, "20 entries where 3|3 entries where 20"),
        ({"logprobs": np.zeros(20, np.float64)}, "logprobs is F64"),
        ({"logprobs": np.zeros((20, 1), np.float32)}, "of 1 axes"),
        ({"samples": np.zeros(4, np.int32)}, "samples has 4 entries where 3"),
        ({"starts": np.array([0, 9, 5, 20])}, "do not rise"),
        ({"starts": np.array([0, 5, 14, 19])}, "do not rise"),
        ({"starts": np.array([1, 5, 14, 20])}, "do not rise"),
        ({"weights": np.full(20, 7, np.int32)}, "weights 7 of 2"),
        ({"weights": np.array([*[-7] * 5, *[1] * 15], np.int32)}, "weights -7 of 2"),
        ({"prompt_lens": np.array([9, 1, 1], np.int32)}, "9 tokens of its 5"),
        ({"samples": np.zeros(3, np.int32)}, "is there twice"),
        ({"temperatures": np.array([1, np.nan, 1])}, "temperature nan"),
        ({"temperatures": np.ones(3, np.float32)}, "temperatures is F32"),
        ({"digests": np.zeros((19, 3), np.uint64)}, "19 entries where 20"),
        ({"format": "fdasync.logprobs/2"}, "format"),
        ({"request_ids": '["a", "b"]'}, "where 3 belong|where 2 belong"),
        ({"request_ids": "{}"}, "metadata request_ids"),
        ({"weights_": "no JSON"}, "metadata weights"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    write_logprobs(tmp_path / "good", TABLE)
    tensors: dict[str, Any] = load_file(tmp_path / "good")
    words = {"format": FORMAT, "request_ids": '["a", "b", "a"]', "weights": '[["0", ""], ["1", ""]]'}
    for name, value in change.items():
        if isinstance(value, str):
            words[name.rstrip("_")] = value
        else:
            tensors[name] = value
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "bad", words)
    with pytest.raises(BadInput, match=problem):
        read_logprobs(tmp_path / "bad")


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    write_logprobs(tmp_path / "good", TABLE)
    whole = (tmp_path / "good").read_bytes()
    for bad in (b"", b"12345678", (1 << 40).to_bytes(8, "little") + whole, whole[:-4], whole + b"    ", b"\0" * 64):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(BadInput, match="bad"):
            read_logprobs(tmp_path / "bad")
    save_file({"tokens": np.zeros(1, np.int32)}, tmp_path / "bad")
    with pytest.raises(BadInput, match="format"):
        read_logprobs(tmp_path / "bad")


def test_a_table_that_does_not_fit_together_is_not_written(tmp_path: Path) -> None:
    one = sequence("a", 5)
    for bad, problem in (
        (sequence("b", 5, logprobs=np.zeros(4, np.float32)), "logprobs is"),
        (sequence("b", 5, token_ids=np.zeros(5, np.int64)), "token_ids is"),
        (sequence("b", 5, digests=np.zeros((4, 3), np.uint64)), "digests"),
        (sequence("a", 5), "twice"),
        (sequence("b", 5, digests=None), "only some"),
    ):
        with pytest.raises(BadInput, match=problem):
            write_logprobs(tmp_path / "bad", LogprobTable((one, bad), WEIGHTS))
    assert not list(tmp_path.iterdir())


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logprobs(tmp_path / "one", TABLE)

    def interrupted(_tensors: Any, path: Path, _metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(logprob_file, "save_file", interrupted)
    for name in ("one", "other"):
        with pytest.raises(KeyboardInterrupt):
            write_logprobs(tmp_path / name, LogprobTable((), ()))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert_same(read_logprobs(tmp_path / "one"), TABLE)
