from __future__ import annotations

import pytest
from click.testing import CliRunner

from fdasync.cli.main import cli


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "0.1", "0,5", ""])
def test_what_is_no_number_of_seconds_is_refused(value):
    outcome = CliRunner().invoke(cli, ["top", "--once", f"--interval={value}"])
    assert outcome.exit_code == 2
    assert "--interval" in outcome.output
