"""`fdasync verify-trainer`: the requests that it makes, what it compares, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fdasync_trainer import LogprobTable, ScoredSequence, WeightsName, write_logprobs
from fdasync_trainer.cli.report import Figures
from fdasync_trainer.cli.run import _behind, _only
from fdasync_trainer.cli.workload import BLOCK_TOKENS, MAX_RUNNING, Answers, Play, few_blocks, make_asks
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync.cli import main as main_module
from fdasync.errors import InstanceLost
from fdasync.stats import SchedulerStats


def run(monkeypatch, capsys, *words):
    """Exit code, and what stdout and stderr have."""
    monkeypatch.setattr(sys, "argv", ["fdasync", "verify-trainer", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def run_whole(*words):
    """Exit code and stdout of a process of its own: it starts others, on a loop that nothing watches."""
    command = [sys.executable, "-m", "fdasync", "verify-trainer", *map(str, words)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=False, text=True)
    return ended.returncode, ended.stdout


def sequence(name, values, weights=None):
    logprobs = np.array([np.nan, *values], np.float32)
    return ScoredSequence(
        request_id=name,
        token_ids=np.arange(len(logprobs), dtype=np.int32),
        prompt_len=1,
        logprobs=logprobs,
        weights=np.array([-1, *(weights or [0] * len(values))], np.int32),
    )


def test_two_files_are_compared_without_a_model(tmp_path, monkeypatch, capsys):
    weights = (WeightsName("0", "ab" * 16),)
    write_logprobs(tmp_path / "rollout", LogprobTable((sequence("a", [-1, -2]),), weights))
    write_logprobs(tmp_path / "good", LogprobTable((sequence("a", [-1, -2]),), weights))
    write_logprobs(tmp_path / "bad", LogprobTable((sequence("a", [-1, -2.5]),), weights))
    files = ("--rollout", tmp_path / "rollout", "--logprobs")
    code, out, _ = run(monkeypatch, capsys, *files, tmp_path / "good", "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["tokens"]) == (0, True, 2)
    assert json.loads(out)["not_covered"] == []
    code, out, _ = run(monkeypatch, capsys, *files, tmp_path / "bad", "--json")
    assert (code, json.loads(out)["differing"]) == (1, 1)
    assert json.loads(out)["parts"][0]["first"]["position"] == 2
    code, out, _ = run(monkeypatch, capsys, *files, tmp_path / "bad")
    assert code == 1
    assert "request a sample 0 position 2: -2.0 and -2.5" in out


def test_a_log_prob_of_the_rollout_that_is_no_number_is_a_failure(tmp_path, monkeypatch, capsys):
    weights = (WeightsName("0", "ab" * 16),)
    write_logprobs(tmp_path / "rollout", LogprobTable((sequence("a", [-1, np.nan]),), weights))
    write_logprobs(tmp_path / "trainer", LogprobTable((sequence("a", [-1, -2]),), weights))
    files = ("--rollout", tmp_path / "rollout", "--logprobs", tmp_path / "trainer")
    code, out, _ = run(monkeypatch, capsys, *files)
    assert code == 1
    assert "2 tokens, 0 with other bits, 1 that are no numbers in the rollout" in out
    assert "request a sample 0 position 2: nan and -2.0" in out
    code, out, _ = run(monkeypatch, capsys, *files, "--json")
    assert (code, json.loads(out)["parts"][0]["not_numbers"]) == (1, 1)


def test_an_interrupted_run_writes_nothing(tmp_path, monkeypatch, capsys):
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    out = tmp_path / "out"
    out.mkdir()
    seen = []

    def interrupted(*_):
        seen.append([path.name for path in out.iterdir()])
        raise KeyboardInterrupt

    monkeypatch.setattr("fdasync_trainer.cli.run.serve_all", interrupted)
    words = ("--model", tmp_path / "model", "--write")
    assert run(monkeypatch, capsys, *words, out / "rollout")[0] == 130
    assert list(out.iterdir()) == []
    (out / "rollout").write_text("of another run")
    assert run(monkeypatch, capsys, *words, out / "rollout")[0] == 130
    assert (out / "rollout").read_text() == "of another run"
    # the work began both times, and does not where nothing can be written
    os.mkfifo(tmp_path / "pipe")
    for path, problem in (
        (out / "no" / "rollout", f"--write: there is no folder {out / 'no'}"),
        (tmp_path / "pipe", "is no regular file"),
    ):
        code, _, err = run(monkeypatch, capsys, *words, path)
        assert code == 2
        assert problem in err
    assert seen == [[], ["rollout"]]


def test_options_that_do_not_go_together_are_refused(tmp_path, monkeypatch, capsys):
    write_logprobs(tmp_path / "one", LogprobTable((), ()))
    for words, problem in (
        ((), "--model: is missing"),
        (("--rollout", tmp_path / "one"), "--logprobs: is missing"),
        (("--logprobs", tmp_path / "one"), "--rollout: is missing"),
        (("--rollout", tmp_path / "one", "--logprobs", tmp_path / "one", "--model", tmp_path), "--model: does not go"),
        (("--model", tmp_path), "config.json"),
    ):
        code, _, err = run(monkeypatch, capsys, *words)
        assert code == 2
        assert problem in err


def test_what_a_rollout_did_not_do_is_told():
    figures = Figures(requests=3, preemptions=1, moved_blocks=2)
    assert figures.not_covered == ["prefix hits", "an update"]
    assert figures.as_dict()["not_covered"] == ["prefix hits", "an update"]


def test_requests_share_prefixes_do_not_fit_and_repeat():
    asks = make_asks("engine", 1000, 256, 3)
    assert asks == make_asks("engine", 1000, 256, 3)
    assert asks != make_asks("engine", 1000, 256, 4)
    assert sum(ask.params.max_tokens for ask in asks) >= 1000
    assert len({ask.prompt[:BLOCK_TOKENS] for ask in asks}) < len(asks) / 2
    assert {ask.params.temperature for ask in asks} == {1.0, 0.7}
    needs = sorted(-(-(len(ask.prompt) + ask.params.max_tokens) // BLOCK_TOKENS) for ask in asks)
    assert needs[-1] < few_blocks(asks) < sum(needs[-MAX_RUNNING:])


def test_tokens_behind_an_update_that_a_request_crossed_are_left_out():
    table = LogprobTable(
        (
            sequence("across", [-1, -2, np.nan], [0, 0, 1]),
            sequence("before", [-1, -2], [0, 0]),
            sequence("after", [-1, -2], [1, 1]),
        ),
        (WeightsName("0"), WeightsName("1")),
    )
    play = Play(name="", asks=[], results=[], weights_ids={}, crossed=frozenset({"across"}), totals=SchedulerStats())
    assert _behind(table, "0", play.crossed) == 1

    def told(changed):
        _, part = _only((play, table), "0", changed=changed)
        return {one.request_id: np.flatnonzero(one.told).tolist() for one in part.sequences}

    # what is left out is not told, and no log-prob that is not a number
    assert told(False) == {"across": [1, 2], "before": [1, 2]}
    assert told(True) == {"after": [1, 2]}


@pytest.mark.nightly
@pytest.mark.parametrize("numerics", ["default", "fixed"])
def test_a_model_is_served_in_all_ways_and_what_differs_is_named(numerics, tmp_path):
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    words = ("--model", tmp_path / "model", "--numerics", numerics, "--tokens", 600, "--num-threads", 1, "--json")
    code, out = run_whole(*words)
    found = json.loads(out)
    assert code == (0 if found["ok"] else 1)
    if numerics == "fixed":
        assert found["ok"]
    assert found["not_covered"] == []
    names = ["engine, updated weights", "engine, first weights", "prefill and decode, first weights"]
    assert [part["name"] for part in found["parts"]] == names
    assert sum(part["tokens"] for part in found["parts"]) + found["crossed_tokens"] >= 600
    # both sides had the same weights, whatever the last bits of their products
    assert all(part["other_weights"] == part["missing"] == 0 for part in found["parts"])
    assert all(part["largest_difference"] < 1e-3 for part in found["parts"])
    assert bool(found["differing"]) == bool(found["note"])


@pytest.mark.nightly
def test_ranks_that_sum_in_slices_have_the_bits_of_one_trainer(tmp_path):
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    words = ("--model", tmp_path / "model", "--tokens", 600, "--num-threads", 1, "--sum-slices", 4, "--tp", 2, "--json")
    code, out = run_whole(*words)
    found = json.loads(out)
    assert code == 0
    assert found["not_covered"] == []
    assert found["differing"] == 0


@pytest.mark.nightly
def test_what_a_rollout_writes_is_read_back(tmp_path):
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    words = ("--model", tmp_path / "model", "--numerics", "default", "--tokens", 100, "--no-pd", "--num-threads", 1)
    code, _ = run_whole(*words, "--write", tmp_path / "rollout")
    assert code in (0, 1)
    files = ("--rollout", tmp_path / "rollout", "--logprobs", tmp_path / "rollout", "--json")
    code, out = run_whole(*files)
    assert code == 0
    assert json.loads(out)["tokens"] >= 100


def test_requests_that_fail_together_are_one_error(tmp_path, monkeypatch, capsys):
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)

    async def fail(*_):
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(lost(name))

    async def lost(name):
        raise InstanceLost(name, "no room")

    monkeypatch.setattr("fdasync_trainer.cli.run.serve_all", fail)
    code, _, err = run(monkeypatch, capsys, "--model", tmp_path / "model", "--no-update")
    assert code == 2
    assert "request a: no room" in err
    assert "Traceback" not in err


async def test_few_requests_are_under_way_at_once():
    most = now = 0

    class Face:
        async def complete(self, prompt, params, request_id):
            nonlocal most, now
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    asks = make_asks("engine", 5000, 100, 0)
    assert len(await Answers(asks).serve(Face())) == len(asks)
    assert most == 2 * MAX_RUNNING
