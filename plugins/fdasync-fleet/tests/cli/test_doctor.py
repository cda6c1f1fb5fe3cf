"""`fdasync doctor` where the fleet and the transformers plugin are installed: it finds both fit for use."""

from __future__ import annotations

import json

from click.testing import CliRunner

from fdasync.cli.main import cli


def test_doctor_finds_links_and_the_runner_in_order() -> None:
    # other plugins that are installed may be broken, which the exit code tells
    told = CliRunner().invoke(cli, ["doctor", "--json"])
    findings = {finding["what"]: finding["state"] for finding in json.loads(told.stdout)}
    assert findings["pyzmq"] == "ok"
    assert findings["plugin transformers (fdasync.runners)"] == "ok"
