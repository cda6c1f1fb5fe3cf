"""For embedders: the RL loop of `rl_loop.py` with the engine in another process, reached over HTTP alone.

    python examples/rl_over_http.py                  # over HTTP, then in this process, and whether they agree
    python examples/rl_over_http.py --steps 10 --only http

`fdasync http` serves the model. Tokens, log-probs and expert rows come as safetensors from `/v1/rollout`. The server's
workers join a process group of this program, over which it broadcasts the weights after each update: no file is
written, and nothing of the model is shared.

Both loops are lockstep: the engine is paused, all groups of a step are asked for, and it goes on once they all wait.
So both engines compute the same batches, and the KL of rollout and trainer must be the same to the last bit. A loop
that need not be compared leaves the pauses out, and lets requests cross updates as `rl_loop.py` does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import rl_loop  # beside this file, as is small_moe
import small_moe
import torch
from fdasync_transformers import WeightsSender, named_tensors
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load as load_safetensors

from fdasync import Engine, EngineConfig, Result, Routing, Sample, SamplingParams
from fdasync.result import CachedTokens, WeightSpan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2
    from rl_loop_report import StepFigures

STEPS = 4
PROBLEMS = 12  # groups of a step
SETTINGS = {"pipeline_depth": 1, "runner_config": {"dtype": "bfloat16", "num_threads": 1}}
START_S, END_S, CALL_S = 120.0, 30.0, 300.0


class RolloutEngine(Protocol):
    """What the loop needs of an engine, wherever it runs."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def complete(self, prompt: tuple[int, ...], params: SamplingParams, name: str, priority: int) -> Result: ...
    async def num_waiting(self) -> int:
        """Samples that wait to be computed."""
        ...

    async def update(self, model: Any, version: int) -> None:
        """Take the weights of the trainer's model."""
        ...


class Local:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pause, self.resume = engine.pause, engine.resume

    async def complete(self, prompt: tuple[int, ...], params: SamplingParams, name: str, priority: int) -> Result:
        return await self._engine.complete(prompt, params, request_id=name, priority=priority, deadline_s=CALL_S)

    async def num_waiting(self) -> int:
        return self._engine.load().waiting

    async def update(self, model: Any, version: int) -> None:
        await self._engine.update_weights(version, named_tensors(model), mode="keep")


class Remote:
    """A server.

    Args:
        client: its base URL is the server's.
        sender: rank 0 of the group that `join` has the server join.
    """

    def __init__(self, client: httpx2.AsyncClient, sender: WeightsSender) -> None:
        self._client = client
        self._sender = sender

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        answer = await self._client.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text}")
        return answer.content

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def num_waiting(self) -> int:
        facts = (await self._client.get("/server_info")).raise_for_status().json()
        return int(facts["internal_states"][0]["num_waiting_reqs"])

    async def complete(self, prompt: tuple[int, ...], params: SamplingParams, name: str, priority: int) -> Result:
        sampling = {field: getattr(params, field) for field in ("n", "temperature", "max_tokens", "logprobs", "seed")}
        body = {"token_ids": prompt, "sampling": sampling, "request_id": name, "priority": priority, "routing": True}
        answer = await self._post("/v1/rollout", {**body, "deadline_s": CALL_S})
        samples = [sample_of(file) for file in (files_of(answer) if params.n > 1 else [answer])]
        # files come in the order in which samples end; a trainer's sums depend on the order of its batch
        samples.sort(key=lambda sample: sample.index)
        return Result(request_id=name, prompt_token_ids=prompt, samples=tuple(samples))

    async def update(self, model: Any, version: int) -> None:
        part = self._sender.tell(model)
        body = {
            "names": [tensor.name for tensor in part.tensors],
            "dtypes": [tensor.dtype for tensor in part.tensors],
            "shapes": [tensor.shape for tensor in part.tensors],
            "group_name": part.group,
            "bucket_nbytes": part.bucket_nbytes,
            "weight_version": str(version),
        }
        # it blocks until the server's workers have received all
        sending = asyncio.create_task(asyncio.to_thread(self._sender.send, model))
        await self._post("/update_weights_from_distributed", body)
        await sending

    async def join(self) -> None:
        """Have the server's workers join the group, which this program is rank 0 of."""
        group = self._sender.group
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        joining = asyncio.create_task(asyncio.to_thread(self._sender.join))
        await self._post("/init_weights_update_group", body)
        await joining


