"""The pytest plugin in another project: what it offers, and what it does not impose."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# -- the plugin in somebody else's project ------------------------------------------------------------

_THEIRS = """
    import asyncio, os, time
    from random import Random
    import pytest
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.synthetic.oracle import SyntheticConfig
    from fdasync.runner.synthetic import SyntheticRunner
    from fdasync.testing import FaultRunner, StepFault, on_bench

    LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=16)

    def test_virtual_time(run_sim):
        run_sim(asyncio.sleep(1e5))

    def test_leaks_fail(no_leaks):
        os.pipe()

    def test_blocking_fails(no_blocking):
        async def main():
            time.sleep(0.001)
        asyncio.run(main())

    def test_never_struck_fails(run_sim, must_strike):
        async def main():
            runner = FaultRunner(SyntheticRunner(SyntheticConfig(), LIMITS), Random(1), fault=StepFault("die", 9))
            async with on_bench(must_strike(runner)) as on:
                await on.launch()
        run_sim(main())

    def test_nothing_is_imposed():
        async def main():
            time.sleep(0.001)
        asyncio.run(main())
        os.pipe()

    def test_seeds(sim_seeds):
        assert list(sim_seeds) == [0, 1, 2]
        sim_seeds.notes.append("three of them")
"""


@pytest.mark.ci
def test_the_plugin_serves_other_projects(tmp_path):
    (tmp_path / "test_theirs.py").write_text(textwrap.dedent(_THEIRS))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--seeds", "3", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    lines = done.stdout.splitlines()
    ends = {line.split("::")[1].split()[0]: line.split()[0] for line in lines if "::" in line and line[0] in "PFE"}
    # a leak, and a fault that never struck, are found when the fixture ends, after the test itself has passed
    assert {name: ends.get(name) for name in ("test_virtual_time", "test_nothing_is_imposed", "test_seeds")} == {
        "test_virtual_time": "PASSED",
        "test_nothing_is_imposed": "PASSED",
        "test_seeds": "PASSED",
    }, done.stdout
    assert ends["test_blocking_fails"] == "FAILED"
    for name in ("test_leaks_fail", "test_never_struck_fails"):
        assert any(line.startswith("ERROR") and name in line for line in lines), name
    assert "the fault 'die' of step 9 never struck: the last was step 0" in done.stdout
    assert "simulated 3 seeds, 0 to 2" in lines
    assert "three of them" in lines
