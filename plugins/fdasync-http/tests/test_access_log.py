"""A line for each answer where the logger is on; nothing that a request holds is in it."""

from __future__ import annotations

import logging

import pytest
from fdasync_http.access_log import LOGGER

ROW = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
KEY = "a-key-of-16-chars"


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_has_a_line(scene_of, caplog, stream):
    async with scene_of("engine", api_key=KEY) as scene:
        with caplog.at_level(logging.INFO, LOGGER):
            refused = await scene.client.post("/generate", json=ROW)
            headers = {"authorization": f"Bearer {KEY}"}
            served = await scene.client.post("/generate", json={**ROW, "stream": stream}, headers=headers)
            missing = await scene.client.get("/no%0Apath?word=secret", headers=headers)
        with caplog.at_level(logging.WARNING, LOGGER):
            await scene.client.get("/health", headers=headers)
    told = [record for record in caplog.records if record.name == LOGGER]
    assert [record.fields["status"] for record in told] == [401, 200, 404]
    assert [record.fields["nbytes"] for record in told] == [len(one.content) for one in (refused, served, missing)]
    assert all(record.fields["whole"] for record in told)
    lines = [record.getMessage() for record in told]
    assert " POST /generate 200 " in lines[1]
    assert " GET /no\\npath 404 " in lines[2]
    assert "secret" not in "".join(lines)
    assert KEY not in "".join(lines)
