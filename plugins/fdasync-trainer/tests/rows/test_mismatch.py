"""Figures of mismatch against slow formulas in exact or 60-digit arithmetic, and cases known in closed form."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from fdasync_trainer.rows.mismatch import Mismatch, mismatch, table
from hypothesis import given
from hypothesis import strategies as st

from fdasync import Routing
from fdasync.errors import BadInput
from tests.support.helpers import case_settings

logprobs = st.floats(-30, 0)
pairs = st.tuples(logprobs, st.one_of(logprobs, st.none()), st.floats(-1e-3, 1e-3))


def slow_k3(rollout: list[float], trainer: list[float]) -> float:
    """The mean in 60 digits; differences as float64 makes them."""
    with localcontext() as context:
        context.prec = 60
        terms = [(d := Decimal(float(np.float64(b) - a))).exp() - d - 1 for a, b in zip(rollout, trainer, strict=True)]
        return float(sum(terms) / len(terms))


def routing(sets: Any, start: int = 0, experts: int = 16, **more: Any) -> Routing:
    array = np.array(sets, np.uint8)
    return Routing(array=array, start=start, layer_ids=tuple(range(array.shape[1])), num_experts=experts, **more)


class TestLogprobs:
    @case_settings(60)
    @given(st.lists(pairs, min_size=1, max_size=30))
    def test_k3_is_that_of_60_digits(self, given_pairs):
        rollout = [a for a, _, _ in given_pairs]
        # far apart, or as near as a trainer that is right
        trainer = [min(a + near, 0.0) if b is None else b for a, b, near in given_pairs]
        one = mismatch(rollout, trainer)
        assert one.tokens == len(rollout)
        assert one.k3 == pytest.approx(slow_k3(rollout, trainer), rel=1e-13, abs=1e-46)
        far = sum(abs(b - a) > math.log(2) for a, b in zip(rollout, trainer, strict=True))
        assert one.extreme_share == far / len(rollout)

    @pytest.mark.parametrize("d", [1e-9, 1e-6, 1e-4, 0.0499999, 0.05, 0.0500001, 0.3, 5.0, 700.0])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_no_digits_are_lost(self, d, sign):
        rollout, trainer = ([-d], [0.0]) if sign > 0 else ([0.0], [-d])
        assert mismatch(rollout, trainer).k3 == pytest.approx(slow_k3(rollout, trainer), rel=2e-14, abs=0)

    def test_it_estimates_the_divergence(self):
        """K3 over all outcomes, weighted by the rollout's probability, is KL(rollout || trainer), not the other."""
        p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
        expected = sum(weight * mismatch([math.log(a)], [math.log(b)]).k3 for weight, a, b in zip(p, p, q, strict=True))
        assert expected == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)

    def test_closed_cases(self):
        assert mismatch([-1.0, -2.0], [-1.0, -2.0]).k3 == 0
        assert mismatch([math.log(0.5)], [0.0]).k3 == pytest.approx(2 - math.log(2) - 1)
        # a ratio of exactly tau is not above it
        assert mismatch([-2.0, -1.0, -2.5], [-1.0, -2.0, -1.0], tau=math.e).extreme_tokens == 1
        assert mismatch([-2.0, -1.0], [-1.0, -2.0], tau=2.7).extreme_tokens == 2

    def test_infinite_terms(self):
        one = mismatch([-1.0, -1000.0, -1.0], [-1.0, -1.0, -math.inf])
        assert one.k3 == math.inf
        assert (one.k3_infinite, one.extreme_tokens, one.tokens) == (2, 2, 3)
        assert mismatch([-1000.0], [-1.0]).k3 == math.inf
        # several of the largest that a float holds: their sum is none, their mean is
        assert mismatch([-709.0] * 5, [0.0] * 5).k3 == pytest.approx(math.exp(709), rel=1e-12)

    def test_forms_of_a_batch(self):
        random = np.random.default_rng(0)
        rollout, trainer = -random.random((3, 6)), -random.random((3, 6))
        lengths = (6, 2, 4)
        mask = np.arange(6) < np.array(lengths)[:, None]
        broken = np.where(mask, trainer, np.nan)
        wanted = mismatch(rollout[mask], trainer[mask])
        ragged = [[row[:n] for row, n in zip(side, lengths, strict=True)] for side in (rollout, trainer)]
        assert mismatch(rollout, broken, mask=mask) == wanted
        assert mismatch(rollout.tolist(), broken.tolist(), mask=mask.astype(int).tolist()) == wanted
        assert mismatch(*ragged) == wanted
        assert mismatch(tuple(ragged[0]), [one.tolist() for one in ragged[1]]) == wanted
        assert mismatch(*[[*side, []] for side in ragged]) == wanted
        assert wanted.tokens == 12

    @case_settings(60)
    @given(st.lists(st.lists(pairs, min_size=1, max_size=5), min_size=1, max_size=5), st.randoms())
    def test_merging_gives_the_figures_of_the_whole_in_any_order(self, batches, random):
        sides = [([a for a, _, _ in batch], [a if b is None else b for a, b, _ in batch]) for batch in batches]
        whole = mismatch(*[[token for side in sides for token in side[which]] for which in (0, 1)])
        parts = [mismatch(*side) for side in sides]
        random.shuffle(parts)
        while len(parts) > 1:
            at = random.randrange(len(parts) - 1)
            parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
        assert msgspec.structs.replace(parts[0], k3_mean=0.0) == msgspec.structs.replace(whole, k3_mean=0.0)
        assert parts[0].k3 == pytest.approx(whole.k3, rel=1e-13, abs=1e-46)

    def test_merging_holds_what_a_sum_of_floats_does_not(self):
        one = mismatch([-709.0] * 5, [0.0] * 5)
        assert one.merge(one).merge(one).k3 == pytest.approx(math.exp(709), rel=1e-12)

    def test_it_travels(self):
        one = mismatch([-1.0, -5.0], [-1.5, -2.0])
        assert msgspec.json.decode(msgspec.json.encode(one), type=Mismatch) == one

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            (([], []), "rollout_logprobs"),
            (([[], []], [[], []]), "rollout_logprobs"),
            ((np.zeros((0, 4)), np.zeros((0, 4))), "rollout_logprobs"),
            (([-1.0], [-1.0, -2.0]), "trainer_logprobs"),
            (([[-1.0], [-1.0]], [[-1.0]]), "trainer_logprobs"),
            (([[-1.0], [-1.0, -2.0]], [[-1.0, -2.0], [-1.0]]), "trainer_logprobs"),
            (([math.nan], [-1.0]), "rollout_logprobs"),
            (([-1.0], [math.nan]), "trainer_logprobs"),
            (([0.5], [-1.0]), "rollout_logprobs"),
            (([-1.0], [math.inf]), "trainer_logprobs"),
            (([-math.inf], [-math.inf]), "trainer_logprobs"),
            ((["x"], [-1.0]), "rollout_logprobs"),
            ((np.zeros((1, 1, 1)), np.zeros((1, 1, 1))), "rollout_logprobs"),
            (([[[-1.0]], [-1.0]], [-1.0]), "rollout_logprobs"),
        ],
    )
    def test_refused(self, arguments, field):
        with pytest.raises(BadInput) as caught:
            mismatch(*arguments)
        assert caught.value.field == field

    def test_masks_and_tau_refused(self):
        for mask, why in (([0.5, 1], "other values"), ([1], "1 entries for 2"), ([0, 0], "no token counts")):
            with pytest.raises(BadInput, match=why):
                mismatch([-1.0, -1.0], [-1.0, -1.0], mask=mask)
        for tau in (1.0, 0.0, -2.0, math.nan, math.inf, None, "2", True, [2.0], 2j, 10**400, np.float64("nan")):
            with pytest.raises(BadInput, match="tau"):
                mismatch([-1.0], [-1.0], tau=tau)
        with pytest.raises(BadInput, match="tau"):
            mismatch([-1.0], [-1.0]).merge(mismatch([-1.0], [-1.0], tau=3))

    def test_a_sample_without_tokens_adds_nothing(self):
        wanted = mismatch([-1.0, -2.0], [-1.5, -2.0])
        for rollout, trainer in (([[], [-1.0, -2.0]], [[], [-1.5, -2.0]]), ([[-1.0, -2.0], []], [[-1.5, -2.0], []])):
            assert mismatch(rollout, trainer) == wanted
            assert mismatch(rollout, trainer, mask=[[True] * len(one) for one in rollout]) == wanted

    def test_tensors(self):
        torch = pytest.importorskip("torch")
        one, two = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        wanted = mismatch([-1.0, -2.0], [-1.5, -2.0])
        assert mismatch(one, two) == mismatch(list(one), list(two)) == mismatch(one.half(), two.double()) == wanted
        assert mismatch([*one, one[0, :0]], [*two, two[0, :0]], mask=[[1, 1], []]) == wanted
        for bad, why in (
            (two.bfloat16(), "BFloat16"),
            (two.clone().requires_grad_(), "requires grad"),
            (two.to("meta"), "meta"),
        ):
            for form in (bad, list(bad)):
                with pytest.raises(BadInput, match=rf"trainer_logprobs.*{why}.*detach\(\)\.float\(\)\.cpu\(\)"):
                    mismatch(one, form)


