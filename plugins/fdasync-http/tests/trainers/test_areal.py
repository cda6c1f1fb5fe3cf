"""AReaL's training step, call by call: one loop for each rollout, which sends what was interrupted again.

From contracts.md: 2.1 and 2.2 (`sglang_remote`), 2.4 (pause and continue without a mode, weights from disk), part 1
(rows). Its sampling has no seed, so the rollouts are greedy. A rollout that a pause ends before its first token must
say "Abort before prefill". Its client spells `abort_all_request`, which no server knows; it pauses before it updates.
"""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from trainer_stage import prompts, until_true
from trainer_truth import NEW, Call

from fdasync import SamplingParams

SHORT, LONG = 6, 80
# rollouts that an engine of this process runs at a time
RUNNING = 8


class Areal:
    """AReaL's client.

    Args:
        stage: the server.
        rows: it asks for expert rows.

    Attributes:
        may_send: unset while an update is under way; a rollout that was interrupted waits for it.
        refused_early: answers that ended before their first token.
    """

    def __init__(self, stage, rows):
        self.stage, self.rows = stage, rows
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.refused_early = 0

    async def start(self):
        async def works():
            return (await self.stage.client.get("/health")).status_code == 200

        await until_true(works)

    async def generate(self, prompt, count):
        """One rollout: its tokens, its rows as this client joins them, and each call for it."""
        tokens, rows, calls = list(prompt), [], []
        left, reason = count, None
        while reason not in ("stop", "length") and left:
            await self.may_send.wait()
            sampling = {
                "top_p": 1.0, "top_k": 100_000_000, "max_new_tokens": left, "temperature": 0.0, "stop_token_ids": None,
                "frequency_penalty": 0.0, "ignore_eos": True,
            }  # fmt: skip
            payload = {
                "input_ids": list(tokens), "image_data": None, "sampling_params": sampling, "return_logprob": True,
                "stream": False,
            }  # fmt: skip
            if self.rows:
                payload["return_routed_experts"] = True
            meta = (await self.stage.post("/generate", payload)).json()["meta_info"]
            reason = meta["finish_reason"]["type"]
            if "routed_experts" in meta:
                # before it looks at how the call ended
                flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
                flat.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, -1)
            if reason == "abort" and meta["finish_reason"].get("message", "").startswith("Abort before prefill"):
                self.refused_early += 1
                continue
            call = self._call(payload["input_ids"], left, meta)
            calls.append(call)
            if call.rows is not None:
                layers, top_k = self.stage.truth.shape
                rows.append(call.rows.reshape(-1, layers * top_k))
            tokens += call.tokens
            left -= len(call.tokens)
        return tokens, rows, calls

    def _call(self, prompt, count, meta):
        pairs = meta["output_token_logprobs"]
        assert pairs, "an abort without tokens has its own words"
        rows = None
        if self.rows:
            if "routed_experts" not in meta and meta["finish_reason"]["type"] != "abort":
                raise RuntimeError("expert rows were asked for and are missing")
            layers, top_k = self.stage.truth.shape
            # the count is that of the server's own figures
            length = meta["prompt_tokens"] + meta["completion_tokens"] - 1
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            rows = flat.reshape(length, layers * top_k).reshape(length, layers, top_k)
        spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        # without randomness they are the model's own
        params = SamplingParams(max_tokens=count, temperature=0.0, logprobs="raw", ignore_eos=True)
        return Call(
            prompt, params, [token for _, token, _ in pairs], [value for value, _, _ in pairs], rows, 0,
            meta["finish_reason"]["type"], spans,
        )  # fmt: skip

    async def pause(self):
        """Its own rollouts send nothing from now on."""
        self.may_send.clear()
        await self.stage.post("/pause_generation")

    async def load(self, folder):
        body = {"model_path": str(folder), "abort_all_request": True}
        assert (await self.stage.post("/update_weights_from_disk", body)).json()["success"] is True

    async def go_on(self):
        await self.stage.post("/continue_generation")
        self.may_send.set()


@pytest.mark.ci
@pytest.mark.parametrize(("place", "rows"), [("engine", True), ("engine", False), ("fleet", True), ("router", True)])
async def test_areal_trains_a_step(stage_of, place, rows):
    async with stage_of(place) as stage:
        areal, truth = Areal(stage, rows), stage.truth
        await areal.start()

        # one ends; then there are more than an engine runs at a time, and two wait for their turn
        asked = prompts(RUNNING + 2 if place == "engine" else RUNNING - 2)
        long = [stage.begin(areal.generate(prompt, LONG)) for prompt in asked[:5]]
        await stage.until_live(5)
        before = await areal.generate(prompts(1, 20)[0], SHORT)
        long += [stage.begin(areal.generate(prompt, LONG)) for prompt in asked[5:]]
        await stage.until_live(len(asked))

        # the update interrupts all; a rollout of a worker that does not know of it is held by the server
        await areal.pause()
        held = stage.begin(Areal(stage, rows).generate(prompts(1, 20)[0], SHORT))
        await stage.until_live(1)
        await areal.load(stage.save("v1", "1", NEW))
        assert not any(one.done() for one in (*long, held))
        await areal.go_on()
        assert (await stage.get("/get_weight_version"))["weight_version"] == "1"

        for call in before[2]:
            truth.check(call, with_rows=rows)
        rollouts = await asyncio.gather(*long, held)
        for tokens, joined, calls in rollouts:
            for call in calls:
                truth.check(call, with_rows=rows)
            assert calls[-1].versions == ["1"]
            # what was interrupted is joined whole, prompt and all, as this client does
            lengths = [len(call.prompt) + len(call.tokens) - 1 for call in calls]
            assert [len(part) for part in joined] == (lengths if rows else [])
            assert len(tokens) == len(calls[0].prompt) + sum(len(call.tokens) for call in calls)
        assert [len(tokens) - LONG for tokens, _, _ in rollouts[:-1]] == [len(prompt) for prompt in asked]
        assert ["0", "1"] in [[version for call in calls for version in call.versions] for _, _, calls in rollouts]
        assert before[0] != rollouts[-1][0]
        if place == "engine":
            assert areal.refused_early >= 2
        assert await stage.num_live() == 0


async def test_what_areal_would_broadcast_from_elsewhere_is_refused(stage_of):
    async with stage_of("engine") as stage:
        # it sends the port as a text
        group = {"master_address": "10.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 2,
                 "group_name": "update", "backend": "nccl"}  # fmt: skip
        answer = await stage.client.post("/init_weights_update_group", json=group)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert "weights_interface" in answer.json()["message"]
        assert "merge" in await stage.refused("/load_lora_adapter", {"lora_name": "lora_1", "lora_path": "/x"})
