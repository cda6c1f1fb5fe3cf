"""Checks one grammar in a process of its own, which the kernel ends where it takes too much CPU, memory or stack.

No limit of the library bounds how long it compiles: a schema of thirty bytes (a `multipleOf` of a million) takes it
minutes. So a fork compiles each grammar first, plays some tokens, and says what both cost. What passes here compiles as
fast in the worker. Called by the child of `grammar_process.py`, which has loaded the tokenizer.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from array import array
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np

from fdasync.errors import BadInput
from fdasync.ipc.child import die_with_parent
from fdasync.ipc.deadlines import Within
from fdasync.ipc.errors import ErrorTable, Failed

if TYPE_CHECKING:
    from fdasync.request import Grammar
    from fdasync_transformers.sampling.grammars import Grammars

# of CPU: to compile with the first mask, then for a mask and its token, and for all that are played. What passes
# blocks the worker's loop once for as long as it compiles
_COMPILE_S = 0.05
_MASK_S = 0.02
_PLAY_S = 0.15
_PLAYED_TOKENS = 48
# of CPU: the kernel ends a check that takes more, wherever in the library it is
_CHECK_S = 0.3
# exit status of a fork that took too long
_SLOW = 2
# a fork on a busy machine, where it comes last, gets more time than it may use of a CPU
_PATIENCE_S = 60.0
# the worker's stack is deeper when it compiles than a fork's, and larger by so much
_STACK_NBYTES = 4 << 20
_TABLE = ErrorTable(BadInput)
# its refusals are short: one never fills a pipe
_MOST_NBYTES = 1 << 16


async def check_apart(grammars: Grammars, grammar: Grammar, memory_nbytes: int) -> None:
    """Check it in a fork of this process. Cancelling kills the fork, and waits until it is gone.

    Args:
        memory_nbytes: what the fork may allocate.

    Raises BadInput.
    """
    for attempt in range(2):
        status, told = await _forked(grammars, grammar, memory_nbytes)
        # killed by an operator, or by a machine without memory, or slowed by pages that such a machine had to find: not
        # by this grammar, unless it happens again
        if status not in (-signal.SIGKILL, -signal.SIGPROF, _SLOW) or attempt:
            break
    if told:
        raise _TABLE.unpack(msgspec.msgpack.decode(told, type=Failed))
    if status == -signal.SIGPROF:
        raise _TooSlow("to check", _CHECK_S).refusal
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        problem = f"cannot be checked: its process ended by {how}"
        raise BadInput("grammar", problem, hint="make it smaller, or nest it less deeply")


async def _forked(grammars: Grammars, grammar: Grammar, memory_nbytes: int) -> tuple[int, bytes]:
    """The exit status of a fork, negative for a signal, and the refusal that it wrote, if any."""
    read, write = os.pipe()
    try:
        try:
            pid = os.fork()
            if not pid:
                _in_the_fork(grammars, grammar, memory_nbytes, write)
        finally:
            os.close(write)
        status = await _ended(pid)
        return status, os.read(read, _MOST_NBYTES)  # blocking: its other end was closed with the fork
    finally:
        os.close(read)


async def _ended(pid: int) -> int:
    """Wait for a fork, kill it where it takes too long, and reap it."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        # no more files may be open
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - blocking: it was killed
        raise
    loop.add_reader(pidfd, _done, ended)
    try:
        async with Within(_PATIENCE_S):
            await ended
    except TimeoutError:
        raise _TooSlow("to check", _CHECK_S).refusal from None
    finally:
        loop.remove_reader(pidfd)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 - blocking: it has ended, or was killed
    return os.waitstatus_to_exitcode(status)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _in_the_fork(grammars: Grammars, grammar: Grammar, memory_nbytes: int, write: int) -> NoReturn:
    """All that a fork does: no word to the loop, and no way out but its end."""
    code = 1
    try:
        die_with_parent()
        _bound(memory_nbytes)
        status, refusal = 0, None
        try:
            _check(grammars, grammar)
        except _TooSlow as slow:
            status, refusal = _SLOW, slow.refusal
        except BadInput as error:
            refusal = error
        except BaseException as error:
            # nothing is swallowed: the pipe carries it to the parent, which raises it, and no frame may go on in a fork
            refusal = BadInput("grammar", f"cannot be checked: {type(error).__name__}: {error}"[:1000])
        if refusal is not None:
            os.write(write, msgspec.msgpack.encode(_TABLE.pack(0, refusal)))  # blocking: a pipe that is empty
        code = status
    finally:
        os._exit(code)


def _bound(memory_nbytes: int) -> None:
    """Have the kernel end this process where a grammar takes more than it may."""
    with Path("/proc/self/statm").open() as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, most in ((resource.RLIMIT_AS, mapped + memory_nbytes), (resource.RLIMIT_STACK, _STACK_NBYTES)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, _CHECK_S)


def _check(grammars: Grammars, grammar: Grammar) -> None:
    """Compile it, then draw a text from what the masks allow, and look how long each takes. Raises BadInput and
    _TooSlow."""
    began = time.process_time()
    grammars.check(grammar)
    if time.process_time() - began > _COMPILE_S:
        raise _TooSlow("to compile", _COMPILE_S)
    random = Random(0)
    matcher = grammars.matcher(0, grammar.packed(), array("i"))
    mask = np.zeros(grammars.words, np.int32)
    whole_s = 0.0
    for _ in range(_PLAYED_TOKENS):
        began = time.process_time()
        matcher.fill(mask)
        spent = time.process_time() - began
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        began = time.process_time()
        matcher.accept(int(random.choice(allowed)))
        spent += time.process_time() - began
        whole_s += spent
        if spent > _MASK_S:
            raise _TooSlow("for a token", _MASK_S)
        if whole_s > _PLAY_S:
            raise _TooSlow(f"for {_PLAYED_TOKENS} tokens", _PLAY_S)
        if matcher.problem:
            raise BadInput("grammar", f"cannot be kept: {matcher.problem}")
        if matcher.is_ended:
            return


class _TooSlow(Exception):
    """It takes too long, and `refusal` says so."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what)
        limit = f"{limit_s} s of a CPU"
        self.refusal = BadInput("grammar", f"takes too long {what}", limit=limit, hint="make it simpler or shorter")
