"""Ten published configurations on a GPU: each opened, asked a mixed batch, and every row held against the library.

    python -m tests.nightly shapes [--shapes A,B] [--memory-gb N] [--quantised] [--tiny] [--json FILE]

Widths are as published (`published_shapes.py`): hidden sizes, heads, experts, groups, vocabulary, positions, windows.
Layers are cut to as many as `--memory-gb` has room for (25), and at least one dense layer where the model has some, two
of experts, and every kind of attention: DeepSeek-V3 then takes 51 GB and Kimi-K2 74. Weights are bfloat16 and drawn on
the device. Each shape has a process of its own, bounded in time, so one that fails leaves the others; the device is
given back in between. It serves 12 ragged prompts of up to 800 tokens at once, in chunks, beside decodes, with prefix
hits, three of them again, and then 64 sequences that decode together. Figures of a shape, each with its name:

`start_s_NAME`: from making the engine to its first request, imports not counted; of it `weights_s` (drawn or loaded).
`layers`, `weights_gb`, `kv_token_bytes`, `load_peak_gb` (device memory while weights were drawn or loaded),
`decode_ms_64` (a step while 64 decode, contexts of 256 to 328). `rows`, `exact_rows`, `tied_rows`, `wrong_rows`,
`missing_rows`, `exact_tokens`, `tied_tokens`, `wrong_tokens`: judged as `gpu_exact` judges bfloat16. The reference is
the library's model with the same weights, eager, in the same process when the engine is closed; its rounding is
measured first (`tolerance`). `misplaced`: share of rows that the judge calls wrong when each is that of the position
before, of those that then name other experts; under 0.5 the shape has failed.

`--quantised`: published forms instead, DeepSeek-V3 in FP8 and gpt-oss in MXFP4 unless `--shapes` names others. Another
process draws, quantises and writes shards of 5 GB; `load_gb_per_s` is bytes of the files over `weights_s`, from the
page cache as a rule. `load_extra_device_gb` and `load_extra_host_gb` are what loading took at its peak beside the
weights (host: anonymous memory, from a reading every 20 ms); both must be under the largest shard, `largest_shard_gb`.

The exit status is 1 where a shape failed or a row or token is wrong or missing. `--tiny` rehearses all of it on a CPU,
with every width small, in Triton's interpreter. Needs a CUDA GPU with 100 GB for the default; 70 GB without Kimi-K2.
"""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from benchmarks.lib.arguments import above_zero, names_of, parser_of
from benchmarks.lib.parts import Parts
from benchmarks.lib.published_shapes import SHAPES
from benchmarks.lib.report import REHEARSED, Report, short
from tests.nightly.shapes.child import Spec
from tests.nightly.shapes.process import Children

if TYPE_CHECKING:
    from tests.nightly.shapes.run import Found

QUANTISED = ("DeepSeek-V3", "gpt-oss-120b")
# of a shape; the digest of weights that were loaded takes longer than drawing some
_LIMIT_S, _LIMIT_STORED_S = 150.0, 300.0
_SEES = 0.5
_COUNTS = ("exact_rows", "tied_rows", "wrong_rows", "missing_rows", "exact_tokens", "tied_tokens", "wrong_tokens")


