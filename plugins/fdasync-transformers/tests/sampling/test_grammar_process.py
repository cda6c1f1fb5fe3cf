"""Grammars that take too long are refused, and cost the checks behind them nothing but time."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest
from fdasync_transformers.sampling import grammar_check
from fdasync_transformers.sampling.grammar_check import check_apart
from fdasync_transformers.sampling.grammar_process import MEMORY_NBYTES, GrammarProcess
from fdasync_transformers.sampling.grammars import Grammars
from fdasync_transformers.weights.random_checkpoints import EOS_ID, VOCAB_SIZE, make_random_checkpoint

from fdasync.errors import BadInput, CheckpointError, EngineClosed
from fdasync.request import Grammar
from fdasync.testing import until

FINE = Grammar("regex", "a+")
# takes the library minutes
ENDLESS = Grammar("json_schema", '{"type": "integer", "multipleOf": 9999991}')
SLOW = Grammar("gbnf", "root ::= " + " ".join(['"a"?'] * 8000))
LARGE = Grammar("regex", "((a{50}){50}){50}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(folder, "qwen3_moe", size="tiny")
    return folder / "tokenizer.json"


def is_alive(checks: GrammarProcess) -> bool:
    assert checks._child is not None
    return not checks._child.process.exited.done()


@pytest.mark.ci
@pytest.mark.parametrize("grammar", [ENDLESS, pytest.param(SLOW, marks=pytest.mark.nightly)])
async def test_what_takes_too_long_is_refused_and_the_next_is_checked(tokenizer: Path, grammar: Grammar) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,))
    both = [checks.check(grammar), checks.check(FINE)]
    slow, fine = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(slow, BadInput)
    assert slow.field == "grammar"
    assert "too long" in str(slow) or "cannot be kept" in str(slow)
    assert fine is None
    with pytest.raises(BadInput, match="cannot be kept"):
        await checks.check(Grammar("regex", "(a"))
    await checks.aclose()
    assert not is_alive(checks)
    with pytest.raises(EngineClosed):
        await checks.check(FINE)


def pid_of(checks: GrammarProcess) -> int:
    assert checks._child is not None
    return checks._child.process.pid


@pytest.mark.ci
async def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_is_checked(tokenizer: Path) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,), memory_nbytes=16 << 20)
    await checks.check(FINE)
    before = pid_of(checks)
    for _ in range(2):
        with pytest.raises(BadInput, match="signal 6") as caught:
            await checks.check(LARGE)
        assert caught.value.field == "grammar"
        await checks.check(FINE)
    assert pid_of(checks) == before
    await checks.aclose()


@pytest.mark.ci
async def test_a_child_that_others_killed_is_not_the_grammars_fault(tokenizer: Path) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,))
    await checks.check(FINE)
    os.kill(pid_of(checks), signal.SIGKILL)
    await checks.check(Grammar("regex", "c+"))
    os.kill(pid_of(checks), signal.SIGSTOP)
    waiting = asyncio.ensure_future(checks.check(Grammar("regex", "d+")))
    await until(lambda: checks._child is not None and bool(checks._child.unanswered))
    os.kill(pid_of(checks), signal.SIGKILL)
    await waiting
    await checks.aclose()


def forks_of(checks: GrammarProcess) -> list[int]:
    pid = pid_of(checks)
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.ci
async def test_grammars_that_end_their_check_end_no_other(tokenizer: Path) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,))
    await checks.check(FINE)
    before = pid_of(checks)
    slow = [asyncio.ensure_future(checks.check(ENDLESS)) for _ in range(2)]
    await until(lambda: len(forks_of(checks)) == 2)
    # an operator ends one of them: it is begun again
    os.kill(forks_of(checks)[0], signal.SIGKILL)
    await checks.check(Grammar("regex", "b+"))
    refusals = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(one, BadInput) and "too long" in str(one) for one in refusals)
    # clients that leave take their checks with them
    for _ in range(3):
        left = [asyncio.ensure_future(checks.check(ENDLESS)) for _ in range(5)]
        await until(lambda: len(forks_of(checks)) == 2)
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        assert forks_of(checks) == []
    await checks.check(Grammar("regex", "c+"))
    assert pid_of(checks) == before
    await checks.aclose()


async def test_a_machine_that_starts_no_more_processes_costs_no_descriptors(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, VOCAB_SIZE, (EOS_ID,))

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse)
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                await check_apart(grammars, FINE, MEMORY_NBYTES)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("slow_times", [1, 2])
async def test_what_was_slow_once_is_checked_again(
    slow_times: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has to find memory makes any fork slow."""

    def slow(*_: object) -> None:
        # in a fork: what it does stays in the folder alone
        came = len(list(tmp_path.iterdir()))
        (tmp_path / str(came)).touch()
        if came < slow_times:
            raise grammar_check._TooSlow("to compile", 0.05)

    monkeypatch.setattr(grammar_check, "_check", slow)
    checking = check_apart(Grammars(tokenizer, VOCAB_SIZE, (EOS_ID,)), FINE, MEMORY_NBYTES)
    if slow_times == 2:
        with pytest.raises(BadInput, match="too long to compile"):
            await checking
    else:
        await checking
    assert (tmp_path / "1").exists()
    assert not (tmp_path / "2").exists()


async def test_a_load_goes_on_where_its_caller_left(tokenizer: Path) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,))
    left = asyncio.ensure_future(checks.check(FINE))
    await until(lambda: checks._child is not None)
    before = pid_of(checks)
    left.cancel()
    await asyncio.wait([left])
    await checks.check(FINE)
    assert pid_of(checks) == before
    await checks.aclose()


async def test_a_check_that_was_left_is_not_blamed_on_the_next(tokenizer: Path) -> None:
    checks = GrammarProcess(tokenizer, VOCAB_SIZE, (EOS_ID,))
    await checks.check(FINE)
    left = asyncio.ensure_future(checks.check(ENDLESS))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await checks.check(Grammar("regex", "b+"))
    await checks.aclose()


async def test_a_tokenizer_that_cannot_be_read_is_named_each_time(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    checks = GrammarProcess(path, 10, (1,))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="llguidance"):
            await checks.check(FINE)
    await checks.aclose()
    assert not is_alive(checks)
