"""Odd values at the calls of a router end in an error that names the field."""

from __future__ import annotations

from fdasync_fleet.router.validation import check_request_id, folder_of, submit_of

from fdasync import Router, SamplingParams
from fdasync.request import ask_of, checked_aux, checked_version
from fdasync.testing import run_sim
from tests.support.router_scene import scene
from tests.test_odd_values import _OPTIONS, Typed, odd_ones


@odd_ones
def test_requests_of_a_router(odd):
    for option in _OPTIONS:
        with Typed():
            submit_of(ask_of([1, 2], SamplingParams(), {option: odd}, streams=False), 10.0)
    for prompt in (odd, [odd], [1, odd]):
        with Typed():
            submit_of(ask_of(prompt, SamplingParams(), {}, streams=False), 10.0)
    for check in (check_request_id, folder_of, checked_version, checked_aux):
        with Typed():
            check(odd)


@odd_ones
def test_calls_of_a_router(odd):
    async def play() -> None:
        async with scene("m0", command_s=1.0, connect_s=1.0) as made:
            router = made.router
            calls = [
                lambda: router.update_weights(odd, "/w"),
                lambda: router.update_weights(1, odd),
                lambda: router.update_weights(1, "/w", odd),
                lambda: router.update_weights(1, "/w", expected=odd),
                lambda: router.begin_weight_update(odd),
                lambda: router.set_weight_version(odd),
                lambda: router.join_weights_group(odd),
                lambda: router.leave_weights_group(odd),
                lambda: router.pause(odd),
                lambda: router.sleep(odd),
                lambda: router.sleep(1, odd),
                lambda: router.wake(odd),
                lambda: router.add(odd),
                lambda: router.drain(odd),
                lambda: router.drain(made.m0.address, odd),
            ]
            for call in calls:
                with Typed():
                    await call()
                await router.abandon_weight_update()
            for call in (router.abort, router.abort_all, router.remove, lambda odd: Router([odd])):
                with Typed():
                    call(odd)

    run_sim(play())
