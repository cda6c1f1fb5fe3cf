"""Miles' training step, call by call: rollouts that a pause takes back, and sessions whose rows come piece by piece.

From contracts.md: 2.1 to 2.5. Miles pauses with `retract` and flushes before it updates: requests that run go back to
the queue, must not hold the flush up, and go on by themselves. With `in_place` it does not flush, and its sessions ask
for the rows that they do not have.

Miles' trainer broadcasts over a process group (`test_groups.py`), publishes deltas (`tests/pulls`), or sends pickles,
which are refused in words that are compared. The update itself is played with `/update_weights_from_disk` and
`/update_weight_version`, which its engine client has.
"""

from __future__ import annotations

import asyncio
import base64
import re

import numpy as np
import pytest
from trainer_stage import prompts, until_true
from trainer_truth import NEW, Call

from fdasync import SamplingParams

SHORT, LONG = 8, 120
ENDS = ("stop", "length", "abort")


class Miles:
    """Miles' clients.

    Args:
        stage: the server.
        rows: rollout routing replay is on.
    """

    def __init__(self, stage, rows):
        self.stage, self.rows = stage, rows

    async def start(self):
        async def works():
            return (await self.stage.client.get("/health_generate")).status_code == 200

        await until_true(works)
        info = await self.stage.get("/get_server_info")
        host, _, port = self.stage.url.removeprefix("http://").rpartition(":")
        assert (info["host"], info["port"]) == (host, int(port))
        one = ("nnodes", "gpu_id_step", "tp_size", "dp_size", "pp_size", "ep_size")
        assert [info[name] for name in one] == [1] * len(one)
        assert (info["node_rank"], info["base_gpu_id"], info["enable_memory_saver"]) == (0, 0, False)
        assert info["enable_metrics"] is True

    async def version(self):
        return (await self.stage.get("/model_info"))["weight_version"]

    async def generate(self, prompt, seed, count):
        """One call."""
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False,
            "sampling_seed": seed, "max_new_tokens": count,
        }  # fmt: skip
        payload = {
            "input_ids": prompt, "sampling_params": sampling, "return_logprob": True,
            "return_routed_experts": self.rows, "return_indexer_topk": False,
        }  # fmt: skip
        headers = {"X-SMG-Routing-Key": f"sample-{seed}"}
        output = (await self.stage.post("/generate", payload, headers=headers)).json()
        meta = output["meta_info"]
        call = self._call(prompt, seed, count, meta)
        assert isinstance(output["text"], str)
        rows = None
        if "routed_experts" in meta:
            layers, _ = self.stage.truth.shape
            # a null has no encode: the key is there with rows, or it is not there
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"].encode("ascii")), np.int32)
            length = meta["prompt_tokens"] + len(call.tokens) - 1
            top_k = flat.size // (length * layers)
            assert flat.size in (length * layers * top_k, (length + 1) * layers * top_k)
            rows = flat[: length * layers * top_k].reshape(length, layers, top_k)
        return call._replace(rows=rows)

    @staticmethod
    def _call(prompt, seed, count, meta):
        """What a sample takes of `meta_info`, rows aside."""
        pairs = meta["output_token_logprobs"]
        assert meta["finish_reason"]["type"] in ENDS
        assert len(pairs) == meta["completion_tokens"]
        # staleness is the difference of numbers in versions
        assert re.search(r"\d+", meta["weight_version"])
        assert meta["cached_tokens"] >= 0
        spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        assert all(version and end <= len(pairs) for version, _, end in spans)
        params = SamplingParams(max_tokens=count, seed=seed, logprobs="processed", ignore_eos=True)
        return Call(
            prompt, params, [token for _, token, _ in pairs], [value for value, _, _ in pairs], None, 0,
            meta["finish_reason"]["type"], spans,
        )  # fmt: skip

    async def turn(self, tokens, held, seed, count):
        """One record of a session: the rows from `held` on."""
        body = {
            "model": "default", "messages": [{"role": "user", "content": "hi"}], "input_ids": tokens, "seed": seed,
            "logprobs": True, "return_meta_info": True, "no_stop_trim": False, "chat_template_kwargs": {},
            "max_tokens": count, "temperature": 1.0, "lora_path": None,
        }  # fmt: skip
        if self.rows:
            body |= {"return_routed_experts": True, "routed_experts_start_len": held}
        choice = (await self.stage.post("/v1/chat/completions", body)).json()["choices"][0]
        assert isinstance(choice["message"]["content"], str)
        meta = choice["meta_info"]
        call = self._call(tokens, seed, count, meta)
        if not self.rows:
            assert "routed_experts" not in meta
            return call
        assert meta["routed_experts_start_len"] == held
        layers, top_k = self.stage.truth.shape
        # no rows are "", where some were asked for
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"].encode("ascii")), np.int32)
        return call._replace(rows=flat.reshape(-1, layers, top_k), start=held)

    async def session(self, prompt, seed):
        """A conversation of three turns, merged: its tokens, all rows, and each turn."""
        layers, top_k = self.stage.truth.shape
        tokens, rows, calls = list(prompt), np.empty((0, layers, top_k), np.int32), []
        for turn, count in enumerate((SHORT, 1, SHORT)):
            # after a whole turn, the row of its last token is still missing; the second turn asks behind the prompt
            held = len(rows) if turn != 1 else len(tokens)
            call = await self.turn(tokens, held, seed + turn, count)
            if turn == 1 and self.rows:
                assert len(call.rows) == 0
            elif self.rows:
                rows = np.concatenate([rows, call.rows])
            calls.append(call)
            tokens = [*tokens, *call.tokens]
        return tokens, rows, calls

    async def abort(self):
        """Once; every pending request then answers."""
        await self.stage.post("/abort_request", {"abort_all": True})

    async def flush(self):
        async def is_flushed():
            return (await self.stage.client.get("/flush_cache")).status_code == 200

        await until_true(is_flushed)

    async def transports_are_refused(self):
        """What its trainer calls for an update."""
        assert "pickle" in await self.stage.refused("/update_weights_from_tensor", {"selector": None})

    async def load(self, folder, version):
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
        assert (await self.stage.post("/update_weights_from_disk", body)).json()["success"] is True
        await self.stage.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("place", "rows", "mode"),
    [
        ("engine", True, "retract"),
        ("engine", False, "in_place"),
        ("fleet", True, "retract"),
        ("router", True, "in_place"),
        pytest.param("router", True, "retract", marks=pytest.mark.nightly),
        pytest.param("process", True, "retract", marks=pytest.mark.nightly),
    ],
)
async def test_miles_trains_a_step(stage_of, place, rows, mode):
    # its trainer does not offload rollouts, and wants to read so
    async with stage_of(place, memory_saver="off") as stage:
        miles, truth = Miles(stage, rows), stage.truth
        await miles.start()
        assert await miles.version() == "0"

        # rollouts go on all the time; the short ones are trained on
        long = [stage.begin(miles.generate(prompt, seed, LONG)) for seed, prompt in enumerate(prompts(3))]
        await stage.until_live(3)
        session, *short = await asyncio.gather(
            miles.session(prompts(1, 30)[0], 30),
            *[miles.generate(prompt, seed, SHORT) for seed, prompt in enumerate(prompts(3, 4), 4)],
        )

        # the update, under requests that run
        assert (await stage.post("/pause_generation", {"mode": mode})).json()["status"] == "ok"
        assert not any(call.done() for call in long)
        if mode != "in_place":
            await miles.flush()
        await miles.transports_are_refused()
        await miles.load(stage.save("step_1", "1", NEW), "1")
        await stage.post("/continue_generation")
        assert await miles.version() == "1"
        for call in short:
            truth.check(call, with_rows=rows)
        check_session(truth, session, rows)
        again = await asyncio.gather(*[miles.generate(call.prompt, call.params.seed, SHORT) for call in short])
        for call, before in zip(again, short, strict=True):
            assert call.versions == ["1"]
            assert call.tokens != before.tokens
            truth.check(call, with_rows=rows)
        crossed = await asyncio.gather(*long)
        for call in crossed:
            assert (call.reason, len(call.tokens)) == ("length", LONG)
            truth.check_crossed(call, with_rows=rows, recomputed=mode == "retract")
        assert ["0", "1"] in [call.versions for call in crossed]
        check_session(truth, await miles.session(prompts(1, 30)[0], 30), rows)

        # enough: the rest is aborted, and answers with what it has
        rest = [stage.begin(miles.generate(prompt, seed, 2 * LONG)) for seed, prompt in enumerate(prompts(3, 8), 8)]
        await stage.until_live(3)
        await miles.abort()
        for call in await asyncio.gather(*rest):
            assert call.reason == "abort"
            truth.check(call, with_rows=rows)
        await miles.flush()
        assert await stage.num_live() == 0


def check_session(truth, session, rows):
    """Each turn is right, and the rows of the whole are those of one request over all tokens."""
    tokens, merged, calls = session
    for turn, call in enumerate(calls):
        # the second turn of one token asks from behind its prompt on
        truth.check(call if turn != 1 else call._replace(rows=None), with_rows=rows and turn != 1)
    if rows:
        version = calls[-1].versions[0]
        oracle = truth.of(version)
        want = oracle.rows(oracle.digests(tokens))[: len(tokens) - 1]
        np.testing.assert_array_equal(merged, want)
