"""Weights that a trainer broadcasts: in place whatever the buckets, refused whole, broken and mended, in parts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from fdasync_transformers import weights_fingerprint
from group_play import (
    PARAMS,
    PROMPT,
    Trainer,
    checkpoint,
    engine_config,
    fingerprint,
    fresh_tokens,
    parts_of,
    send,
    sender_of,
    tokens,
)  # fmt: skip
from safetensors.torch import load_file

from fdasync import Engine, GroupTensors, TensorMeta
from fdasync.errors import BadInput, UpdateUnderWay, WeightsBroken, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS: tuple[dict[str, Any], ...] = (
    {"bucket_nbytes": 0}, {"bucket_nbytes": 3000}, {"bucket_nbytes": 1 << 30}, {"checksum": True},
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("family_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
async def test_weights_that_come_in_any_buckets_are_those_of_the_trainer(tmp_path: Path, family_dtype: str) -> None:
    checkpoint(tmp_path / "old", 0)
    one, other = checkpoint(tmp_path / "new", 1), checkpoint(tmp_path / "newer", 2)
    config = engine_config(tmp_path / "old")
    own = {**config.runner_config, "dtype": family_dtype}
    async with Engine(msgspec.structs.replace(config, runner_config=own)) as engine:
        for number, options in enumerate(OPTIONS):
            model = (one, other)[number % 2]
            async with sender_of(engine, **options) as sender:
                # hashed on both sides, each in its own way
                expected = weights_fingerprint(model, dtype=family_dtype)
                await send(sender, engine, model, f"v{10 * number}", expected=expected)
                assert engine.facts().weight_version == f"v{10 * number}"
                # the same group again
                await send(sender, engine, model, expected=expected)
        await tokens(engine)
        engine.check()


@pytest.mark.ci
async def test_an_update_lies_between_two_steps_of_requests_that_go_on(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    async with Engine(engine_config(tmp_path / "old")) as engine, sender_of(engine) as sender:
        asking = msgspec.structs.replace(PARAMS, max_tokens=40, ignore_eos=True)
        async with engine.generate(PROMPT, asking) as stream:
            await anext(aiter(stream))
            await engine.begin_weight_update("keep")
            for part in parts_of(new, 3):
                await send(sender, engine, part)
            with pytest.raises(UpdateUnderWay):
                await engine.begin_weight_update()
            with pytest.raises(UpdateUnderWay):
                await engine.update_weights("x", str(tmp_path / "new"))
            await engine.end_weight_update("after", expected=fingerprint(new))
            result = await stream.finished()
        assert [span.version for span in result.samples[0].weight_version] == ["0", "after"]
        assert len(result.samples[0].token_ids) == 40
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
        engine.check()


async def test_what_does_not_fit_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    async with Engine(engine_config(tmp_path / "old")) as engine:
        before = await tokens(engine)
        name, tensor = next(iter(new.state_dict().items()))
        for bad, word in (
            ({name: tensor[1:]}, "shape"), ({f"{name}.other": tensor}, "no place"), ({name: tensor.long()}, "kind"),
        ):  # fmt: skip
            async with sender_of(engine) as sender:
                with pytest.raises(WeightsRejected, match=f"{word}.*; group 'weights' was left, since nobody knows"):
                    await send(sender, engine, bad, "x")
                # what rank 0 has sent is not known
                why = f"it was left when an update by it failed .*{word}.*; joined are: none"
                with pytest.raises(WeightsRejected, match=f"no group 'weights' is joined here: {why}"):
                    await engine.update_weights("x", sender.tell(new), "keep")
        assert engine.facts().weight_version == "0"
        assert await tokens(engine) == before
        await engine.update_weights("x", str(tmp_path / "new"))
        engine.check()


@pytest.mark.ci
async def test_a_trainer_that_dies_leaves_the_engine_paused_until_a_whole_update(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    stored = load_file(tmp_path / "new" / "model.safetensors")
    metas = tuple(TensorMeta(name, "float32", tuple(tensor.shape)) for name, tensor in stored.items())
    async with Engine(engine_config(tmp_path / "old")) as engine:
        async with Trainer.running(tmp_path / "new", 2, "--die-after", "5") as trainer:
            await engine.join_weights_group(trainer.group)
            await trainer.read("met")
            await trainer.broadcast()
            with pytest.raises(WeightsBroken, match="rank 0"):
                await engine.update_weights("x", GroupTensors(group=trainer.group.name, tensors=metas), "keep")
        assert engine.load().paused
        with pytest.raises(WeightsBroken):
            await tokens(engine)
        async with sender_of(engine) as sender:
            with pytest.raises(WeightsRejected, match="leaves out"):
                await send(sender, engine, parts_of(new, 4)[3], "x")
        async with sender_of(engine) as sender:
            await send(sender, engine, new, "x", expected=fingerprint(new))
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
        engine.check()


@pytest.mark.nightly
async def test_a_trainer_of_torchs_own_group_sends_checkpoint_names_tensor_by_tensor(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    checkpoint(tmp_path / "new", 1)
    stored = load_file(tmp_path / "new" / "model.safetensors")
    # experts come one by one, and go to rows of one tensor
    assert any(".experts.1." in name for name in stored)
    names = list(stored)
    async with (
        Engine(engine_config(tmp_path / "old", weights_interface="lo")) as engine,
        Trainer.running(tmp_path / "new") as trainer,
    ):
        await engine.join_weights_group(trainer.group)
        await trainer.read("met")
        await engine.pause()
        for some in (names[:7], names[7:]):
            await trainer.broadcast(some)
            metas = tuple(TensorMeta(name, "float32", tuple(stored[name].shape)) for name in some)
            # one version for what comes in one pause
            await engine.update_weights("7", GroupTensors(group=trainer.group.name, tensors=metas), "keep")
            await trainer.read("sent")
        await engine.resume()
        assert engine.facts().weight_version == "7"
        # a label may come again
        await trainer.broadcast(names[7:])
        await engine.update_weights("7", GroupTensors(group=trainer.group.name, tensors=metas), "keep")
        await trainer.read("sent")
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
        await engine.leave_weights_group(trainer.group.name)
        await engine.leave_weights_group(trainer.group.name)


def wait_briefly(engine: Engine, sender: Any, seconds: float) -> None:
    """Its group has met, with all the time that it takes on a busy machine; updates by it have so many seconds."""
    runtime: Any = engine._runtime
    joined = runtime.runner.opened.groups.get(sender.group.name)
    joined.spec = msgspec.structs.replace(joined.spec, timeout_s=seconds)


async def test_waits_end_and_a_wrong_checksum_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    async with Engine(engine_config(tmp_path / "old")) as engine:
        async with sender_of(engine) as sender:
            wait_briefly(engine, sender, 0.5)
            # announced, and never sent
            with pytest.raises(WeightsBroken) as caught:
                await engine.update_weights("x", sender.tell(new), "keep")
            words = f"the trainer of group {sender.group.name!r} sent nothing of this update within 0.5 s"
            assert words in str(caught.value)
        async with sender_of(engine, bucket_nbytes=4096) as sender:
            # what is sent comes by then
            wait_briefly(engine, sender, 3.0)
            # the first half of what was announced
            with pytest.raises(
                WeightsBroken, match=r"sent nothing behind [1-9]\d* of \d+ broadcasts of this update within"
            ):
                await asyncio.gather(
                    engine.update_weights("x", sender.tell(new), "keep"),
                    asyncio.to_thread(sender.send, parts_of(new, 2)[0]),
                )
        async with sender_of(engine, checksum=True) as sender:
            other = SimpleNamespace(xxh3_128=_OtherHash)
            monkeypatch.setattr("fdasync_transformers.weights.groups.sending.xxhash", other)
            with pytest.raises(WeightsBroken, match="checksum"):
                await send(sender, engine, new, "x")
            monkeypatch.undo()
        lonely = msgspec.structs.replace(sender.group, port=9, timeout_s=0.5)
        with pytest.raises(WeightsRejected, match="nobody answers"):
            await engine.join_weights_group(lonely)
        async with sender_of(engine) as sender:
            await send(sender, engine, new, "x", expected=fingerprint(new))
        await tokens(engine)


class _OtherHash:
    """A sender's, of other bytes."""

    def update(self, _data: Any) -> None: ...

    def digest(self) -> bytes:
        return bytes(16)