class TestRows:
    def test_a_sample_without_tokens_may_have_none(self):
        some, none = routing([[[0, 1]]] * 3), routing(np.zeros((0, 1, 2)))
        wanted = mismatch([-1.0], [-1.5], rollout_routing=some, trainer_routing=some)
        for first, second in ((none, some), (some, none), (none, none), (None, some), (some, None), (None, None)):
            rows = {"rollout_routing": [first, some], "trainer_routing": [second, some]}
            assert mismatch([[], [-1.0]], [[], [-1.5]], **rows) == wanted
            for logprobs in ([[-1.0], []], [[-1.0], [-1.0]]):  # that sample has a token: rows were lost
                with pytest.raises(BadInput, match=r"no position in common|a Routing is needed"):
                    mismatch(logprobs, logprobs, **rows)

    def test_a_known_case(self):
        one = routing([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]])
        # the same sets in another order; one pick of one layer; both of one and one of the other
        two = routing([[[1, 0], [3, 2]], [[4, 9], [7, 6]], [[8, 9], [2, 5]]])
        found = mismatch([-1.0], [-1.0], rollout_routing=one, trainer_routing=two)
        assert (found.rows, found.row_layers, found.row_picks) == (3, 6, 12)
        assert found.differing_picks_share == 4 / 12
        assert found.differing_layers_share == 3 / 6
        assert found.differing_tokens_share == 2 / 3
        assert found.differing_layers_per_token == 1.0
        twice = found.merge(found)
        assert twice.differing_picks == 8
        assert twice.differing_picks_share == found.differing_picks_share

    @case_settings(60)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.booleans())
    def test_sets_are_compared_at_positions_of_both(self, seed, layers, top_k, uneven):
        random = np.random.default_rng(seed)
        by_layer = tuple(int(k) for k in random.integers(1, top_k + 1, layers)) if uneven else None
        samples, rows, picks, wrong_rows, wrong_layers, wrong_picks = [], 0, 0, 0, 0, 0
        for _ in range(3):
            two = []
            for _ in range(2):
                count, start = int(random.integers(3, 6)), int(random.integers(0, 3))
                ids = random.permuted(np.tile(np.arange(5), (count, layers, 1)), axis=2)[:, :, :top_k]
                two.append(routing(ids, start, 5, top_k_by_layer=by_layer))
            samples.append(two)
            tables = [{one.start + at: row for at, row in enumerate(one.array.tolist())} for one in two]
            for position in tables[0].keys() & tables[1].keys():
                counts = by_layer or (top_k,) * layers
                sets = [[set(row[:k]) for row, k in zip(t[position], counts, strict=True)] for t in tables]
                gone = [len(a - b) for a, b in zip(*sets, strict=True)]
                rows += 1
                picks += sum(counts)
                wrong_rows += any(gone)
                wrong_layers += sum(map(bool, gone))
                wrong_picks += sum(gone)
        one, two = zip(*samples, strict=True)
        found = mismatch([-1.0], [-1.0], rollout_routing=one, trainer_routing=two)
        assert (found.rows, found.row_layers, found.row_picks) == (rows, rows * layers, picks)
        assert (found.differing_rows, found.differing_layers, found.differing_picks) == (
            wrong_rows,
            wrong_layers,
            wrong_picks,
        )

    def test_long_rows_in_parts(self):
        ids = np.tile(np.arange(8, dtype=np.uint8), (30_000, 8, 1))
        other = ids.copy()
        other[29_999, 7, 3] = 12
        one, two = (routing(array) for array in (ids, other))
        found = mismatch([-1.0], [-1.0], rollout_routing=one, trainer_routing=two)
        assert (found.rows, found.row_picks) == (30_000, 30_000 * 64)
        assert (found.differing_rows, found.differing_layers, found.differing_picks) == (1, 1, 1)

    @pytest.mark.parametrize(
        ("one", "two", "field"),
        [
            (routing([[[0, 1]]]), None, "trainer_routing"),
            (None, routing([[[0, 1]]]), "rollout_routing"),
            ([routing([[[0, 1]]])], [], "trainer_routing"),
            (routing([[[0, 1]]]), routing([[[0, 1]]], start=1), "trainer_routing"),
            (routing([[[0, 1]]]), routing([[[0, 1], [0, 1]]]), "trainer_routing[0].layer_ids"),
            (routing([[[0, 1]]]), routing([[[0, 1]]], experts=9), "trainer_routing[0].num_experts"),
            (routing([[[0, 1]]]), routing([[[0]]]), "trainer_routing[0].top_k"),
            (routing([[[0, 0]]]), routing([[[0, 1]]]), "rollout_routing[0]"),
            (routing([[[0, 1]]]), routing([[[0, 99]]]), "trainer_routing[0]"),
        ],
    )
    def test_refused(self, one, two, field):
        with pytest.raises(BadInput) as caught:
            mismatch([-1.0], [-1.0], rollout_routing=one, trainer_routing=two)
        assert caught.value.field == field


