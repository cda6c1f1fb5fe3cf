"""What all families answered in steps when a step had two implementations, for CPUs and for GPUs: tokens, rows and
log-probs were the same in both, and are kept. Steps must answer so on.

`python support/keep_answers.py` has compared them, and writes `support/checks/kept_answers.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from device_path import answers, assert_same

if TYPE_CHECKING:
    from made import Made

FILE = Path(__file__).with_name("kept_answers.json")
#: tokens of each sequence
NEW = 12

Answers = list[tuple[list[int], Any, list[float]]]


class Kept(msgspec.Struct, frozen=True):
    """What a sequence of `device_path.answers` was answered.

    Attributes:
        shape: of its rows: positions, layers with experts, experts of a token.
        rows: experts, of each token and layer in their order by number; uint8.
        raw: log-probs, to four digits; empty where none were asked for.
    """

    tokens: list[int]
    shape: list[int]
    rows: bytes
    raw: list[float]


def read() -> dict[str, list[Kept]]:
    """By family."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, list[Kept]])


def kept(got: Answers) -> list[Kept]:
    return [
        Kept(tokens, list(rows.shape), rows.astype(np.uint8).tobytes(), [round(one, 4) for one in raw])
        for tokens, rows, raw in got
    ]


def played(kept: list[Kept]) -> Answers:
    return [(one.tokens, np.frombuffer(one.rows, np.uint8).reshape(one.shape), one.raw) for one in kept]


async def answers_as_kept(made: Made) -> None:
    assert_same(await answers(made.folder(), {"device": "cpu"}, new=NEW), played(read()[made.family]))