def files_of(answer: bytes) -> list[bytes]:
    """The files of `/v1/rollout` with n above 1, each behind its length."""
    stream, files = BytesIO(answer), []
    while length := stream.read(8):
        files.append(stream.read(int.from_bytes(length, "little")))
    return files


def sample_of(file: bytes) -> Sample:
    """A safetensors file as the sample that an engine of this process would have returned."""
    arrays = load_safetensors(file)
    # the library gives no metadata of a file in memory: they stand in the header
    meta = msgspec.json.decode(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]
    if meta["routing.complete"] != "true":
        raise RuntimeError(f"{meta['request_id']} came without some of its experts")
    routing = Routing(
        array=arrays["routing"],
        start=int(meta["start"]),
        layer_ids=tuple(msgspec.json.decode(meta["routing.layer_ids"])),
        num_experts=int(meta["routing.num_experts"]),
    )
    return Sample(
        index=int(meta["index"]),
        token_ids=tuple(arrays["token_ids"].tolist()),
        text=meta["text"],
        raw_logprobs=arrays["raw_logprobs"],
        processed_logprobs=None,
        top_logprobs=None,
        finish_reason=meta["finish_reason"],
        cached=CachedTokens(),
        weight_version=tuple(msgspec.json.decode(meta["weight_versions"], type=list[WeightSpan])),
        routing=routing,
        aux={},
        start=routing.start,
    )


@asynccontextmanager
async def server(folder: Path, config: Path) -> AsyncIterator[Remote]:
    """`fdasync http` as a process of its own, and its client; it has ended when the block is left."""
    import httpx2

    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fdasync", "http", "--model", str(folder), "--config", str(config), "--port", "0",
        "--ready-fd", str(write), pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    try:
        ready = await ready_line(read)
        # the trainer, and the one worker of the server
        with WeightsSender(world_size=2) as sender:
            async with httpx2.AsyncClient(base_url=ready["url"], timeout=CALL_S) as client:
                remote = Remote(client, sender)
                await remote.join()
                yield remote
    finally:
        await end(process)


async def ready_line(read: int) -> dict[str, Any]:
    """What the server writes to `--ready-fd` once requests may come."""
    reader = asyncio.StreamReader()
    make = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await make(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
    try:
        line = await asyncio.wait_for(reader.readline(), START_S)
    finally:
        transport.close()
    if not line:
        raise RuntimeError("fdasync http did not start; what it said stands above")
    return dict(msgspec.json.decode(line))


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask the server to end, and see that it did. After Ctrl-C it has had the terminal's signal already."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def run_loop(
    engine: RolloutEngine, name: str, folder: Path, steps: int, problems: int, seed: int, console: Console
) -> list[StepFigures]:
    """The loop: the same problems, seeds and batches whatever `engine` is."""
    trainer = rl_loop.Trainer(folder, replay=True)
    asked = small_moe.problems(steps * problems, seed=seed + 1000)
    done: list[StepFigures] = []
    for version in range(steps):
        await engine.pause()
        groups = [
            asyncio.ensure_future(ask(engine, problem, number, first=number % problems))
            for number, problem in enumerate(asked[version * problems : (version + 1) * problems], version * problems)
        ]
        try:
            await all_wait(engine, groups, problems * rl_loop.GROUP)
            await engine.resume()
            batch = [one for group in await asyncio.gather(*groups) for one in group]
        finally:
            for group in groups:
                group.cancel()
        logprobs, clipped = await trainer.update(batch)
        await engine.update(trainer.model, version + 1)
        left_out = problems * rl_loop.GROUP - len(batch)
        done.append(
            rl_loop.figures(batch, logprobs, version, clipped, 0.0, 0.0, left_out, replayed=trainer.replayed_tokens)
        )
        one = done[-1]
        console.print(f"{name}: step {version + 1}, reward {one.reward:.3f}, K3 KL {one.fresh.k3:.3e}")
    return done


