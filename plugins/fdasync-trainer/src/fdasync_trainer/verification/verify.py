"""Checks an engine's tokens and routing rows against the library's own plain forward pass.

For each request the reference model runs once over prompt and output: float32, no cache, no batch. Greedy
tokens must be the argmax at their positions, and every routing row (one position of one layer) must be the
same set of experts. A request with any difference gets one more run in which the engine's rows are forced
everywhere, so that one swapped expert does not change the inputs of all later rows; every row and token of
the request is then judged there: exact, tied, or wrong.

*Tied* means that every swapped expert lies within 1e-5 x the largest selection score of the boundary of the
selection (for a change of group: on the group scores). The score is the router logit where the selection
is by logits or by a softmax of them. Where a correction bias is added to the softmax or sigmoid, the score is
that sum; see `Selection` in `replay/force.py`. Tokens are judged the same way on their logits.

Knows nothing of engines: it reads a few fields of a result. Called by users, tests and benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence  # msgspec looks the annotations up
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from fdasync.errors import BadInput
from fdasync_trainer.replay.force import RouterSite, Selection, find_routers, forced_routing, observed_routing
from fdasync_trainer.verification.reference import library_model
from fdasync_trainer.verification.scores import TOLERANCE, choice_distance, grouped_distance, token_distance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_TIED_SHARE = 1e-3

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Served(msgspec.Struct, frozen=True):
    """One finished or aborted request, as the engine served it.

    Attributes:
        prompt_token_ids, token_ids: of prompt and output.
        greedy: temperature 0, no penalties and no min_tokens, so that tokens must be argmaxes; else tokens
            are taken as given and only rows are checked.
        routing: None, or an object with `array` (integers [n, L, K] for positions start to start+n),
            `start`, `layer_ids` (L hidden-layer numbers) and `num_experts`.
        wants_rows: the request finished with routing on, so it must have every row from `start` to the last forwarded
            position; absent rows are counted as missing. False for requests that were cut short.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    greedy: bool = True
    routing: Any = None
    wants_rows: bool = False

    @classmethod
    def from_result(cls, result: Any, *, greedy: bool = True) -> Served:
        """A request made of an engine's result (its first sample); keeps references, copies nothing.

        All rows are wanted if the result has routing and finished by itself.
        """
        whole = result.routing is not None and result.finish_reason in ("stop", "length")
        return cls(result.prompt_token_ids, result.token_ids, greedy, result.routing, whole)


