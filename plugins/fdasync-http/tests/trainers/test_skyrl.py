"""SkyRL's training step, call by call: a pause that keeps requests, and one that ends them.

From contracts.md: 3.1 (`/skyrl/v1/generate` with rows, `/inference/v1/generate` without) and 3.2 (control). Its client
repeats broken connections only: every answer above 399 ends the run. Under a `keep` pause requests go on by themselves;
after an `abort` pause its callers send what they have as a longer prompt.

SkyRL's trainer broadcasts, which is refused; the refusals are compared. Its deltas are played in `tests/pulls`. The
update itself is played with a folder in `/update_weights`: its source would have to name `weight_dir` there, where it
names tensors now.
"""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from trainer_stage import prompts
from trainer_truth import NEW, Call

from fdasync import SamplingParams

SHORT, LONG = 8, 120


class SkyRL:
    """SkyRL's remote inference client.

    Args:
        stage: the server.
        rows: it asks for expert rows, on a path of its own.
    """

    def __init__(self, stage, rows):
        self.stage, self.rows = stage, rows
        self.path = "/skyrl/v1/generate" if rows else "/inference/v1/generate"

    async def start(self):
        assert (await self.stage.get("/get_world_size"))["world_size"] >= 1
        self.model = (await self.stage.get("/v1/models"))["data"][0]["id"]
        tokens = await self.stage.post("/tokenize", {"model": self.model, "prompt": "go", "add_special_tokens": True})
        assert tokens.json()["tokens"] == [6, 14]

    async def generate(self, prompt, seed, count):
        """One call, and the text of its tokens."""
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": count, "logprobs": 0,
            "seed": seed, "stop": None, "ignore_eos": True,
        }  # fmt: skip
        body = {"sampling_params": sampling, "model": self.model, "token_ids": prompt}
        headers = {"X-Session-ID": f"trajectory-{seed}"}
        choice = (await self.stage.post(self.path, body, headers=headers)).json()["choices"][0]
        tokens = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content", [])
        rows = None
        if self.rows and (tokens or choice["routed_experts"] is not None):
            rows = self._decoded(choice["routed_experts"])
        elif not self.rows and choice.get("routed_experts") is not None:
            # vLLM's own path brings its form, which SkyRL leaves there
            assert isinstance(choice["routed_experts"], str)
        text = (await self.stage.post("/detokenize", {"model": self.model, "tokens": tokens})).json()["prompt"]
        assert len(text) == len(tokens)
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        params = SamplingParams(max_tokens=count, seed=seed, logprobs="raw", ignore_eos=True)
        return Call(prompt, params, tokens, [entry["logprob"] for entry in content], rows, 0,
                    choice["finish_reason"], spans)  # fmt: skip

    @staticmethod
    def _decoded(packed):
        """What is no object, or has no rows, is refused."""
        if not isinstance(packed, dict) or not packed["shape"][0]:
            raise ValueError("no packed rows")
        if packed["dtype"] not in ("uint8", "int16", "int32"):
            raise ValueError(packed["dtype"])
        flat = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"])
        return flat.reshape(packed["shape"])

    async def pause(self, mode):
        """Also makes sure that the body is JSON, as its client does."""
        answer = await self.stage.client.post("/pause", params={"mode": mode, "clear_cache": "false"})
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert (await self.stage.get("/is_paused"))["is_paused"] is True

    async def resume(self):
        answer = await self.stage.client.post("/resume")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")

    async def broadcasts_are_refused(self):
        """What its trainer calls for an update, and around it."""
        for path, body, told in (
            ("/init_weight_transfer_engine", {"init_info": {"master_address": "10.0.0.1"}}, "weight_dir"),
            ("/collective_rpc", {"method": "update"}, "not served"),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a", "load_inplace": True}, "merge"),
        ):
            assert told in await self.stage.refused(path, body)
        tensors = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[1]], "packed": True}
        answer = await self.stage.client.post("/update_weights", json={"update_info": tensors})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "group_name")
        assert answer.json()["error"]["code"] == "not_served"

    async def load(self, folder, version):
        body = {"update_info": {"weight_dir": str(folder)}}
        assert (await self.stage.post("/update_weights", body)).json() == {"status": "ok", "weight_version": version}
        await self.stage.post("/reset_prefix_cache", {"reset_running_requests": False})


@pytest.mark.ci
@pytest.mark.parametrize(("place", "rows"), [("engine", True), ("engine", False), ("fleet", True), ("router", True)])
async def test_skyrl_trains_a_step(stage_of, place, rows):
    async with stage_of(place, dialect="vllm") as stage:
        skyrl, truth = SkyRL(stage, rows), stage.truth
        await skyrl.start()

        # rollouts that are longer than the others go on over the update
        long = [stage.begin(skyrl.generate(prompt, seed, LONG)) for seed, prompt in enumerate(prompts(3))]
        await stage.until_live(3)
        short = await asyncio.gather(
            *[skyrl.generate(prompt, seed, SHORT) for seed, prompt in enumerate(prompts(4, 4), 4)]
        )
        await skyrl.pause("keep")
        assert not any(call.done() for call in long)
        await skyrl.broadcasts_are_refused()
        await skyrl.load(stage.save("global_step_1", "1", NEW), "1")
        await skyrl.resume()
        for call in short:
            truth.check(call, with_rows=rows)
        again = await asyncio.gather(*[skyrl.generate(call.prompt, call.params.seed, SHORT) for call in short])
        for call, before in zip(again, short, strict=True):
            assert call.versions == ["1"]
            assert call.tokens != before.tokens
            truth.check(call, with_rows=rows)
        crossed = await asyncio.gather(*long)
        for call in crossed:
            assert (call.reason, len(call.tokens)) == ("length", LONG)
            truth.check_crossed(call, with_rows=rows, recomputed=False)
        assert ["0", "1"] in [call.versions for call in crossed]

        # an abort pause ends requests; they go on from what they have
        cut = [stage.begin(skyrl.generate(prompt, seed, LONG)) for seed, prompt in enumerate(prompts(3, 10), 10)]
        await stage.until_live(3)
        await skyrl.generate(prompts(1, 30)[0], 30, SHORT)
        await skyrl.pause("abort")
        partial = await asyncio.gather(*cut)
        assert await stage.num_live() == 0
        rest = [stage.begin(skyrl.generate([*call.prompt, *call.tokens], call.params.seed, SHORT)) for call in partial]
        await stage.until_live(3)
        await skyrl.resume()
        for call, longer in zip(partial, await asyncio.gather(*rest), strict=True):
            assert (call.reason, longer.reason) == ("abort", "length")
            for one in (call, longer):
                truth.check(one, with_rows=rows)
            # the seed of a token is that of its position: nothing shows where it was cut
            whole = truth.of("1").generate(
                call.prompt, len(call.tokens) + SHORT, temperature=1.0, seed=call.params.seed
            )
            assert [*call.tokens, *longer.tokens] == whole
        assert await stage.num_live() == 0
