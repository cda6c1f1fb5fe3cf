"""What this plugin's README shows runs as it stands there."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.ci
async def test_its_curl_line_answers(front_of, program):
    (line,) = re.findall(r"^    (curl .*?\}\}')$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:30000" in line
    program("curl")
    async with front_of() as front:
        process = await asyncio.create_subprocess_shell(
            line.replace("127.0.0.1:30000", f"127.0.0.1:{front.port}"), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(300):
            out, _ = await process.communicate()
    answer = json.loads(out)
    assert process.returncode == 0
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 16
