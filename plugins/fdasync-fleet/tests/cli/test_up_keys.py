"""`fdasync up` at ports, with the keys of a fleet."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
import uvloop
from fdasync_fleet.link.keys import new_keys, save_keys

import fdasync
from fdasync import RouterConfig, SamplingParams
from fdasync.errors import DeadlineExceeded
from fdasync.testing import check_sample, oracle_of
from tests.support.commands import command, config_file, config_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci
def test_instances_with_keys_listen_at_ports_and_answer_who_has_them(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    oracle = oracle_of(config_of(config))
    file, keys = tmp_path / "fleet.json", new_keys()
    save_keys(file, keys, replace=False)

    async def ask(addresses: list[str]) -> None:
        prompt, params = [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0)
        async with fdasync.connect(addresses, keys=keys) as router:
            result = await router.complete(prompt, params)
            check_sample(result.samples[0], prompt, params, oracle)
        with pytest.raises(DeadlineExceeded):
            await fdasync.connect(addresses, RouterConfig(connect_s=1.0)).start()

    # at all interfaces, where nobody could dial it
    options = ("--listen", "tcp://0.0.0.0:0", "--host", "127.0.0.1", "--keys", str(file))
    options += ("--prefill", "1", "--decode", "1", "--encrypt-blocks", "--transport", "tcp")
    with command(tmp_path, "up", "--config", str(config), *options) as running:
        found = running.until(r"fdasync\.connect\((\[.*\]), keys=\"(.*)\"\)")
        addresses = json.loads(found[1])
        assert found[2] == str(file)
        assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)
        assert len(set(addresses)) == 2
        uvloop.run(ask(addresses))
        running.signal(signal.SIGINT)
        assert running.wait() == 0, running.text
