"""Every number of `EngineStats` and of its scheduler as a metric of Prometheus: names, texts and labels stand at the
fields (`fdasync/stats.py`).

Knows no engine. Called by `prometheus.py`, for one engine, and by the HTTP front, for each engine behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fdasync.registry.docs import docs_of
from fdasync.stats import COUNTS, EngineStats, Metric, SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import msgspec
    from prometheus_client import Metric as Exported

#: the state of an engine without a link, beside the states that an engine tells of itself
AWAY: Final = "away"
_UNITS = {"_s": "_seconds", "_nbytes": "_bytes"}


class _Told(NamedTuple):
    """One field.

    Attributes:
        field: its name.
        counts: it is a counter.
        metric: with name and text.
        words: the words that it may be, where each has a series; else ().
    """

    field: str
    counts: bool
    metric: Metric
    words: tuple[str, ...]


def _told_of(kind: type[msgspec.Struct]) -> tuple[_Told, ...]:
    """The fields with numbers, and the words that name a metric, in order."""
    docs = docs_of(kind)
    told = []
    for field, hint in get_type_hints(kind, include_extras=True).items():
        base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        metric = next((mark for mark in reversed(marks) if isinstance(mark, Metric)), Metric())
        if not metric.word and base not in (int, float, bool):
            continue
        counts = COUNTS in marks
        text = metric.text or docs[field]
        words = (*get_args(base), AWAY) if get_origin(base) is Literal else ()
        named = structs.replace(metric, name=metric.name or _name_of(field, counts), text=text[:1].upper() + text[1:])
        told.append(_Told(field, counts, named, words))
    return tuple(told)


def _name_of(field: str, counts: bool) -> str:
    unit = next((unit for unit in _UNITS if field.endswith(unit)), "")
    return f"fdasync_{field.removesuffix(unit)}{_UNITS.get(unit, '')}{'_total' * counts}"


_OF_ENGINE, _OF_SCHEDULER = _told_of(EngineStats), _told_of(SchedulerStats)
#: names of labels that some metric has
LABELS: Final = frozenset(
    [
        name
        for told in (*_OF_ENGINE, *_OF_SCHEDULER)
        for name in (told.metric.word, *dict(told.metric.labels), *(told.metric.named_by or ())[:1])
        if name
    ]
)


def stats_metrics(
    labels: Sequence[str], shown: Sequence[tuple[Sequence[str], EngineStats | None]]
) -> Iterator[Exported]:
    """All metrics, each with a series for each engine.

    Args:
        labels: names of labels that every series has.
        shown: their values, and the numbers of each engine; None: the engine is out of reach, and only its state is
            told.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for values, stats in shown:
        for told in _OF_ENGINE:
            _add(families, told, labels, values, stats)
        for told in _OF_SCHEDULER:
            _add(families, told, labels, values, stats and stats.scheduler)
    yield from families.values()


def _add(
    families: dict[str, Any], told: _Told, labels: Sequence[str], values: Sequence[str], numbers: msgspec.Struct | None
) -> None:
    metric, value = told.metric, AWAY if numbers is None else getattr(numbers, told.field)
    if told.words:
        series = [({metric.word: word}, float(word == value)) for word in told.words]
    elif numbers is None:
        return
    elif metric.word:
        series = [({metric.word: value}, 1.0)]
    elif metric.named_by is not None:
        label, field = metric.named_by
        name = getattr(numbers, field)
        series = [({label: name}, float(value))] if name else []
    else:
        series = [(dict(metric.labels), float(value))]
    for own, number in series:
        family = families.get(metric.name)
        if family is None:
            kind = CounterMetricFamily if told.counts else GaugeMetricFamily
            family = families[metric.name] = kind(metric.name, metric.text, labels=(*labels, *own))
        family.add_metric((*values, *own.values()), number)
