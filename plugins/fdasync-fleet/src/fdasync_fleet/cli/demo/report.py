"""The demo's figures: computed from results, as JSON and as a table. Starts nothing. Called by `run.py`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from fdasync_fleet.cli.demo.workload import Served


def figures_of(served: Served, report: Any) -> dict[str, Any]:
    samples = [sample for result in served.results for sample in result.samples]
    tokens = sum(len(sample.token_ids) for sample in samples)
    # chats are checked; what is timed is the workload
    timed = served.results[served.chats :]
    timed_tokens = sum(len(sample.token_ids) for result in timed for sample in result.samples)
    ttft = [result.ttft_s * 1e3 for result in timed if result.ttft_s is not None]
    tpot = [
        (result.total_s - result.ttft_s) * 1e3 / (longest - 1)
        for result in timed
        if result.ttft_s is not None and (longest := max(len(sample.token_ids) for sample in result.samples)) > 1
    ]
    totals = served.totals
    greedy = [
        sample.token_ids
        for job, result in zip(served.jobs, served.results, strict=True)
        if job.params.temperature == 0
        for sample in result.samples
    ]
    return {
        "requests": {"total": len(served.jobs), "finished": finished(served), "samples": len(samples)},
        "tokens": {
            "generated": tokens,
            "checked": report.tokens_checked,
            "equal": report.tokens_equal,
            "tied": report.tokens_tied,
            "wrong": report.tokens_wrong,
            "distinct_greedy": len({token for output in greedy for token in output}),
        },
        "routing": {
            "rows_checked": report.rows_checked,
            "rows_exact": report.rows_exact,
            "rows_tied": report.rows_tied,
            "rows_wrong": report.rows_wrong,
            "rows_missing": report.rows_missing,
            "nbytes": sum(sample.routing.array.nbytes for sample in samples if sample.routing is not None),
        },
        "throughput": {
            "start_s": round(served.start_s, 3),
            "serve_s": round(served.serve_s, 3),
            "requests_per_s": round(len(timed) / served.serve_s, 2),
            "tokens_per_s": round(timed_tokens / served.serve_s, 1),
            "ttft_ms_p50": round(_percentile(ttft, 50), 2),
            "ttft_ms_p99": round(_percentile(ttft, 99), 2),
            "tpot_ms_p50": round(_percentile(tpot, 50), 2),
            "tpot_ms_p99": round(_percentile(tpot, 99), 2),
            "prefix_hit_rate": round(totals.hit_tokens / max(totals.prompt_tokens, 1), 4),
            "steps": totals.steps,
            "preemptions": totals.preemptions,
        },
    }


def finished(served: Served) -> int:
    return sum(
        all(sample.finish_reason in ("stop", "length") for sample in result.samples) for result in served.results
    )


def store_figures(name: str, first: Served, second: Served) -> dict[str, Any]:
    """Blocks that the store gave back to the second engine, and the time that they saved."""
    probes = second.probes
    totals = second.totals
    return {
        "name": name,
        "written_blocks": first.totals.written_blocks,
        "refused_blocks": first.refused + second.refused,
        "refused_why": first.refused_why or second.refused_why,
        "fetched_blocks": totals.fetched_blocks,
        "prompt_tokens": totals.prompt_tokens,
        "hit_tokens_device": totals.hit_tokens_device,
        "hit_tokens_host": totals.hit_tokens_host,
        "hit_tokens_store": totals.hit_tokens_store,
        "probes": len(probes),
        "ttft_ms_p50_computed": round(_percentile([probe.computed_s * 1e3 for probe in probes], 50), 2),
        "ttft_ms_p50_stored": round(_percentile([probe.stored_s * 1e3 for probe in probes], 50), 2),
        "serve_s_first": round(first.serve_s, 3),
        "serve_s_second": round(second.serve_s, 3),
    }


def pd_figures(served: Served) -> dict[str, Any]:
    """Blocks that went from prefill to decode instances, and how long leases took."""
    moved = served.moved
    assert moved is not None
    return {
        "prefill": moved.prefill,
        "decode": moved.decode,
        "blocks": moved.blocks,
        "nbytes": moved.nbytes,
        "leases": moved.leases,
        "lease_ms_mean": round(1e3 * moved.lease_s / max(moved.leases, 1), 3),
        "lease_ms_most": round(1e3 * moved.lease_most_s, 3),
    }


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def show(figures: dict[str, Any], served: Served, console: Console) -> None:
    throughput, tokens, routing = figures["throughput"], figures["tokens"], figures["routing"]
    table = Table(title=f"fdasync demo: {served.room.model}", show_header=False)
    rows = [
        ("requests", f"{figures['requests']['finished']} of {figures['requests']['total']} finished"
                     f" ({figures['requests']['samples']} samples)"),
        ("requests/s", f"{throughput['requests_per_s']:g}"),
        ("tokens/s", f"{throughput['tokens_per_s']:g}"),
        ("TTFT p50 / p99", f"{throughput['ttft_ms_p50']:g} / {throughput['ttft_ms_p99']:g} ms"),
        ("TPOT p50 / p99", f"{throughput['tpot_ms_p50']:g} / {throughput['tpot_ms_p99']:g} ms"),
        ("prefix-cache hit rate", f"{throughput['prefix_hit_rate']:.1%} of prompt tokens"),
        ("distinct greedy tokens", f"{tokens['distinct_greedy']}"),
        ("greedy tokens", f"{tokens['checked']} checked, {tokens['equal']} equal, {tokens['tied']} tied,"
                          f" {tokens['wrong']} wrong"),
        ("routing rows", f"{routing['rows_checked']} checked, {routing['rows_exact']} exact,"
                         f" {routing['rows_tied']} tied, {routing['rows_wrong']} wrong,"
                         f" {routing['rows_missing']} missing"),
        ("routing bytes", f"{routing['nbytes']:,}"),
    ]  # fmt: skip
    if pd := figures.get("pd"):
        rows += [
            (f"{pd['prefill']} prefill, {pd['decode']} decode", f"{pd['blocks']} blocks, {pd['nbytes']:,} bytes went"
                                                              " from prefill to decode"),
            ("leases", f"{pd['leases']} granted, after {pd['lease_ms_mean']:g} ms on average,"
                       f" {pd['lease_ms_most']:g} ms at most"),
        ]  # fmt: skip
    if store := figures.get("store"):
        rows += [
            (f"store {store['name']}", f"{store['written_blocks']} blocks written,"
                                       f" {store['fetched_blocks']} read back"),
            *([("refused by the store", f"{store['refused_blocks']} blocks: {store['refused_why']}")]
              if store["refused_blocks"] else []),
            ("second engine's hit tokens", f"{store['hit_tokens_store']} from the store, {store['hit_tokens_device']}"
                                           f" from the device, of {store['prompt_tokens']} prompt tokens"),
            (f"TTFT p50, {store['probes']} prompts alone", f"{store['ttft_ms_p50_stored']:g} ms with the store;"
                                                           f" {store['ttft_ms_p50_computed']:g} ms computed anew"),
            ("serving all", f"{store['serve_s_second']:g} s; the first engine {store['serve_s_first']:g} s"),
        ]  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
