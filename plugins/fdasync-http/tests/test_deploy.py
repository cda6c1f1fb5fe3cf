"""The manifest of `deploy/`, without a cluster: Kubernetes' schemas, the command's options, and the probes it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
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
    async with asyncio.timeout(300):
        _, err = await process.communicate()
    return process.returncode, err.decode()


@pytest.mark.ci
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


def child_of(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture
def first_in_a_container():
    """How a command becomes process 1, as in a container; skips where that is forbidden."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        probe = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no process namespaces here: {error}")
    if probe.returncode:
        pytest.skip(f"no process namespaces here (they need root): {probe.stderr.strip()}")
    return command


@pytest.mark.ci
async def test_a_pod_under_load_ends_within_its_grace_period(pod, first_in_a_container, tmp_path):
    """The container's own command, but for model, paths and a drain of 2 s: what can end ends whole, the rest is cut at
    the deadline, and the process is gone in the time that the manifest leaves for closing."""
    front = pod["containers"][0]
    command, *options = front["args"]
    given = dict([option.split("=", 1) for option in options])
    spare_s = pod["terminationGracePeriodSeconds"] - front["lifecycle"]["preStop"]["sleep"]["seconds"]
    spare_s -= float(given["--drain-s"])
    key, config = tmp_path / "key", tmp_path / "engine.toml"
    key.write_text(KEY)
    key.chmod(0o600)
    config.write_text("[runner_config]\nstep_s = 0.02\nmax_context_tokens = 4096\nnum_blocks = 4000\n")
    del given["--model"]
    given |= {"--port": "0", "--drain-s": "2", "--api-key-file": str(key), "--runner": "synthetic"}
    given["--config"] = str(config)
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(*first_in_a_container, sys.executable, "-m", "fdasync", command, "--ready-fd", str(write)),
        *[f"{name}={value}" for name, value in given.items()],
        pass_fds=(write,),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    os.close(write)
    try:
        async with asyncio.timeout(300):
            with os.fdopen(read, "rb") as pipe:
                ready = json.loads(await asyncio.to_thread(pipe.readline))
        assert ready["pid"] == 1
        first = child_of(process.pid)
        url, headers = f"http://127.0.0.1:{ready['port']}", {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=300) as client:
            asked = [
                {"input_ids": [1, number], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
                for number, tokens in enumerate([20] * 12 + [4000] * 4, 2)
            ]
            calls = [asyncio.ensure_future(client.post("/generate", json=one)) for one in asked]
            while (await client.get("/v1/loads")).json()["loads"][0]["num_reqs"] < len(asked):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            loop = asyncio.get_running_loop()
            began = loop.time()
            os.kill(first, signal.SIGTERM)
            answers = [(await call).json() for call in calls]
        async with asyncio.timeout(spare_s):
            _, err = await process.communicate()
        took_s = loop.time() - began
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    reasons = [one["meta_info"]["finish_reason"]["type"] for one in answers]
    assert reasons == ["length"] * 12 + ["abort"] * 4
    assert all(one["output_ids"] for one in answers), "a request that is cut gets what there is"
    assert (process.returncode, "not all answers were sent within 2 s" in err.decode()) == (1, True), err.decode()
    assert 2 <= took_s < 2 + spare_s