async def ask(engine: RolloutEngine, problem: small_moe.Problem, number: int, first: int) -> list[rl_loop.Experience]:
    """One group; `first` says which of a step's groups goes first, in whatever order they arrive."""
    params = SamplingParams(
        n=rl_loop.GROUP, temperature=1.0, max_tokens=small_moe.MAX_NEW_TOKENS, logprobs="raw", seed=number
    )
    return rl_loop.scored(problem, await engine.complete(problem.prompt, params, f"problem-{number}", -first))


async def all_wait(engine: RolloutEngine, groups: list[asyncio.Future[Any]], count: int) -> None:
    """Wait until `count` samples wait in the engine. Raises what a request raised."""
    async with asyncio.timeout(CALL_S):
        while await engine.num_waiting() < count:
            for group in groups:
                if group.done():
                    group.result()
            await asyncio.sleep(0.02)


def compared(runs: dict[str, list[StepFigures]]) -> Table:
    """The KL of each step in each loop, all digits; of two loops, whether they are equal."""
    drawn = Table(title="K3 KL of rollout and trainer")
    several = len(runs) > 1
    for column in ("step", *runs, *(["equal"] if several else ())):
        drawn.add_column(column, justify="right")
    for step, each in enumerate(zip(*runs.values(), strict=True), 1):
        equal = "yes" if len({(one.fresh, one.reward) for one in each}) == 1 else "NO"
        drawn.add_row(str(step), *[repr(one.fresh.k3) for one in each], *([equal] if several else ()))
    return drawn


async def run(chosen: argparse.Namespace, config: Path, console: Console) -> dict[str, list[StepFigures]]:
    """The loops that were chosen, one after the other."""
    runs: dict[str, list[StepFigures]] = {}
    sizes = (chosen.folder, chosen.steps, chosen.problems, chosen.seed, console)
    if chosen.only != "in-process":
        async with server(chosen.folder, config) as remote:
            runs["over HTTP"] = await run_loop(remote, "over HTTP", *sizes)
    if chosen.only != "http":
        local = EngineConfig.from_mapping({**SETTINGS, "model": str(chosen.folder), "seed": chosen.seed})
        async with Engine(local) as engine:
            runs["in process"] = await run_loop(Local(engine), "in process", *sizes)
    return runs


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdasync" / "small_moe"
    parser = argparse.ArgumentParser(
        description="An RL loop over HTTP, and the same in one process: their KL must be equal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="updates of each loop")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help=f"groups of {rl_loop.GROUP} samples in a step")
    parser.add_argument("--only", choices=("http", "in-process"), help="one loop, without a comparison")
    parser.add_argument("--folder", type=Path, default=cache, help="the model to start from, trained there first")
    parser.add_argument("--pretrain-steps", type=int, default=small_moe.STEPS, help="of that training")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the problems and the engine")
    chosen = parser.parse_args()
    if chosen.steps < 1 or chosen.problems < 1:
        parser.error("--steps and --problems must be 1 or more")
    if find_spec("httpx2") is None or find_spec("fdasync_http") is None:
        sys.exit("this needs the HTTP plugin and a client: pip install ./plugins/fdasync-{fleet,http} httpx2")
    # two threads would add in an order that is not the same each time
    torch.set_num_threads(1)
    console = Console(width=120, soft_wrap=True)
    try:
        try:
            small_moe.pretrain(chosen.folder, chosen.seed, chosen.pretrain_steps, say=console.print)
        except OSError as error:  # a file, a folder of something else, one that cannot be written
            sys.exit(f"rl_over_http.py: --folder {chosen.folder}: {error}")
        with tempfile.TemporaryDirectory(prefix="rl_over_http-") as made:
            config = Path(made, "engine.json")
            config.write_bytes(msgspec.json.encode({**SETTINGS, "seed": chosen.seed}))
            runs = asyncio.run(run(chosen, config, console))
    except KeyboardInterrupt:
        # the server and the workers have ended on the way here
        return 130
    table = compared(runs)
    console.print(table)
    return 0 if chosen.only or "NO" not in list(table.columns[-1].cells) else 1


if __name__ == "__main__":
    sys.exit(main())
