"""Has the runner check each grammar before a request of it is prepared; requests of one grammar share a check.

Thousands of rollouts may come at once with one new grammar, and a check takes milliseconds of one process
(docs/design.md, rule 38). Knows no grammar's contents and no runner. Called by `engine/prepare.py`.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING

from fdasync.errors import BadInput, DeadlineExceeded
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.request import Grammar

# fewer than a runner keeps compiled: what is known here is compiled there
_MAX_KNOWN = 128


class GrammarChecks:
    """See the module.

    Args:
        check: the runner's check; raises BadInput.
        deadline_s: of each caller's wait, in seconds.
    """

    def __init__(self, check: Callable[[Grammar], Awaitable[None]], deadline_s: float) -> None:
        self._check = check
        self._deadline_s = deadline_s
        # digests of grammars that passed, the one used last at the end
        self._fine: dict[bytes, None] = {}
        # by digest: done when the check has ended, with its refusal, or None where it passed or was left
        self._underway: dict[bytes, asyncio.Future[BadInput | None]] = {}

    async def check(self, grammar: Grammar) -> None:
        """Cancelling leaves a check that others wait for: one of them begins it again.

        Raises BadInput for a grammar that cannot be kept, DeadlineExceeded if checking takes too long.
        """
        digest = blake2b(grammar.packed(), digest_size=16).digest()
        if digest not in self._fine:
            try:
                async with Within(self._deadline_s):
                    await self._pass(digest, grammar)
            except TimeoutError:
                raise DeadlineExceeded("checking a grammar", self._deadline_s) from None
        self._fine.pop(digest, None)
        self._fine[digest] = None
        if len(self._fine) > _MAX_KNOWN:
            del self._fine[next(iter(self._fine))]

    async def _pass(self, digest: bytes, grammar: Grammar) -> None:
        """Check it, or wait for the check of another request."""
        passed = False
        while not passed:
            other = self._underway.get(digest)
            if other is None:
                await self._lead(digest, grammar)
                return
            await asyncio.wait([other])
            refusal = other.result()  # of a future that is done
            if refusal is not None:
                raise BadInput(refusal.field, refusal.problem, limit=refusal.limit, hint=refusal.hint)
            passed = digest in self._fine

    async def _lead(self, digest: bytes, grammar: Grammar) -> None:
        ended = self._underway[digest] = asyncio.get_running_loop().create_future()
        refusal: BadInput | None = None
        try:
            await self._check(grammar)
            self._fine[digest] = None
        except BadInput as error:
            refusal = error
            raise
        finally:
            del self._underway[digest]
            ended.set_result(refusal)
