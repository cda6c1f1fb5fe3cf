"""slime's training step, call by call: external engines, partial rollouts, weights through a folder.

From contracts.md: 2.1 and 2.2 (what `/generate` is asked and how its answers are read), 2.4 (control), 2.5 (external
engines) and part 1 (rows, strictly one for each token but the last). Streams end in no other way than that the client
goes; all else is aborted until `/v1/loads` is 0. slime's own router is left out: this server tells its own address
where the router would tell its workers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil

import numpy as np
import pytest
from trainer_stage import prompts, until_true
from trainer_truth import NEW, Call

from fdasync import SamplingParams

SHORT, LONG = 8, 400
STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class Sample:
    """slime's sample: what all calls for it brought, one behind the other.

    Attributes:
        tokens: of prompt and response.
        rows: [tokens - 1, layers, top-k] once the last call has brought them.
        calls: each call, for the comparison.
    """

    def __init__(self, prompt, budget, seed):
        self.prompt, self.budget, self.seed = prompt, budget, seed
        self.tokens = list(prompt)
        self.log_probs, self.versions, self.calls = [], [], []
        self.response_length = 0
        self.rows = None
        self.status = "pending"

    def append(self, stage, sent, meta, *, wants_rows):
        """What one answer brings."""
        new = [token for _, token, _ in meta["output_token_logprobs"]]
        log_probs = [value for value, _, _ in meta["output_token_logprobs"]]
        assert len(new) == meta["completion_tokens"]
        assert meta["prompt_tokens"] == len(sent) or not new
        self.tokens += new
        self.response_length += len(new)
        self.log_probs += log_probs
        rows, start = None, 0
        if meta.get("routed_experts") is not None:
            layers, top_k = stage.truth.shape
            start = meta.get("routed_experts_start_len") or 0
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            rows = flat.reshape(len(sent) + len(new) - 1 - start, layers, top_k)
            held = 0 if self.rows is None else len(self.rows)
            assert start <= held
            self.rows = rows if not start else np.concatenate([self.rows[:start], rows])
            assert len(self.rows) == len(self.tokens) - 1
        assert wants_rows or rows is None
        self.versions.append(meta["weight_version"])
        reason = meta["finish_reason"]["type"]
        self.status = STATUS[reason]
        spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        params = SamplingParams(max_tokens=self.budget - self.response_length + len(new), seed=self.seed,
                                logprobs="processed", ignore_eos=True)  # fmt: skip
        self.calls.append(Call(sent, params, new, log_probs, rows, start, reason, spans))


class Slime:
    """slime's clients.

    Args:
        stage: the server.
        rows: rollout routing replay is on.
    """

    def __init__(self, stage, rows):
        self.stage, self.rows = stage, rows

    async def start(self):
        await until_true(self._works)
        info = await self.stage.get("/server_info")
        assert {"pp_size": 1, "ep_size": 1, "moe_dp_size": 1, "encoder_only": False}.items() <= info.items()
        assert info["tp_size"] >= 1 <= info["num_gpus"]
        assert info["disaggregation_mode"] not in ("prefill", "decode")
        # as `--offload-rollout` is of its trainer
        assert info["enable_memory_saver"] is False
        assert info["enable_return_routed_experts"] is True
        assert await self.version() == "0"

    async def _works(self):
        return (await self.stage.client.get("/health_generate")).status_code == 200

    async def version(self):
        return (await self.stage.get("/get_weight_version"))["weight_version"]

    def _payload(self, sample):
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": sample.budget - sample.response_length,
            "stop": None, "stop_token_ids": None, "skip_special_tokens": True, "no_stop_trim": True,
            "spaces_between_special_tokens": False, "sampling_seed": sample.seed,
        }  # fmt: skip
        payload = {"sampling_params": sampling, "return_logprob": True, "input_ids": list(sample.tokens)}
        return {**payload, "return_routed_experts": True} if self.rows else payload

    async def generate(self, sample):
        """One call; the tokens so far are the prompt."""
        assert sample.status in ("pending", "aborted")
        payload = self._payload(sample)
        headers = {"X-SMG-Routing-Key": f"session-{sample.seed}"}
        output = (await self.stage.post("/generate", payload, headers=headers)).json()
        assert isinstance(output["text"], str)
        sample.append(self.stage, payload["input_ids"], output["meta_info"], wants_rows=self.rows)
        return sample

    async def stream(self, sample, begun):
        """As `generate`, whose answer comes in pieces; the sample is made anew of each. `begun` is set at the first."""
        payload = {**self._payload(sample), "stream": True}
        tokens, sent = list(sample.tokens), payload["input_ids"]
        async with self.stage.client.stream("POST", "/generate", json=payload) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return sample
                chunk = json.loads(data)
                assert "error" not in chunk
                meta = chunk["meta_info"]
                if meta["finish_reason"] is None:
                    assert "routed_experts" not in meta
                    pairs = meta["output_token_logprobs"]
                    sample.tokens = tokens + [token for _, token, _ in pairs]
                    sample.response_length = len(sample.tokens) - len(sample.prompt)
                    begun.set()
                    continue
                sample.tokens, sample.response_length = list(tokens), len(tokens) - len(sample.prompt)
                sample.append(self.stage, sent, meta, wants_rows=self.rows)
        raise AssertionError("a stream ended without [DONE]")

    async def abort_until_idle(self):
        """Every 3 seconds, until the load is 0."""
        for worker in (await self.stage.get("/workers"))["workers"]:
            url = worker["url"]

            async def is_idle(url=url):
                answer = await self.stage.post(f"{url}/abort_request", {"abort_all": True})
                assert answer.content == b""
                load = await self.stage.get(f"{url}/v1/loads?include=core,disagg,queues")
                return not sum(entry["num_reqs"] for entry in load["loads"])

            await until_true(is_idle)

    async def pause(self):
        assert (await self.stage.post("/pause_generation")).json()["status"] == "ok"

    async def flush(self):
        """Asked 60 times, a second apart; then slime gives up."""

        async def is_flushed():
            return (await self.stage.client.get("/flush_cache")).status_code == 200

        await until_true(is_flushed)

    async def load(self, folder, version):
        body = {"model_path": str(folder), "load_format": None, "flush_cache": True, "weight_version": version}
        assert (await self.stage.post("/update_weights_from_disk", body)).json()["success"] is True
        # slime keeps no files of a version that is in use
        shutil.rmtree(folder)

    async def go_on(self):
        await self.stage.post("/continue_generation")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("place", "rows"),
    [
        ("engine", True),
        ("engine", False),
        ("fleet", True),
        ("router", True),
        pytest.param("process", True, marks=pytest.mark.nightly),
    ],
)
async def test_slime_trains_a_step(stage_of, place, rows):
    async with stage_of(place, memory_saver="off") as stage:
        slime, truth = Slime(stage, rows), stage.truth
        await slime.start()

        # more samples are begun than are needed: the first ones that end are enough
        long = [Sample(prompt, LONG, seed) for seed, prompt in enumerate(prompts(3))]
        streamed = [Sample(prompt, LONG, seed) for seed, prompt in enumerate(prompts(2, 3), 3)]
        short = [Sample(prompt, SHORT, seed) for seed, prompt in enumerate(prompts(4, 5), 5)]
        begun = [asyncio.Event() for _ in streamed]
        pending = [stage.begin(slime.generate(sample)) for sample in long]
        streams = [stage.begin(slime.stream(sample, event)) for sample, event in zip(streamed, begun, strict=True)]
        await stage.until_live(5)
        await asyncio.gather(*[slime.generate(sample) for sample in short[:3]], slime.stream(short[3], asyncio.Event()))
        assert [sample.status for sample in short] == ["truncated"] * 4
        for event in begun:
            await event.wait()

        # the others are partial samples
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await slime.abort_until_idle()
        await asyncio.gather(*pending)
        assert [sample.status for sample in long] == ["aborted"] * 3
        for sample in (*short, *long):
            truth.check(sample.calls[0], with_rows=rows)
        for sample in streamed:
            right = truth.of("0").generate(sample.prompt, LONG, temperature=1.0, seed=sample.seed)
            assert 0 < sample.response_length < LONG
            assert sample.tokens == [*sample.prompt, *right[: sample.response_length]]

        # the update; a rollout that is begun meanwhile waits, and holds nothing up
        await slime.pause()
        early = Sample(prompts(1, 20)[0], SHORT, 20)
        waits = stage.begin(slime.generate(early))
        await stage.until_live(1)
        await slime.flush()
        await slime.load(stage.save("weight_v000001", "1", NEW), "1")
        assert not waits.done()
        await slime.go_on()
        await waits
        assert await slime.version() == "1"

        # partial samples go on where they stood, under the new weights; and new ones
        partial = [*long, *streamed]
        for sample in partial:
            # not all of a long response is needed here
            sample.budget = sample.response_length + SHORT
        again = [Sample(sample.prompt, SHORT, sample.seed) for sample in short]
        await asyncio.gather(*[slime.generate(sample) for sample in (*partial, *again)])
        for sample in (early, *partial, *again):
            assert (sample.status, sample.versions[-1]) == ("truncated", "1")
            truth.check(sample.calls[-1], with_rows=rows)
        for sample in partial:
            assert sample.response_length == sample.budget
            assert len(sample.tokens) == len(sample.prompt) + sample.budget
            if rows:
                # the last call brought all rows anew
                np.testing.assert_array_equal(sample.rows, sample.calls[-1].rows)
        assert [sample.versions for sample in long] == [["0", "1"]] * 3
        assert all(new.tokens != old.tokens for new, old in zip(again, short, strict=True))
        await slime.flush()
        assert await stage.num_live() == 0


async def test_slimes_other_transports_name_the_safe_one(stage_of):
    async with stage_of("engine") as stage:
        message = await stage.refused("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]})
        assert "pickle" in message
        assert "disk" in message
