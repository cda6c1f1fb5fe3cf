"""The manifest of `deploy/`, without a cluster: Kubernetes' schemas, the command's options, and the probes it runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from fdasync_http.command import http
from fdasync_http.paths import USE

ROOT = Path(__file__).parents[3]
WHY = "kubernetes-validate is not installed; the extra `dev` has it"
KEY = "sk-0123456789abcdef"
ADMIN = "sk-admin-0123456789"


@pytest.fixture
def documents():
    yaml = pytest.importorskip("yaml", reason=WHY)
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))


@pytest.fixture
def pod(documents):
    return documents[1]["spec"]["template"]["spec"]


def test_the_manifest_is_what_kubernetes_takes(documents, pod):
    checker = pytest.importorskip("kubernetes_validate", reason=WHY)
    for document in documents:
        checker.validate(document, checker.latest_version(), strict=True)
    # the check sees what is wrong
    pod["containers"][0]["readynessProbe"] = {}
    with pytest.raises(checker.ValidationError, match="readynessProbe"):
        checker.validate(documents[1], checker.latest_version(), strict=True)


def test_the_manifest_and_the_command_agree(documents, pod):
    service, deployment = documents
    front = pod["containers"][0]
    command, *options = front["args"]
    assert command == http.name
    given = dict([option.split("=", 1) for option in options])
    assert given.keys() <= {name for parameter in http.params for name in parameter.opts}
    assert int(given["--port"]) == front["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    slept_s = front["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > slept_s + float(given["--drain-s"])
    mounts = {mount["name"] for one in (*pod["initContainers"], front) for mount in one["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        python, flag, module, url, key = front[probe]["exec"]["command"]
        assert (python, flag, module, key) == ("python", "-m", "fdasync_http.probe", given["--api-key-file"])
        assert url == f"http://127.0.0.1:{given['--port']}{path}"
        assert path in [one.path for one in USE]


async def probed(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fdasync_http.probe", *arguments, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(30):
        _, err = await process.communicate()
    return process.returncode, err.decode()


async def test_the_probe_sends_the_key_and_tells_by_its_exit_code(scene_of, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    async with scene_of(api_key=KEY, admin_key=ADMIN) as scene:
        assert await probed(f"{scene.url}/ready", str(key)) == (0, "")
        code, told = await probed(f"{scene.url}/ready")
        assert (code, "status 401" in told) == (1, True)
        scene.generator.fail(RuntimeError("the disk is on fire"))
        code, told = await probed(f"{scene.url}/live", str(key))
        assert (code, "on fire" in told) == (1, True)
        # a failure that no caller has got is raised at the end
        asked = {"json": {"input_ids": [1]}, "headers": {"authorization": f"Bearer {KEY}"}}
        assert (await scene.client.post("/generate", **asked)).status_code == 503
    code, told = await probed(f"{scene.url}/live", str(key))
    assert (code, "refused" in told) == (1, True)
    assert await probed("file:///etc/hostname") == (1, "file:///etc/hostname is no http address\n")
