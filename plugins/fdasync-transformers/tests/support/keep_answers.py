"""Writes `checks/kept_answers.json`: what each family answers on CPUs, where the path of GPUs answers alike by Triton's
interpreter. To be run where steps are known to be right; it takes some minutes.

    TRITON_INTERPRET=1 PYTHONPATH=support python support/keep_answers.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from checks import kept
from device_path import DEVICE, answers, assert_same
from fdasync_transformers.tiny.families import FAMILIES
from written import write_tiny_checkpoint

from fdasync.errors import ConfigError, UnsupportedModel


def main() -> None:
    found: dict[str, list[kept.Kept]] = {}
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            write_tiny_checkpoint(Path(folder), family)
            try:
                got = asyncio.run(answers(Path(folder), {"device": "cpu"}, new=kept.NEW))
            except (ConfigError, UnsupportedModel) as error:
                print(f"{family}: not served: {error}", flush=True)
                continue
            found[family] = kept.kept(got)
            try:
                assert_same(asyncio.run(answers(Path(folder), DEVICE, new=kept.NEW)), got)
            except (ConfigError, UnsupportedModel) as error:
                print(f"{family}: by torch alone: {error}", flush=True)
            else:
                print(f"{family}: alike", flush=True)
    lines = [f'"{family}": {msgspec.json.encode(each).decode()}' for family, each in found.items()]
    kept.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
