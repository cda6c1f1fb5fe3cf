"""Long texts in a child process of their own: `tokenizer_process.py`."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fdasync.engine.tokenizer_process import TokenizerProcess
from fdasync.errors import DeadlineExceeded, EngineClosed, ProtocolError, TokenizerFailed, WorkerDied, WorkerStuck
from tests.support import skips

MODULE = """
import os, signal, sys, time


class Bytes:
    def __init__(self, model):
        if model == "broken":
            raise OSError("no such folder")
        self.model = model

    def encode(self, text):
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            os._exit(3)
        if text == "fail":
            raise ValueError("cannot say that")
        if text == "huge":
            return [1 << 40]
        if text == "hang":
            time.sleep(600)
        if text == "pid":
            return [os.getpid()]
        if text == "garbage":
            # what a child that lost its wits might write
            os.write(int(sys.argv[1]), (3).to_bytes(4, "little") + bytes(1) + b"xyz")
            time.sleep(600)
        return list(text.encode())
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch):
    """A distribution with a tokenizer, where the child looks for modules."""
    (tmp_path / "bytetok.py").write_text(MODULE)
    info = tmp_path / "fdasync_bytetok-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdasync-bytetok\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fdasync.tokenizers]\nbytetok = bytetok:Bytes\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(":"))


@pytest.fixture
async def tokens():
    process = TokenizerProcess("bytetok", "folder")
    yield process
    await process.aclose()


async def test_texts_are_tokenised_in_one_child_in_any_order(tokens):
    long = "aé€" * 100_000
    texts = [long, "", "short", long[:7]]
    answers = await asyncio.gather(*(tokens.encode(text, 300.0) for text in texts))
    assert answers == [list(text.encode()) for text in texts]
    (pid,) = await tokens.encode("pid", 300.0)
    assert pid != os.getpid()
    assert [pid] == await tokens.encode("pid", 300.0)


async def test_a_text_that_cannot_be_tokenised_is_an_error_of_its_own(tokens):
    with pytest.raises(TokenizerFailed, match="tokenizer bytetok: encode raised ValueError: cannot say that"):
        await tokens.encode("fail", 300.0)
    with pytest.raises(TokenizerFailed, match="tokenizer bytetok: encode gave no token ids but list: signed int"):
        await tokens.encode("huge", 300.0)
    assert await tokens.encode("ok", 300.0) == [111, 107]


@pytest.mark.parametrize(
    ("name", "model", "problem"),
    [("bytetok", "broken", "OSError: no such folder"), ("nobody", "folder", "PluginError: plugin 'nobody'")],
)
async def test_callers_are_told_of_a_tokenizer_that_cannot_be_loaded(name, model, problem):
    process = TokenizerProcess(name, model)
    for _ in range(2):
        with pytest.raises(TokenizerFailed, match=f"it cannot be loaded for {model}: {problem}") as caught:
            await process.encode("x", 300.0)
        assert caught.value.tokenizer == name
    await process.aclose()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("text", "status"), [("die", -signal.SIGKILL), ("exit", 3)])
async def test_a_death_fails_waiting_texts_and_the_next_text_gets_a_new_child(tokens, text, status):
    (before,) = await tokens.encode("pid", 300.0)
    results = await asyncio.gather(tokens.encode(text, 300.0), tokens.encode("after", 300.0), return_exceptions=True)
    assert [type(result) for result in results] == [WorkerDied, WorkerDied]
    assert (results[0].name, results[0].pid, results[0].exit_status) == ("tokenizer", before, status)
    (after,) = await tokens.encode("pid", 300.0)
    assert after != before


async def test_a_deadline_ends_the_wait(tokens):
    await tokens.encode("warm", 300.0)
    with pytest.raises(DeadlineExceeded) as caught:
        await tokens.encode("hang", 0.05)
    assert (caught.value.what, caught.value.deadline_s) == ("tokenising", 0.05)
    assert tokens._child.unanswered == 0


@pytest.mark.skips
@pytest.mark.both_loops
async def test_a_text_that_was_tokenised_while_the_loop_was_blocked_is_in_time(tokens):
    (pid,) = await tokens.encode("pid", 300.0)
    for blocked_s in (skips.BLOCKED_S, 1.2 * skips.LIMIT_S):
        encoding = asyncio.ensure_future(tokens.encode("abc", skips.LIMIT_S))
        await asyncio.sleep(0)
        skips.block(lambda: skips.said(tokens._child), blocked_s)
        assert await encoding == [97, 98, 99]
    assert await tokens.encode("pid", 300.0) == [pid]


@pytest.mark.ci
async def test_a_text_that_is_stuck_holds_up_no_later_one(tokens):
    (pid,) = await tokens.encode("pid", 300.0)
    stuck = asyncio.ensure_future(tokens.encode("hang", 0.1))
    behind = asyncio.ensure_future(tokens.encode("behind", 300.0))
    results = await asyncio.gather(stuck, behind, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineExceeded, WorkerStuck]
    assert (results[1].name, results[1].pid) == ("tokenizer", pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await tokens.encode("ok", 300.0) == [111, 107]


@pytest.mark.ci
async def test_texts_that_run_out_of_time_together_do_not_kill_the_next_child(tokens):
    await tokens.encode("warm", 300.0)

    async def stuck_then_fine():
        with pytest.raises((DeadlineExceeded, WorkerStuck)):
            await tokens.encode("hang", 0.1)
        return await tokens.encode("ok", 300.0)

    assert await asyncio.gather(*(stuck_then_fine() for _ in range(5))) == [[111, 107]] * 5


async def test_a_late_answer_is_dropped(tokens):
    await tokens.encode("warm", 300.0)
    waiting = asyncio.ensure_future(tokens.encode("first", 300.0))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await tokens.encode("second", 300.0) == list(b"second")
    assert waiting.cancelled()
    assert tokens._child.unanswered == 0


@pytest.mark.ci
async def test_a_child_that_breaks_the_protocol_is_killed_and_its_waiters_are_told(tokens):
    (pid,) = await tokens.encode("pid", 300.0)
    # it hangs after its garbage, so nothing but a kill ends it
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        await tokens.encode("garbage", 300.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await tokens.encode("ok", 300.0) == [111, 107]


async def test_closing_fails_waiting_texts_and_kills_the_child(tokens):
    (pid,) = await tokens.encode("pid", 300.0)
    waiting = asyncio.ensure_future(tokens.encode("hang", 300.0))
    await asyncio.sleep(0)
    await tokens.aclose()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineClosed):
        await tokens.encode("x", 300.0)
    await tokens.aclose()


async def test_closing_before_the_first_text_is_fine():
    await TokenizerProcess("bytetok", "folder").aclose()
