"""No body makes a defect of the front: whatever clients send to any path, the answer is no 500."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_http.paths import CONTROL, USE
from msgspec import inspect

if TYPE_CHECKING:
    from fdasync_http.contract import Path

BAD_TEXTS = (b"\xff\xfe", b"\xe4\xbd", b"\xed\xa0\x80", b"\\ud83d", b"\\q", b"\x00")
# values that types do not expect, and those at the edges of what they do
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2.0, 2.5, 1e30, -1e308, 1 << 63, -(1 << 63), 10**30, "", "a", " ", "\0", "nan", "inf",
    "-5", "../..", "/", "a" * 5000, "\u2028\U0001f600", [], [None], [[]], [1, [2]], ["a", None], {}, {"": None},
    {"a": {"b": []}}, {"1": 1e39}, {"type": "json_schema", "schema": 3}, {"type": None}, [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
)  # fmt: skip
GENERATE = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/rollout", "/inference/v1/generate")


@pytest.fixture
def defects(caplog):
    """What the front logged of its own defects."""
    caplog.set_level(logging.ERROR, "fdasync.http")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "fdasync.http"]


def fields_of(kind: Any) -> list[str]:
    """Names of a body's fields, those of its table and a strange one."""
    return [*kind.__struct_fields__, *getattr(kind, "RULES", {}), "strange"]


def objects_of(kind: Any) -> dict[str, Any]:
    """Fields that are objects with fields of their own."""
    return dict(getattr(kind, "OBJECTS", {}))


def likely(one: inspect.Type, draw: random.Random) -> Any:
    """A value of a type."""
    if isinstance(one, inspect.UnionType):
        return likely(draw.choice(one.types), draw)
    if isinstance(one, inspect.LiteralType):
        return draw.choice(one.values)
    if isinstance(one, inspect.ListType):
        return [likely(one.item_type, draw) for _ in range(draw.randrange(3))]
    if isinstance(one, inspect.DictType):
        return {str(draw.randrange(90)): likely(one.value_type, draw) for _ in range(draw.randrange(3))}
    if isinstance(one, inspect.StructType):
        return body_of(one.cls, draw)
    if isinstance(one, inspect.BoolType):
        return draw.random() < 0.5
    if isinstance(one, inspect.IntType):
        return draw.choice([0, 1, 2, 3, 5])
    if isinstance(one, inspect.FloatType):
        return draw.choice([0.0, 0.5, 1.0])
    return draw.choice(VALUES) if isinstance(one, inspect.AnyType) else draw.choice(["a", "b", "[ab]", "/w"])


def body_of(kind: Any, draw: random.Random) -> dict[str, Any]:
    """A body with some of its fields, of their types but for a few."""
    types = {field.encode_name: field for field in inspect.type_info(kind).fields}
    made = {}
    for name in fields_of(kind):
        field = types.get(name)
        if draw.random() < (0.9 if field is not None and field.required else 0.12):
            made[name] = draw.choice(VALUES) if field is None or draw.random() < 0.3 else likely(field.type, draw)
    for name, inner in objects_of(kind).items():
        if draw.random() < 0.5:
            made[name] = body_of(inner, draw)
    return made


def query_of(path: Path, draw: random.Random) -> dict[str, str]:
    """A query of a path, of its keys and a strange one."""
    names = [query.name for query in path.queries] + ["strange"]
    words = ["true", "keep", "weights", "1", "", "nan", "-1", "\0"]
    return {name: draw.choice(words) for name in names if draw.random() < 0.3}


def sent_to(path: Path, draw: random.Random) -> bytes:
    """What is sent to a path: most often an object with some of its fields."""
    kind = draw.random()
    if kind < 0.1:
        return json.dumps(draw.choice(VALUES)).encode()
    made = {} if path.body is None else body_of(path.body, draw)
    if path.example is not None and draw.random() < 0.6:
        # one that is right, but for a few fields
        made = {**path.example, **dict(draw.sample(sorted(made.items()), min(len(made), draw.randrange(3))))}
    body = json.dumps(made).encode()
    if kind < 0.3:
        # a text of it, or its beginning
        return body.replace(b'"a"', b'"%s"' % draw.choice(BAD_TEXTS)).replace(b'"', b'"' + draw.choice(BAD_TEXTS), 1)
    return body[: draw.randrange(len(body))] if kind < 0.35 else body


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine", "fleet"])
@pytest.mark.parametrize(
    "rounds", [range(10), pytest.param(range(10, 400), marks=pytest.mark.nightly)], ids=["few", "many"]
)
async def test_no_body_makes_a_defect(chat_of, defects, tmp_path, kind, rounds):
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    served: Counter[str] = Counter()
    async with chat_of(kind, runner={"step_s": 0.0}, pulls_root=str(pulled)) as (scene, _):
        weights = str(scene.new_weights("good", 9))
        for number in rounds:
            for path in (*USE, *CONTROL):
                draw = random.Random(f"{kind} {number} {path.path}")
                url = path.path.replace("{model:path}", draw.choice(["a", "%00", "..%2f", "\u00e9"]))
                content, query = sent_to(path, draw), query_of(path, draw)
                for method in path.methods:
                    told = {"path": url, "query": query, "body": content}
                    answer = await scene.client.request(method, url, params=query, content=content)
                    statuses = path.statuses(controls=True)
                    assert answer.status_code in statuses, (told, answer.status_code, answer.text[:300])
                    served[path.path] += answer.status_code == 200
                    assert not defects(), (told, answer.text[:300])
                if path in CONTROL:
                    # what was begun, paused or put to sleep goes on
                    for other in ("/end_weight_update", "/resume_memory_occupation", "/continue_generation"):
                        await scene.client.post(other, json={})
                    if scene.generator.load().doing in ("waits_for_weights", "broken"):
                        await scene.client.post("/update_weights_from_disk", json={"model_path": weights})
                    assert scene.generator.load().doing == "running", told
    # most are refused, and some are not
    assert sum(count for path, count in served.items() if path in GENERATE) > 3


async def test_a_loop_of_links_is_no_folder(scene_of, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a").symlink_to(weights / "b")
    (weights / "b").symlink_to(weights / "a")
    async with scene_of(pulls_root=str(weights)) as scene:
        for named in (str(weights / "a"), str(weights / "a" / "x"), str(weights / ("x" * 5000)), "\u00e9" * 300):
            for path, body in (
                ("/update_weights_from_disk", {"model_path": named}),
                ("/update_weights", {"weight_dir": named}),
                ("/pull_weights", {"local_checkpoint_dir": named, "source_dir": named, "target_version": 1}),
                ("/init_weight_transfer_engine", {"init_info": {"local_checkpoint_dir": named}}),
            ):
                answer = await scene.client.post(path, json=body)
                if path == "/init_weight_transfer_engine" and answer.status_code == 200:
                    # a folder that is made where it is not there
                    answer = await scene.client.post("/fetch_weights", json={"target_version": 1, "sync_dir": named})
                assert answer.status_code == 400, (path, named[:80], answer.text)
