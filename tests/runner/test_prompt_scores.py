"""What a request keeps of the log-probs of its prompt when its positions are computed more than once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fdasync.runner.base import PromptScores
from fdasync.runner.prompt_scores import PromptLogprobs
from tests.support.helpers import case_settings

PROMPT_LEN = 12


def run_of(turn: int, start: int, stop: int) -> PromptScores:
    """The scores of pass number `turn`: each value names its pass and its position."""
    values = [-(turn * 100.0 + position) for position in range(start, stop)]
    ids = np.array([turn * 100 + position for position in range(start, stop)], "<i4")
    packed = np.array(values, "<f4").tobytes()
    return PromptScores(key=1, start=start, logprobs=packed, top=1, top_ids=ids.tobytes(), top_logprobs=packed)


@st.composite
def chunks(draw) -> list[tuple[int, int, int]]:
    """(pass, start, stop) of runs without gaps: each pass begins at a position that is scored, or at the next."""
    found, known = [], 1
    for turn in range(draw(st.integers(1, 4))):
        position = draw(st.integers(1, known))
        for _ in range(draw(st.integers(0, 4))):
            if position == PROMPT_LEN:
                break
            stop = draw(st.integers(position + 1, PROMPT_LEN))
            found.append((turn, position, stop))
            position = stop
            known = max(known, stop)
        known = position
    return found


@case_settings(60)
@given(chunks())
def test_the_latest_pass_wins_where_a_hand_off_may_start_anew(runs):
    scores, wanted = PromptLogprobs(1, 1, latest=True), {}
    for turn, start, stop in runs:
        scores.add(run_of(turn, start, stop))
        # what lies behind is computed again
        wanted = {position: value for position, value in wanted.items() if position < start}
        wanted |= {position: turn * 100 + position for position in range(start, stop)}
    assert (-scores.values()).tolist() == [wanted[position] for position in range(1, scores.stop)]
    assert [best.token_ids[0] for best in scores.alternatives()] == (-scores.values()).tolist()
    assert scores.stop == max(wanted, default=0) + 1


@case_settings(60)
@given(chunks())
def test_the_first_pass_wins_otherwise(runs):
    scores, wanted = PromptLogprobs(1, 1), {}
    for turn, start, stop in runs:
        scores.add(run_of(turn, start, stop))
        wanted = {position: turn * 100 + position for position in range(start, stop)} | wanted
    assert (-scores.values()).tolist() == [wanted[position] for position in range(1, scores.stop)]
