"""prime-rl's training step, call by call: its generation through OpenAI's client, and its control calls.

From contracts.md: 3.1 (`/inference/v1/generate`, rows as an object whose bytes verifiers cut out of the answer) and 3.2
(control: `keep` pauses, a folder in `/update_weights`, calls repeated on 500 and above only). A `cache_salt` for each
policy keeps old KV out of new prompts; requests that run go on over an update. A rollout that is off policy too far is
cancelled, which is no call: its connection is closed. Conversations ask for the rows that they lack.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math

import httpx2
import numpy as np
import pytest
from openai import AsyncOpenAI
from trainer_stage import prompts, until_true
from trainer_truth import NEW, Call

from fdasync import SamplingParams
from fdasync.result import TopLogprobs

SHORT, LONG = 8, 120
MODEL = "policy"
ROWS_PREFIX = b'"routed_experts":{"data":"'


class PrimeRL:
    """The clients of prime-rl and of the packages that generate for it.

    Args:
        stage: the server.
        openai: OpenAI's client, at `/v1`.
        rows: the server was started for rows.

    Attributes:
        step: of the policy; the cache's salt.
    """

    def __init__(self, stage, openai, rows):
        self.stage, self.openai, self.rows = stage, openai, rows
        self.step = 0

    async def start(self):
        async def works():
            return (await self.stage.client.get("/health")).status_code == 200

        await until_true(works)
        (model,) = [card for card in (await self.stage.get("/v1/models"))["data"] if card["id"] == MODEL]
        self.max_model_len = model["max_model_len"]

    async def generate(self, prompt, seed, count, *, start=None, head=0):
        """One call. `start`: position of the first row; `head`: alternatives of each token."""
        assert len(prompt) <= self.max_model_len
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": count, "seed": seed, "ignore_eos": True,
            "stop_token_ids": [], "logprobs": head + 2 if head else 1, "skip_special_tokens": False,
        }  # fmt: skip
        if head:
            sampling |= {"flat_logprobs": True, "extra_args": {"prl_compact_logprobs": True}, "detokenize": False}
        if start is not None:
            sampling["routed_experts_prompt_start"] = start
        body = {
            "model": MODEL,
            "token_ids": prompt,
            "sampling_params": sampling,
            "cache_salt": str(self.step),
            "priority": 0,
        }
        answer = await self.openai.post(
            f"{self.stage.url}/inference/v1/generate", cast_to=httpx2.Response, body=body,
            options={"headers": {"X-data-parallel-rank": "0"}},
        )  # fmt: skip
        told = self._read(answer.content)
        choice = told["choices"][0]
        assert told["request_id"]
        assert told["usage"]["completion_tokens"] == len(choice["token_ids"])
        return self._call(prompt, seed, count, choice, head)

    def _read(self, raw):
        """The answer, whose rows are cut out before it is read as JSON."""
        if not self.rows:
            assert ROWS_PREFIX not in raw
            return json.loads(raw)
        first = raw.index(ROWS_PREFIX) + len(ROWS_PREFIX)
        last = raw.index(b'"', first)
        told = json.loads(raw[:first] + raw[last:])
        rows = told["choices"][0]["routed_experts"]
        assert rows["data"] == ""
        rows["data"] = raw[first:last]
        return told

    def _call(self, prompt, seed, count, choice, head):
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert all(math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0 for entry in content)
        width = head + 2 if head else 1
        tops = []
        for entry in content:
            ids = tuple(int(top["token"].removeprefix("token_id:")) for top in entry["top_logprobs"])
            assert len(set(ids)) == len(ids) == width
            tops.append(TopLogprobs(ids, tuple(top["logprob"] for top in entry["top_logprobs"])))
        rows, start = None, 0
        if self.rows:
            packed = choice["routed_experts"]
            assert packed["dtype"] in ("uint8", "uint16")
            start = packed["start"]
            rows = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        params = SamplingParams(max_tokens=count, seed=seed, logprobs="raw", top_logprobs=width, ignore_eos=True)
        return Call(prompt, params, tokens, [entry["logprob"] for entry in content], rows, start,
                    choice["finish_reason"], spans, tuple(tops))  # fmt: skip

    async def _admin(self, path, **more):
        """Repeated on 500 and above, and where the connection fails; that may not happen here."""
        answer = await self.stage.client.post(path, **more)
        assert answer.status_code < 500, f"{path} would be sent again: {answer.text}"
        answer.raise_for_status()
        return answer

    async def update(self, folder):
        """As one call of the orchestrator, which resumes whatever comes."""
        await self._admin("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            # the marker of its other transport, an empty file beside the weights
            (folder / "NCCL_READY").touch()
            await self._admin("/update_weights", json={"weight_dir": folder.as_posix()})
        finally:
            await self._admin("/resume")
            # it cannot know whether the first one arrived
            await self._admin("/resume")
        self.step += 1

    async def conversation(self, prompt, seed):
        """Two turns: tokens, rows for all but the last, and the calls."""
        first = await self.generate(prompt, seed, SHORT)
        tokens = [*prompt, *first.tokens, 3, 4]
        if not self.rows:
            second = await self.generate(tokens, seed + 1, SHORT)
            return [*tokens, *second.tokens], None, (first, second)
        second = await self.generate(tokens, seed + 1, SHORT, start=len(first.rows))
        assert second.start == len(first.rows)
        return [*tokens, *second.tokens], np.concatenate([first.rows, second.rows]), (first, second)


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
async def test_prime_rl_trains_a_step(stage_of, place, rows):
    form = "prime_rl" if rows else "none"
    name = "served_model_name" if place == "process" else "model"
    async with (
        stage_of(place, dialect="vllm", rows=form, **{name: MODEL}) as stage,
        # a client that repeats nothing shows what it would repeat
        AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="EMPTY", max_retries=0, timeout=300) as openai,
    ):
        prime, truth = PrimeRL(stage, openai, rows), stage.truth
        await prime.start()

        long = [stage.begin(prime.generate(prompt, seed, LONG)) for seed, prompt in enumerate(prompts(3))]
        await stage.until_live(3)
        short = await asyncio.gather(
            *[prime.generate(prompt, seed, SHORT) for seed, prompt in enumerate(prompts(3, 4), 4)],
            prime.generate(prompts(1, 7)[0], 7, SHORT, head=3),
        )
        assert not any(call.done() for call in long)
        await prime.update(stage.save("step_1", "1", NEW))
        assert (await stage.get("/weight_info"))["weight_version"] == "1"
        for call in short:
            truth.check(call, with_rows=rows)
        again = await asyncio.gather(*[prime.generate(call.prompt, call.params.seed, SHORT) for call in short])
        for call, before in zip(again, short, strict=True):
            assert call.versions == ["1"]
            assert call.tokens != before.tokens
            truth.check(call, with_rows=rows)
        crossed = await asyncio.gather(*long)
        for call in crossed:
            assert (call.reason, len(call.tokens)) == ("length", LONG)
            truth.check_crossed(call, with_rows=rows, recomputed=False)
        assert ["0", "1"] in [call.versions for call in crossed]

        tokens, joined, calls = await prime.conversation(prompts(1, 40)[0], 40)
        for call in calls:
            truth.check(call, with_rows=rows)
        if rows:
            oracle = truth.of("1")
            np.testing.assert_array_equal(joined, oracle.rows(oracle.digests(tokens))[: len(tokens) - 1])

        # too far off policy: the rollouts are cancelled
        stale = [stage.begin(prime.generate(prompt, seed, 2 * LONG)) for seed, prompt in enumerate(prompts(3, 10), 10)]
        await stage.until_live(3)
        for call in stale:
            call.cancel()
        await stage.until_live(0)


async def test_what_else_prime_rl_would_send(stage_of):
    async with stage_of("engine", dialect="vllm", rows="prime_rl", model=MODEL) as stage:
        broadcast = {"host": "10.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 1200}
        assert "weight_dir" in await stage.refused("/init_broadcaster", broadcast)
        # repeated on 404 and 500, so neither
        assert "merge" in await stage.refused("/load_lora_adapter", {"lora_name": "r1", "lora_path": "/x"})