class Shapes:
    """One run over some shapes.

    Attributes:
        wrong: rows and tokens that are wrong or missing.
    """

    def __init__(self, parts: Parts, report: Report, folder: Path, base: Spec, *, quantised: bool) -> None:
        self.wrong = 0
        self._parts = parts
        self._report = report
        self._folder = folder
        self._base = base
        self._children = Children()
        self._quantised = quantised
        report.conditions["shapes"] = {}

    async def run(self, names: list[str]) -> None:
        try:
            for name in names:
                await self._parts.run(name, partial(self._one, name))
                self._total()
                self._parts.save()
        finally:
            await self._children.aclose()

    async def _one(self, name: str) -> None:
        # what it holds is given back before the next shape
        with tempfile.TemporaryDirectory(prefix="shape-", dir=self._folder) as folder:
            out = f"{folder}/found.json"
            spec = msgspec.structs.replace(self._base, name=name, folder=folder, out=out, stored=self._quantised)
            written: Found | None = None
            if self._quantised:
                written, _ = await self._children.do(msgspec.structs.replace(spec, do="write"), _LIMIT_S)
                self._parts.say(f"{name}: {written.nbytes['files'] / 1e9:.1f} GB written")
            found, host_nbytes = await self._children.do(spec, _LIMIT_STORED_S if self._quantised else _LIMIT_S)
        key = slug(name)
        self._report.conditions["shapes"][name] = {
            **msgspec.to_builtins(found),
            "host_nbytes_while_loading": host_nbytes,
            "written": msgspec.to_builtins(written),
        }
        self._figures(key, found)
        if written is not None:
            self._loading(key, found, written, host_nbytes)
        counts = found.counts
        wrong = sum(counts.get(kind, 0) for kind in ("wrong_rows", "missing_rows", "wrong_tokens"))
        self.wrong += wrong
        if wrong:
            raise AssertionError(f"wrong or missing: {counts}; {found.worst[:3]}")
        if found.misplaced < _SEES:
            raise AssertionError(f"the judge sees {found.misplaced:.2f} of misplaced rows: its verdict says nothing")

    def _figures(self, key: str, found: Found) -> None:
        figures: dict[str, float] = {f"{name}_s": value for name, value in found.seconds.items()}
        figures |= {f"{name}_gb": value / 1e9 for name, value in found.nbytes.items() if name != "kv_token"}
        figures |= {name: found.counts.get(name, 0) for name in _COUNTS}
        figures["rows"] = sum(found.counts.get(f"{kind}_rows", 0) for kind in ("exact", "tied", "wrong"))
        figures |= {"layers": found.facts["layers"], "kv_token_bytes": found.nbytes["kv_token"]}
        figures |= {"misplaced": found.misplaced, "tolerance": found.tolerance}
        if found.decode_ms:
            figures["decode_ms_64"] = found.decode_ms
        for name, value in figures.items():
            self._report.figures[f"{name}_{key}"] = short(float(value))

    def _loading(self, key: str, found: Found, written: Found, host_nbytes: int) -> None:
        figures, shard = self._report.figures, written.nbytes["largest_file"]
        weights = found.nbytes["weights"]
        figures[f"load_gb_per_s_{key}"] = short(written.nbytes["files"] / 1e9 / found.seconds["weights"])
        figures[f"largest_shard_gb_{key}"] = short(shard / 1e9)
        extra = {"host": host_nbytes - (weights if self._base.tiny else 0)}
        if "load_peak" in found.nbytes:
            extra["device"] = found.nbytes["load_peak"] - weights
        for place, nbytes in extra.items():
            figures[f"load_extra_{place}_gb_{key}"] = short(nbytes / 1e9)
            # a rehearsal's shard is smaller than what the allocator takes at a time
            if nbytes > shard and not self._base.tiny:
                raise AssertionError(f"loading took {nbytes / 1e9:.2f} GB beside the weights on the {place}")

    def _total(self) -> None:
        figures = self._report.figures
        keys = [slug(name) for name in self._report.conditions["shapes"]]
        for kind in ("rows", *_COUNTS):
            figures[kind] = sum(figures.get(f"{kind}_{key}", 0.0) for key in keys)
        figures["shapes_served"] = len(keys)
        figures["shapes_failed"] = len(self._parts.failed)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all shapes were served and nothing is wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names_of(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--memory-gb", type=above_zero, default=25.0, help="of weights, a shape")
    parser.add_argument("--quantised", action="store_true", help="weights from quantised shards")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, every width small")
    parser.add_argument("--kernels", default="auto", choices=["auto", "triton", "torch"], help="of a rehearsal")
    options = parser.parse_args(arguments)
    names = [name for name in SHAPES if name in (options.shapes or (QUANTISED if options.quantised else SHAPES))]
    plain = [name for name in names if options.quantised and not SHAPES[name].quantised]
    if plain:
        parser.error(f"--shapes: published plain: {', '.join(plain)}; leave out --quantised")
    if options.tiny:
        # read by triton when a child imports it
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report("Published shapes on a GPU", gpus=0 if options.tiny else 1, without="--tiny")
    report.conditions |= {"memory_gb": options.memory_gb, "quantised": options.quantised}
    if options.tiny:
        report.conditions["void"] = REHEARSED
    kernels = options.kernels if options.kernels != "auto" or not options.tiny else "triton"
    base = Spec("", "", "", int(options.memory_gb * 1e9), tiny=options.tiny, kernels=kernels)
    parts = Parts(report, options.json_path)
    with tempfile.TemporaryDirectory(prefix="fdasync-shapes-") as folder:
        uvloop.run(Shapes(parts, report, Path(folder), base, quantised=options.quantised).run(names))
    return parts.finish()