class TestTable:
    def test_off_and_on(self):
        rows = {"rollout_routing": routing([[[0, 1]]] * 4), "trainer_routing": routing([[[0, 1]]] * 3 + [[[0, 2]]])}
        off = mismatch([-1.0, -2.0], [-1.001, -1.0], **rows)
        text = table({"replay off": off, "replay on": mismatch([-1.0] * 1234, [-1.001] * 1234)})
        lines = text.splitlines()
        assert len({len(line) for line in lines[1:]}) == 1
        assert "ratio > 2" in text
        first, second = (next(line for line in lines if name in line) for name in ("replay off", "replay on"))
        cells = [cell.strip() for cell in first.strip("│").split("│")]
        assert cells == ["replay off", "2", f"{off.k3:.3e}", "50.000%", "12.500%", "25.000%", "25.000%", "0.250"]
        cells = [cell.strip() for cell in second.strip("│").split("│")]
        assert cells == ["replay on", "1,234", "4.998e-07", "0.000%", "-", "-", "-", "-"]

    def test_names_are_text(self):
        one = mismatch([-1.0], [-1.0])
        text = table({"[bold]on[/] :x:": one, "x" * 200: one}, title="[red]")
        assert "[bold]on[/] :x:" in text
        assert "x" * 200 in text
        assert "[red]" in text
        with pytest.raises(BadInput, match="is empty"):
            table({})
