"""Files of keys: what is no such file is refused with the field and the way out, and no secret is printed."""

from __future__ import annotations

import json
import os

import pytest
from fdasync_fleet.link.keys import keys_of, load_keys, new_keys, save_keys

from fdasync.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    save_keys(path, new_keys(), replace=False)
    return path


def test_what_is_written_is_read(file):
    keys = load_keys(file)
    assert keys_of(str(file)) == keys_of(keys) == keys
    assert keys_of(None) is None
    assert len(keys.allowed) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_use_is_refused(file, mode):
    os.chmod(file, mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}") as caught:
        load_keys(file)
    assert caught.value.hint == f"chmod 600 {file}"


def test_no_file_and_a_folder(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_keys(tmp_path / "none")
    assert "fdasync keys new" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_keys(tmp_path / "none" / "keys", new_keys(), replace=False)


def _drop(name):
    return lambda values: values.pop(name)


def _swap(values):
    key = values["keys"][0]
    key["server"]["public"] = key["client"]["public"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_drop("keys"), "keys"),
        (_swap, "keys.keys[0].server"),
        (lambda values: values.update(more=1), "keys.more"),
        (lambda values: values.update(version=2), "keys.version"),
        (lambda values: values.update(keys=[]), "keys.keys"),
        (lambda values: values["keys"].extend(values["keys"] * 2), "keys.keys"),
        (lambda values: values["keys"][0]["client"].update(secret="short"), "keys.keys[0].client.secret"),
        (lambda values: values.update(allow=["x" * 39]), "keys.allow[0]"),
    ],
)
def test_what_is_wrong_is_named(file, change, field):
    values = json.loads(file.read_bytes())
    secret = values["keys"][0]["server"]["secret"]
    change(values)
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        load_keys(file)
    assert caught.value.field == field
    assert caught.value.hint
    assert secret not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 5000, b" " * 70_000], ids=range(5))
def test_what_is_no_json_is_refused(file, data):
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="keys"):
        load_keys(file)
