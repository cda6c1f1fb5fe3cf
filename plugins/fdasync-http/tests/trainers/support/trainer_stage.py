"""What all trainers' clients have in common: calls that may not fail, polls with a deadline, folders of weights."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fdasync.runner.synthetic import WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    import httpx2
    from trainer_truth import Truth

T = TypeVar("T")

POLL_S, DEADLINE_S = 0.01, 300.0


class Stage(NamedTuple):
    """A server that runs.

    Attributes:
        client: talks to it.
        url: where it listens.
        weights: the folder whose folders clients may name.
        truth: knows every right token, log-prob and row.
        tasks: that `begin` has started; they are cancelled with the stage.
    """

    client: httpx2.AsyncClient
    url: str
    weights: Path
    truth: Truth
    tasks: list[asyncio.Task[Any]]

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Something that runs beside the test."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def save(self, name: str, version: str, weights_id: int) -> Path:
        """A checkpoint as the trainer would save it; from its update on, `version` names these weights."""
        folder = self.weights / name
        folder.mkdir()
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights_id": weights_id}))
        self.truth.weights[version] = weights_id
        return folder

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        """One call. Trainers send a call that fails again, up to 60 times, so none may fail once."""
        response = await self.client.post(path, json={} if body is None else body, **more)
        assert response.status_code == 200, f"{path} would be sent again: {response.status_code} {response.text}"
        return response

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        response = await self.client.get(path)
        assert response.status_code == 200, f"{path} would be asked again: {response.status_code} {response.text}"
        return response.json()

    async def refused(self, path: str, body: Any = None) -> str:
        """Why a path is not served by design; no client of OpenAI's would repeat it."""
        response = await self.client.post(path, json={} if body is None else body)
        assert (response.status_code, response.headers["x-should-retry"]) == (501, "false"), response.text
        error = response.json()["error"]
        assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "not_served")
        return str(error["message"])

    async def num_live(self) -> int:
        """Requests that have not ended, as `/v1/loads` tells."""
        loads = (await self.get("/v1/loads?include=core"))["loads"]
        return sum(load["num_reqs"] for load in loads)

    async def until_live(self, count: int) -> None:
        """Returns when so many requests are live: the server alone knows which have arrived."""

        async def are_there() -> bool:
            for task in self.tasks:
                # what failed tells why, instead of a timeout
                if task.done() and not task.cancelled():
                    task.result()  # of a task that is done
            return await self.num_live() == count

        await until_true(are_there)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - another program is asked
            await asyncio.sleep(POLL_S)


def prompts(count: int, first: int = 0) -> list[list[int]]:
    """Prompts without a common beginning, 5 to 11 tokens long."""
    return [[(7 * number + at) % 97 + 1 for at in range(5 + number % 7)] for number in range(first, first + count)]