@pytest.mark.ci
async def test_an_update_in_parts_that_is_left_alone_ends(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    async with Engine(engine_config(tmp_path / "old", update_deadline_s=1.0)) as engine, sender_of(engine) as sender:
        before = await tokens(engine)
        # nothing came, nothing changed
        beginning = asyncio.create_task(engine.begin_weight_update())
        await asyncio.sleep(0)
        for early in (engine.end_weight_update("x"), engine.update_weights("x", sender.tell(new))):
            # steps may be in flight
            with pytest.raises(UpdateUnderWay):
                await early
        await beginning
        await engine.end_weight_update("never")
        await engine.begin_weight_update()
        await engine.abandon_weight_update()
        await engine.begin_weight_update()
        assert await asyncio.wait_for(tokens(engine), 300) == before
        assert engine.facts().weight_version == "0"
        with pytest.raises(BadInput, match="no update is open"):
            await engine.end_weight_update()
        # a part came
        await engine.begin_weight_update()
        await send(sender, engine, parts_of(new, 2)[0], "1")
        await engine.abandon_weight_update()
        with pytest.raises(WeightsBroken, match="abandoned"):
            await engine.resume()
        with pytest.raises(WeightsRejected, match="leaves out"):
            await send(sender, engine, parts_of(new, 2)[1], "1")
    async with Engine(engine_config(tmp_path / "old")) as engine, sender_of(engine) as sender:
        await engine.begin_weight_update()
        await send(sender, engine, parts_of(new, 2)[0], "1")
        with pytest.raises(WeightsBroken, match="replaced"):
            await send(sender, engine, {"nowhere": torch.zeros(3)})
        async with sender_of(engine) as other:
            await engine.begin_weight_update()
            for part in parts_of(new, 2):
                await send(other, engine, part, "1")
            await engine.end_weight_update(expected=fingerprint(new))
        assert engine.facts().weight_version == "1"
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")


async def test_groups_that_may_not_be_joined(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    async with Engine(engine_config(tmp_path / "old")) as engine, sender_of(engine) as sender:
        for changes, word in (
            ({"address": "192.0.2.7"}, "weights_interface"), ({"address": "trainer.example"}, "weights_interface"),
            ({"world_size": 1}, "world_size"), ({"rank": 2}, "world_size"), ({"rank": 0}, "rank"),
            ({"port": 0}, "port"),
            ({"backend": "mpi"}, "backend"), ({"name": ""}, "name"), ({"timeout_s": 0}, "timeout_s"),
        ):  # fmt: skip
            with pytest.raises(BadInput, match=word):
                await engine.join_weights_group(msgspec.structs.replace(sender.group, **changes))
        with pytest.raises(WeightsRejected, match="NCCL"):
            await engine.join_weights_group(msgspec.structs.replace(sender.group, backend="nccl"))
        part = GroupTensors(group="g", tensors=(TensorMeta("a", "float99", (1,)),))
        with pytest.raises(BadInput, match="dtype"):
            await engine.update_weights("x", part)
        with pytest.raises(BadInput, match="no tensors"):
            await engine.update_weights("x", GroupTensors(group="g", tensors=()))
