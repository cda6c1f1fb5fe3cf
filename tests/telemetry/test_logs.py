"""The loggers below `fdasync`: quiet by themselves, and one handler that writes text or JSON without waiting."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys

import pytest

from fdasync import SamplingParams
from fdasync.errors import ConfigError
from fdasync.telemetry.json_log import JsonLogTap
from fdasync.telemetry.logs import EVENTS, log_to, to_logger
from fdasync.testing import synthetic_config, synthetic_engine, until
from tests.telemetry.lines import read_all

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def test_the_library_writes_nothing_by_itself_and_leaves_the_root_logger_alone() -> None:
    script = (
        "import logging, fdasync; logging.getLogger('fdasync.http').error('x');"
        " root = logging.getLogger(); print(root.handlers, root.level, logging.getLogger('fdasync').level)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("[] 30 0\n", "")


@pytest.mark.parametrize("as_json", [False, True])
async def test_lines_of_events_and_errors(as_json: bool) -> None:
    read, write = os.pipe()
    logger = logging.getLogger("fdasync")
    before = logger.level, logger.propagate, list(logger.handlers)
    async with log_to(write, "info", as_json=as_json, name="m0"):
        async with synthetic_engine(synthetic_config()) as engine, JsonLogTap(engine, to_logger) as tap:
            await engine.complete([1, 2, 3], GREEDY, request_id="mine")
            await until(lambda: tap.lines)
        try:
            raise ValueError("wrong")
        except ValueError:
            logging.getLogger("fdasync.http").exception("a defect")
        logging.getLogger("fdasync.http").debug("below the level")
    assert (logger.level, logger.propagate, logger.handlers) == before
    logging.getLogger("fdasync.http").error("after the end")
    os.close(write)
    text = read_all(read).decode()
    os.close(read)
    if not as_json:
        lines = [line for line in text.splitlines() if "LoopHeldUp" not in line]
        assert " INFO fdasync.engine m0: RequestEnded " in lines[0]
        assert 'request_id="mine"' in lines[0]
        assert " ERROR fdasync.http m0: a defect" in lines[1]
        assert lines[-1] == "ValueError: wrong"
        return
    ended, defect = [line for line in map(json.loads, text.splitlines()) if line["message"] != "LoopHeldUp"]
    assert (ended["level"], ended["logger"], ended["name"], ended["message"]) == ("info", EVENTS, "m0", "RequestEnded")
    assert ended["fields"]["output_tokens"] == 4
    assert (defect["level"], defect["message"]) == ("error", "a defect")
    assert defect["error"].endswith("ValueError: wrong")


async def test_a_reader_that_takes_nothing_costs_lines_alone() -> None:
    read, write = os.pipe()
    async with log_to(write, "info"):
        for _ in range(5):
            logging.getLogger("fdasync.http").info("x" * (300 << 10))
        text = b""
        while text.count(b"\n") < 3:
            text += read_all(read)
            await asyncio.sleep(0)
        logging.getLogger("fdasync.http").info("the last")
    text += read_all(read)
    os.close(write)
    os.close(read)
    kept, last = text.decode().splitlines()[:-2], text.decode().splitlines()[-2:]
    assert len(kept) == 3
    assert last[0].endswith("fdasync: 2 lines were lost")
    assert last[1].endswith("the last")


async def test_a_descriptor_that_is_closed_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        async with log_to(987654, "info"):
            pass
