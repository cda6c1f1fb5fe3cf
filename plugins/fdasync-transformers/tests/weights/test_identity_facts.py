"""Stores and links of a model are named by facts: each that changes KV changes the name, and others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.weights import identity


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model("qwen3_dense", num_hidden_layers=1)


def other_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = identity.version
    monkeypatch.setattr(identity, "version", lambda asked: "0.0" if asked == name else own(asked))


@pytest.mark.parametrize("fact", ["torch", "transformers", "device", "order of sums"])
def test_with_fixed_numerics_what_chooses_the_order_of_sums_counts(
    model: Any, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [identity.fingerprint(model, numerics) for numerics in ("default", "fixed")]
    assert before[0] != before[1]
    assert before[1] == identity.fingerprint(model, "fixed")
    if fact == "device":
        monkeypatch.setattr(identity, "_device_kind", lambda _: "another")
    elif fact == "order of sums":
        monkeypatch.setattr(identity, "ORDER_OF_SUMS", identity.ORDER_OF_SUMS + 1)
    else:
        other_version(fact, monkeypatch)
    assert identity.fingerprint(model, "default") == before[0]
    assert identity.fingerprint(model, "fixed") != before[1]


def test_a_device_is_named_by_what_it_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    assert identity._computed_by(gpu)["device"] == "GPU 0"
    assert str(identity._computed_by(cpu)["device"]).endswith(" AVX9")
    monkeypatch.setattr(identity.platform, "machine", lambda: "pdp11")
    assert identity._computed_by(cpu)["device"] == "pdp11 AVX9"


def test_on_a_gpu_the_compiler_of_the_kernels_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    before = identity._computed_by(torch.device("cuda"))
    other_version("triton", monkeypatch)
    assert identity._computed_by(torch.device("cuda")) == {**before, "triton": "0.0"}
    assert "triton" not in identity._computed_by(torch.device("cpu"))


@pytest.mark.parametrize("numerics", ["default", "fixed"])
def test_the_config_and_the_dtype_count(model: Any, numerics: Any) -> None:
    names = {identity.fingerprint(model, numerics)}
    for change in ({"rms_norm_eps": 1e-3}, {"rope_theta": 7.0}, {"num_hidden_layers": 2}):
        names.add(identity.fingerprint(make_tiny_model("qwen3_dense", **{"num_hidden_layers": 1, **change}), numerics))
    half = make_tiny_model("qwen3_dense", num_hidden_layers=1).half()
    names.add(identity.fingerprint(half, numerics))
    assert len(names) == 5


@pytest.mark.parametrize("key", ["bos_token_id", "use_cache", "transformers_version", "_name_or_path"])
def test_what_kv_does_not_depend_on_does_not_count(key: str) -> None:
    model, other = (make_tiny_model("qwen3_dense", num_hidden_layers=1) for _ in range(2))
    setattr(other.config, key, {"use_cache": False, "bos_token_id": 5}.get(key, "else"))
    assert identity.fingerprint(other, "fixed") == identity.fingerprint(model, "fixed")