class Difference(msgspec.Struct, frozen=True):
    """A row or token that differs from the reference's.

    Attributes:
        verdict: see the module.
        request: number among the given requests.
        position: absolute, of the row or the token.
        layer: hidden-layer number of a row; None for a token.
        served, reference: expert ids ascending, or the one token id.
        distance: of the worst swapped item from the boundary, over the largest score; inf for a row that no router
            could choose (repeated or unknown experts).
    """

    verdict: Literal["tied", "wrong"]
    request: int
    position: int
    layer: int | None
    served: tuple[int, ...]
    reference: tuple[int, ...]
    distance: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `verify`. Counts add up: checked = equal (exact) + tied + wrong.

    Attributes:
        requests: how many were checked.
        tokens_checked, tokens_equal, tokens_tied, tokens_wrong: tokens of greedy requests.
        rows_checked, rows_exact, rows_tied, rows_wrong: (position, layer) pairs.
        rows_missing: rows that finished requests should have and do not have; not among the checked rows.
        forced_runs: requests that needed a second run.
        differences: the first wrong ones, then the first tied ones; bounded.
    """

    requests: int
    tokens_checked: int
    tokens_equal: int
    tokens_tied: int
    tokens_wrong: int
    rows_checked: int
    rows_exact: int
    rows_tied: int
    rows_wrong: int
    rows_missing: int
    forced_runs: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Nothing wrong or missing, and at most 0.1 % of the rows, and of the tokens, tied."""
        return (
            self.tokens_wrong == self.rows_wrong == self.rows_missing == 0
            and self.rows_tied <= MAX_TIED_SHARE * self.rows_checked
            and self.tokens_tied <= MAX_TIED_SHARE * self.tokens_checked
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, `ok` included; infinite distances become None, so that JSON takes it."""
        out: dict[str, Any] = msgspec.to_builtins(self)
        for difference in out["differences"]:
            if difference["distance"] == float("inf"):
                difference["distance"] = None
        return {"ok": self.ok, **out}


def verify(
    model: str | os.PathLike[str] | torch.nn.Module,
    served: Iterable[Served],
    *,
    progress: Callable[[int, int], None] | None = None,
    max_differences: int = 20,
) -> Report:
    """Check requests against a plain forward pass of the same weights.

    Args:
        model: checkpoint folder (loaded in float32 on the CPU, a quantised one by this package's own loader), or a
            causal LM in eval mode and float32.
        served: the requests.
        progress: called with (requests done, requests in all) after each request.
        max_differences: most wrong, and most tied, differences that the report lists.

    Raises:
        BadInput: records whose shapes, ranges, layers or number of experts cannot be the model's.
        CheckpointError: the folder does not load.
        UnsupportedModel: rows differ and the family's routing cannot be forced (llama4), or the folder is quantised in
            a way that is not known.
    """
    requests = list(served)
    reference = _reference(model)
    sites = find_routers(reference)
    vocab_size = int(reference.get_input_embeddings().weight.shape[0])
    records = [_Record(request, f"served[{i}]", sites, vocab_size) for i, request in enumerate(requests)]
    tally = _Tally(max_differences)
    with torch.no_grad(), _spare_core():
        for number, record in enumerate(records):
            _check(reference, sites, number, record, tally)
            if progress is not None:
                progress(number + 1, len(records))
    return tally.report(len(records))


class _Record:
    """A request whose fields were checked.

    Attributes:
        field: name of the request, for errors.
        tokens: int64 [T], prompt then output.
        prompt_len: tokens of the prompt.
        greedy, wants_rows: as of `Served`.
        rows: int64 [n, L, K], layers ascending as in the model, or None.
        start: position of the first row.
    """

    def __init__(self, request: Served, field: str, sites: dict[int, RouterSite], vocab_size: int) -> None:
        prompt = _ints(request.prompt_token_ids, f"{field}.prompt_token_ids", 1)
        output = _ints(request.token_ids, f"{field}.token_ids", 1)
        if not prompt.size:
            raise BadInput(f"{field}.prompt_token_ids", "is empty")
        self.field = field
        self.tokens = np.concatenate([prompt, output])
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise BadInput(field, "has token ids outside the vocabulary", limit=f"0 to {vocab_size - 1}")
        self.prompt_len = len(prompt)
        self.greedy = request.greedy
        self.start = 0
        self.rows: Ints | None = None
        self.wants_rows = request.wants_rows
        if request.routing is not None:
            self._read_routing(request.routing, f"{field}.routing", sites)

    def _read_routing(self, routing: Any, field: str, sites: dict[int, RouterSite]) -> None:
        try:
            array, start, layer_ids, num_experts = (
                routing.array,
                int(routing.start),
                [int(layer) for layer in routing.layer_ids],
                int(routing.num_experts),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(field, f"lacks what a routing record has: {error}") from error
        rows = _ints(array, f"{field}.array", 3)
        if sorted(layer_ids) != list(sites):
            raise BadInput(f"{field}.layer_ids", f"{layer_ids} are not the model's", limit=f"{list(sites)}")
        if rows.shape[1] != len(layer_ids):
            raise BadInput(f"{field}.array", f"has {rows.shape[1]} layers", limit=len(layer_ids))
        if any(site.num_experts != num_experts for site in sites.values()):
            limit = max(site.num_experts for site in sites.values())
            raise BadInput(f"{field}.num_experts", f"is {num_experts}, not the model's", limit=limit)
        if start < 0 or start + len(rows) > len(self.tokens):
            span = f"positions {start} to {start + len(rows)}"
            raise BadInput(field, f"covers {span}", limit=f"0 to {len(self.tokens)}")
        self.start = start
        self.num_experts = num_experts
        self.rows = rows[:, np.argsort(layer_ids)]

    def layer_rows(self, index: int, top_k: int) -> tuple[Ints, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Rows of one layer [n, top_k], each ascending, and a mask of the rows that a router could choose."""
        assert self.rows is not None  # callers ask only where there are rows
        rows = np.sort(self.rows[:, index, :top_k], axis=-1)
        possible = (rows[:, 0] >= 0) & (rows[:, -1] < self.num_experts) & (np.diff(rows, axis=-1) > 0).all(axis=-1)
        return rows, possible


class _Tally:
    """Counts and the first differences."""

    def __init__(self, max_differences: int) -> None:
        self._limit = max_differences
        self._counts = {
            "token": {"checked": 0, "tied": 0, "wrong": 0},
            "row": {"checked": 0, "tied": 0, "wrong": 0},
        }
        self._listed: dict[str, list[Difference]] = {"wrong": [], "tied": []}
        self.forced_runs = 0
        self.rows_missing = 0

    def checked(self, kind: Literal["token", "row"], count: int) -> None:
        self._counts[kind]["checked"] += count

    def differs(
        self, request: int, position: int, layer: int | None, served: Any, reference: Any, distance: float
    ) -> None:
        verdict: Literal["tied", "wrong"] = "tied" if distance <= TOLERANCE else "wrong"
        self._counts["token" if layer is None else "row"][verdict] += 1
        if len(self._listed[verdict]) < self._limit:
            found = Difference(
                verdict=verdict,
                request=request,
                position=position,
                layer=layer,
                served=tuple(int(i) for i in served),
                reference=tuple(int(i) for i in reference),
                distance=distance,
            )
            self._listed[verdict].append(found)

    def report(self, requests: int) -> Report:
        tokens, rows = self._counts["token"], self._counts["row"]
        return Report(
            requests=requests,
            tokens_checked=tokens["checked"],
            tokens_equal=tokens["checked"] - tokens["tied"] - tokens["wrong"],
            tokens_tied=tokens["tied"],
            tokens_wrong=tokens["wrong"],
            rows_checked=rows["checked"],
            rows_exact=rows["checked"] - rows["tied"] - rows["wrong"],
            rows_tied=rows["tied"],
            rows_wrong=rows["wrong"],
            rows_missing=self.rows_missing,
            forced_runs=self.forced_runs,
            differences=(*self._listed["wrong"], *self._listed["tied"]),
        )


def _check(model: Any, sites: dict[int, RouterSite], number: int, record: _Record, tally: _Tally) -> None:
    chosen: dict[int, torch.Tensor] = {}
    with observed_routing(model, chosen):
        logits = _forward(model, record)
    outputs = record.tokens[record.prompt_len :]
    if record.wants_rows:
        # the last token was never forwarded
        have = 0 if record.rows is None else len(record.rows)
        tally.rows_missing += max(len(record.tokens) - 1 - record.start - have, 0) * len(sites)
    if record.greedy:
        tally.checked("token", len(outputs))
    same = not record.greedy or bool((logits.argmax(dim=-1).cpu().numpy() == outputs).all())
    if record.rows is not None:
        top_ks = [chosen[layer].shape[-1] for layer in sites]
        if record.rows.shape[2] != max(top_ks):
            raise BadInput(f"{record.field}.routing.array", f"has {record.rows.shape[2]} columns", limit=max(top_ks))
        tally.checked("row", record.rows.shape[0] * record.rows.shape[1])
        for index, layer in enumerate(sites):
            rows, _ = record.layer_rows(index, top_ks[index])
            same = same and np.array_equal(rows, _span(chosen[layer], record, sort=True))
    if not same:
        tally.forced_runs += 1
        _judge(model, list(sites), number, record, tally, [chosen[layer].shape[-1] for layer in sites])


def _judge(
    model: Any, layers: Sequence[int], number: int, record: _Record, tally: _Tally, top_ks: Sequence[int]
) -> None:
    """Run again with the record's possible rows forced, and list the differences."""
    forced: dict[int, Ints] = {}
    if record.rows is not None:
        for index, layer in enumerate(layers):
            _, possible = record.layer_rows(index, top_ks[index])
            table = np.full((len(record.tokens), top_ks[index]), -1, dtype=np.int64)
            own = record.rows[:, index, : top_ks[index]]
            table[record.start : record.start + len(own)] = np.where(possible[:, None], own, -1)
            forced[layer] = table
    live: dict[int, Selection] = {}
    with forced_routing(model, forced, live=live):
        logits = _forward(model, record).double().cpu().numpy()
    if record.rows is not None:
        for index, layer in enumerate(layers):
            _judge_layer(number, record, tally, index, layer, live[layer])
    if record.greedy:
        outputs = record.tokens[record.prompt_len :]
        best = logits.argmax(axis=-1)
        for i in np.flatnonzero(best != outputs):
            distance = token_distance(logits[i], int(outputs[i]))
            tally.differs(number, record.prompt_len + int(i), None, outputs[i : i + 1], best[i : i + 1], distance)


def _judge_layer(number: int, record: _Record, tally: _Tally, index: int, layer: int, live: Selection) -> None:
    reference = _span(live.ids, record, sort=True)
    rows, possible = record.layer_rows(index, reference.shape[-1])
    scores = _span(live.scores, record)
    group_scores = None if live.group_scores is None else _span(live.group_scores, record)
    for i in np.flatnonzero((rows != reference).any(axis=-1)):
        distance = float("inf")
        if possible[i] and group_scores is None:
            distance = choice_distance(scores[i], rows[i].tolist())
        elif possible[i] and group_scores is not None:
            distance = grouped_distance(scores[i], group_scores[i], live.groups_kept, rows[i].tolist())
        tally.differs(number, record.start + int(i), layer, rows[i], reference[i], distance)


def _span(table: torch.Tensor, record: _Record, *, sort: bool = False) -> Any:
    """The part [n, ...] of a per-token table that the record covers; int64 ids or float64 scores."""
    assert record.rows is not None  # callers ask only where there are rows
    part = table[record.start : record.start + len(record.rows)].cpu().numpy()
    return np.sort(part.astype(np.int64), axis=-1) if sort else part.astype(np.float64)


def _forward(model: Any, record: _Record) -> torch.Tensor:
    """One plain pass; float32 logits [outputs, V], row i for the choice of output i."""
    outputs = len(record.tokens) - record.prompt_len
    ids = torch.from_numpy(record.tokens).unsqueeze(0).to(model.device)
    keep = outputs + 1 if record.greedy else 1
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
    return logits[:-1].float()


@contextmanager
def _spare_core() -> Iterator[None]:
    """Leave one core free, as the runner does: torch's threads wait for the slowest of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reference(model: Any) -> Any:
    if isinstance(model, torch.nn.Module):
        if model.training:
            raise BadInput("model", "is in training mode", hint="call model.eval()")
        if any(p.dtype != torch.float32 for p in model.parameters() if p.is_floating_point()):
            raise BadInput("model", "is not in float32", hint="load it with dtype=torch.float32, or give its folder")
        return model
    return library_model(model, torch.float32)


def _ints(values: Any, field: str, ndim: int) -> Ints:
    array = np.asarray(values)
    if array.size == 0 and ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise BadInput(field, f"has shape {array.shape} and dtype {array.dtype}", limit=f"integers, {ndim}-D")
    return array.astype(np.int64)
