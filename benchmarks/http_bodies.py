"""How long a body of the largest size holds the front's loop: `python -m benchmarks.http_bodies`.

Each body is as large as `HttpConfig.max_body_nbytes` lets it be, and is decoded as its path does. Times are of the CPU:
decoding waits for nothing.

    decode_ms_ids          one prompt of token ids, at `/generate`
    decode_ms_batch        the same ids as prompts of 4,096, at `/v1/completions`
    decode_ms_text         a text of letters
    decode_ms_brackets     a text of brackets alone, which are counted before the body is decoded
    decode_ms_parts        as many empty arrays as there may be
    ids_that_fit           token ids of six digits in the first body

`--runs N`, `--json PATH`.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_http import HttpConfig
from fdasync_http.bodies import MAX_PARTS, decode
from fdasync_http.failures import Refused
from fdasync_http.openai.types import CompletionBody
from fdasync_http.sglang.asked import GenerateBody

from benchmarks._report import Report, calibrate_us

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN = 123_456
PROMPT_TOKENS = 4096
AIM_MS = 25.0


def bodies(limit_nbytes: int) -> Mapping[str, tuple[bytes, type[Any]]]:
    """Bodies by name, with the type that each is decoded as."""
    # a separator each; the rest of the body is short
    ids = [TOKEN] * ((limit_nbytes - 1024) // 7)
    prompts = [ids[first : first + PROMPT_TOKENS] for first in range(0, len(ids), PROMPT_TOKENS)]
    chars = limit_nbytes - 1024
    return {
        "ids": (msgspec.json.encode({"input_ids": ids}), GenerateBody),
        "batch": (msgspec.json.encode({"prompt": prompts}), CompletionBody),
        "text": (msgspec.json.encode({"text": "a" * chars}), GenerateBody),
        "brackets": (msgspec.json.encode({"text": "[" * chars}), GenerateBody),
        "parts": (msgspec.json.encode({"input_ids": [[]] * (MAX_PARTS - 2)}), GenerateBody),
    }


def decode_ms(body: bytes, kind: type[Any], config: HttpConfig) -> float:
    begun = time.process_time()
    # some are refused for what they hold
    with contextlib.suppress(Refused):
        decode(body, kind, config)
    return (time.process_time() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    config = HttpConfig()
    report = Report(f"bodies of {config.max_body_nbytes / (1 << 20):g} MiB")
    report.conditions["calibration_us"] = calibrate_us()
    made = bodies(config.max_body_nbytes)
    for name, (body, kind) in made.items():
        assert len(body) <= config.max_body_nbytes
        report.add(f"decode_ms_{name}", [decode_ms(body, kind, config) for _ in range(options.runs)], aim=AIM_MS)
    report.add("ids_that_fit", [float(made["ids"][0].count(b","))])
    report.finish(options.json)


if __name__ == "__main__":
    main()
