"""The judge of answers in bfloat16, where a router's scores are only as good as its input is rounded.

How good that is, is measured before anything is judged: the reference runs over random text in bfloat16, and with the
same weights and the same rows in float32 arithmetic. By how much a logit differs between the two, over the spread of
its row's logits, is the rounding; twice the largest one seen in a layer is that layer's tolerance, as the engine rounds
about as much as the reference does, independently.

An answer's rows are then forced everywhere in one bfloat16 pass of the reference. A row that the router would not have
chosen there is tied if shifts of its logits by no more than the tolerance (times their spread) make it the choice, and
wrong otherwise. Tokens likewise. Used by `exact.py` and `tests/nightly/shapes/judge.py`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from fdasync_trainer import forced_routing
from fdasync_trainer.replay.force import Selection, find_routers, observed_routing

from benchmarks.gpu.judge import Answer, Findings, Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Logits = tuple[dict[int, torch.Tensor], dict[int, Selection]]
    Look = Callable[[torch.Tensor, dict[int, torch.Tensor]], Logits]

_TEXTS, _TEXT_TOKENS = 8, 150
_TEXT_IDS = (16, 250)
_MARGIN = 2.0
_SEARCH = 14
_TOKENS = -1  # stands for the layer that tokens are chosen in


class HalfJudge(Judge):
    """See the module; used as `Judge` is, for answers under one version of the weights.

    Attributes:
        tolerance: shift of logits over their spread, by layer; -1 is the tokens'.
        own_share: rows that the reference itself chooses otherwise in float32 arithmetic, of all in the random text.
    """

    def calibrate(self, texts: int = _TEXTS, tokens: int = _TEXT_TOKENS, vocab: tuple[int, int] = _TEXT_IDS) -> None:
        """Measure the rounding on so many random texts of so many tokens; must come before `judge`."""
        model = self.model("first")
        look = self._exact_look()
        worst: dict[int, float] = {}
        differ = total = 0
        for seed in range(texts):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(*vocab, (1, tokens), generator=generator).to(self._device)
            rows: dict[int, torch.Tensor] = {}
            with torch.no_grad(), observed_routing(model, rows):
                model(input_ids=ids, use_cache=False)
            half, full = look_at(model, ids, rows, 0), look(ids, rows)
            for layer, logits in half[0].items():
                error = (logits - full[0][layer]).abs() / full[0][layer].std(-1, keepdim=True)
                worst[layer] = max(worst.get(layer, 0.0), float(error.max()))
                if layer != _TOKENS:
                    other = full[1][layer].ids.sort(-1).values != rows[layer].cpu().sort(-1).values
                    differ, total = differ + int(other.any(-1).sum()), total + len(other)
        self.tolerance = {layer: _MARGIN * value for layer, value in worst.items()}
        self.own_share = differ / total

    def _exact_look(self) -> Look:
        """`look_at` for all logits, by the same weights in float32 arithmetic."""
        exact = self._load("first").float()
        return lambda ids, rows: look_at(exact, ids, rows, 0)

    def _one(self, answer: Answer) -> Findings:
        if len(answer.spans) > 1 or answer.routing is None:
            raise ValueError(f"cannot judge weights {answer.spans}, rows {answer.routing}")
        model = self.model("first")
        found = Findings()
        counts = found.counts
        tokens = answer.prompt + answer.tokens
        routing, start = answer.routing, answer.routing.start
        ids = torch.tensor([tokens], device=self._device)
        given = torch.from_numpy(routing.array.astype("int64"))
        counts["missing_rows"] += max(len(tokens) - 1 - start - len(given), 0) * len(routing.layer_ids)
        forced = {}
        for index, layer in enumerate(routing.layer_ids):
            table = torch.full((len(tokens), given.shape[2]), -1)
            table[start : start + len(given)] = given[:, index]
            forced[layer] = table
        logits, live = look_at(model, ids, forced, len(answer.tokens))
        sites = find_routers(model)
        for index, layer in enumerate(routing.layer_ids):
            span = slice(start, start + len(given))
            served, chosen = given[:, index].sort(-1).values, live[layer].ids[span].sort(-1).values
            rows = (served != chosen).any(-1).nonzero()[:, 0]
            counts["exact_rows"] += len(given) - len(rows)
            router = sites[layer].router
            form = _form(router, logits[layer], live[layer].scores)
            for row in rows.tolist():
                table = logits[layer][span][row]
                per_group = len(table) // sites[layer].num_groups
                shift = _shift(table, served[row].tolist(), form, per_group, live[layer].groups_kept)
                shift /= float(table.std())
                words = f"position {start + row}, layer {layer}: {served[row].tolist()}"
                self._tell(found, "rows", shift, layer, words)
        if answer.greedy:
            table = logits[_TOKENS][-len(answer.tokens) - 1 : -1]
            for at, token in enumerate(answer.tokens):
                short = float((table[at].max() - table[at, token]) / 2 / table[at].std())
                if short == 0.0:
                    counts["exact_tokens"] += 1
                else:
                    self._tell(found, "tokens", short, _TOKENS, f"token {token}, output {at}")
        return found

    def _tell(self, found: Findings, kind: str, shift: float, layer: int, words: str) -> None:
        verdict = "tied" if shift <= self.tolerance[layer] else "wrong"
        found.counts[f"{verdict}_{kind}"] += 1
        if verdict == "wrong":
            found.worst.append(f"{words}: needs a shift of {shift:.4f}, tolerance {self.tolerance[layer]:.4f}")
        elif kind == "rows":
            found.tied_distances.append(shift / self.tolerance[layer])


def look_at(model: Any, ids: torch.Tensor, rows: dict[int, torch.Tensor], outputs: int) -> Logits:
    """One pass with these rows forced: float64 router logits [T, E] by layer, those of tokens under -1; the choices.

    `outputs`: tokens whose logits are wanted, and one; 0: all.
    """
    logits: dict[int, torch.Tensor] = {}
    live: dict[int, Selection] = {}
    with torch.no_grad(), _router_logits(model, logits), forced_routing(model, rows, live=live):
        out = model(input_ids=ids, use_cache=False, logits_to_keep=outputs + 1 if outputs else 0)
    logits[_TOKENS] = out.logits[0].cpu().double()
    # looked at row by row, which a GPU does slowly
    return logits, {layer: _here(choice) for layer, choice in live.items()}


def _here(choice: Selection) -> Selection:
    groups = None if choice.group_scores is None else choice.group_scores.cpu()
    return Selection(choice.ids.cpu(), choice.scores.cpu(), groups, choice.groups_kept)


@contextmanager
def _router_logits(model: Any, logits: dict[int, torch.Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in find_routers(model).values():

            def after(_module: Any, _args: Any, output: Any, layer: int = context.layer) -> None:
                logits[layer] = output[0].detach().flatten(0, -2).cpu().double()

            stack.callback(context.router.register_forward_hook(after).remove)
        yield


def _form(router: Any, logits: torch.Tensor, scores: torch.Tensor) -> Scores:
    """What the router makes of its logits before it chooses; found by trying. Raises ValueError for another thing."""
    bias: Any = torch.zeros((), device=logits.device, dtype=torch.float64)
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        if name.rpartition(".")[2] == "e_score_correction_bias":
            bias = tensor.detach().cpu().double().flatten()

    def plain(table: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return table + shift

    def sigmoid(table: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (table + shift).sigmoid() + bias

    def softmax(table: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return table.softmax(-1) * shift.exp() + bias

    forms: tuple[Scores, ...] = (plain, sigmoid, softmax)
    for form in forms:
        if torch.allclose(form(logits, torch.zeros_like(logits)), scores.double(), rtol=1e-2, atol=1e-4):
            return form
    raise ValueError(f"{type(router).__name__} makes its scores in an unknown way")


def _shift(table: torch.Tensor, chosen: list[int], form: Scores, per_group: int, kept: int) -> float:
    """The least shift of logits [E], up for some and down for others, under which `chosen` is the choice."""
    inside = torch.zeros(len(table), dtype=torch.bool, device=table.device)
    inside[chosen] = True
    groups = len(table) // per_group
    needed = {expert // per_group for expert in chosen}
    choices = [set(range(groups))]
    if kept:
        choices = [set(some) for some in combinations(range(groups), kept) if needed <= set(some)]
    if int(inside.sum()) != len(chosen) or not choices:
        return float("inf")
    best = float("inf")
    for open_groups in choices:
        is_open = torch.tensor([at // per_group in open_groups for at in range(len(table))], device=table.device)
        low, high = 0.0, 8.0 * float(table.std())
        for _ in range(_SEARCH):
            middle = (low + high) / 2
            if _explains(table, inside, is_open, form, per_group if kept else 0, middle):
                high = middle
            else:
                low = middle
        best = min(best, high)
    return best


def _explains(
    table: torch.Tensor, inside: torch.Tensor, is_open: torch.Tensor, form: Scores, per_group: int, shift: float
) -> bool:
    # what a softmax divides by shifts as well: all of its probabilities together
    together = (0.0, -shift, -shift / 2, shift / 2, shift) if form.__name__ == "softmax" else (0.0,)
    for common in together:
        # for the groups all of an open one may rise, so experts are looked at apart
        scores = form(table, torch.where(inside, common + shift, common - shift).to(table))
        if float(scores[inside].min()) < float(scores[is_open & ~inside].max()):
            continue
        if not per_group or bool(is_open.all()):
            return True
        scores = form(table, torch.where(is_open, common + shift, common - shift).to(table))
        # a group is as good as its two best
        groups = scores.view(-1, per_group).topk(2, dim=-1).values.sum(-1)
        opened = is_open.view(-1, per_group)[:, 0]
        if float(groups[opened].min()) >= float(groups[~opened].max()):
            return True
    return False
