"""What a runner takes of the paths that a host drafts: checks `Drafts`, and follows a path to where its sequence is.

The host drafts before it knows the tokens of steps in flight, so a path begins at a token that the runner may have
sampled already. The path's tokens for positions that the sequence has are passed over, right or wrong: where a draft
was wrong in one place, those behind it are often right again (docs/design.md, rule 41). The rest are drafts. Knows no
model and no lanes. Called by runners that verify drafts; runners that keep tokens on a device do the same there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.events.actions import path_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.events.actions import Drafts, RunStep


class Path(NamedTuple):
    """Drafted tokens of one sequence, side by side.

    Attributes:
        start: position of the first one.
        most: how many the step may forward.
        tokens: int32 [count]; any bits.
    """

    start: int
    most: int
    tokens: NDArray[np.int32]


def read_paths(drafts: Drafts, speculation: int, depth: int) -> dict[int, Path]:
    """The paths by sequence. Raises InvariantBroken where columns, counts or bytes do not fit each other or the limits:
    what comes through is safe to index with, whatever its tokens are."""
    columns = (drafts.keys, drafts.starts, drafts.counts, drafts.most)
    if len(set(map(len, columns))) != 1 or len(set(drafts.keys)) != len(drafts.keys):
        raise InvariantBroken(f"drafts in columns of {', '.join(str(len(column)) for column in columns)} entries")
    limit = path_tokens(speculation, depth)
    if not all(1 <= count <= limit for count in drafts.counts):
        raise InvariantBroken(f"paths of {drafts.counts} tokens, from 1 to {limit} are taken")
    if not all(1 <= most <= speculation for most in drafts.most):
        raise InvariantBroken(f"up to {drafts.most} drafts are to be verified, from 1 to {speculation} can be")
    if min(drafts.starts, default=1) < 1:
        raise InvariantBroken(f"paths begin at positions {drafts.starts}")
    if len(drafts.tokens) != 4 * sum(drafts.counts):
        raise InvariantBroken(f"{len(drafts.tokens)} bytes are not the tokens of paths of {drafts.counts} tokens")
    tokens = np.frombuffer(drafts.tokens, "<i4").astype(np.int32, copy=False)
    paths = {}
    at = 0
    for key, start, count, most in zip(*columns, strict=True):
        paths[key] = Path(start, most, tokens[at : at + count])
        at += count
    return paths


def own_drafts_of(step: RunStep, speculation: int) -> int:
    """How many tokens the runner's own drafter drafts behind a step. Raises InvariantBroken for a number beyond what a
    step verifies."""
    if step.own_drafts is None:
        return speculation
    if not 0 <= step.own_drafts <= speculation:
        raise InvariantBroken(f"step {step.step_id} asks for {step.own_drafts} drafts, up to {speculation} are made")
    return step.own_drafts


def follow(path: Path, last: int, vocab_size: int) -> NDArray[np.int32]:
    """The drafts for positions `last` + 1 and on: none where the path begins behind that, or ended before.

    Args:
        last: position of the last sampled token.
        vocab_size: a token that is no id of the vocabulary ends the path.
    """
    passed = last + 1 - path.start
    drafts = path.tokens[passed : passed + path.most] if passed >= 0 else path.tokens[:0]
    bad = np.flatnonzero((drafts < 0) | (drafts >= vocab_size))
    return drafts[: bad[0]] if len(bad) else drafts
