"""What goes over the socket of the transport: any bytes are within bounds, or refused."""

from __future__ import annotations

import contextlib

import pytest
from fdasync_fleet.transfer.tcp_wire import (
    MAX_RUN_NBYTES,
    NOT_OFFERED,
    OK,
    REPLY_NBYTES,
    REQUEST_NBYTES,
    Request,
    pack_reply,
    pack_request,
    parse_address,
    read_reply,
    read_requests,
)
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import ProtocolError
from fdasync.ipc.shared_memory import Part


@given(st.binary(max_size=5 * REQUEST_NBYTES), st.integers(0, 5))
def test_any_bytes_are_requests_within_bounds_or_refused(data, limit):
    unread = bytearray(data)
    with contextlib.suppress(ProtocolError):
        for request in read_requests(unread, limit):
            assert 1 <= request.length <= MAX_RUN_NBYTES
            assert request.start + request.length <= request.part.nbytes
            assert pack_request(request) in data
    assert len(data) - len(unread) <= limit * REQUEST_NBYTES


@given(st.binary(min_size=REPLY_NBYTES, max_size=REPLY_NBYTES), st.integers(0, 2**64 - 1), st.integers(1, 2**20))
def test_a_reply_answers_its_request_or_is_refused(data, number, length):
    with contextlib.suppress(ProtocolError):
        follows = read_reply(data, number, length)
        assert data == pack_reply(number, OK if follows else NOT_OFFERED, length if follows else 0)


@pytest.mark.ci
@given(st.text(max_size=40) | st.from_regex(r"\A[\[\]0-9.:]{0,24}:[0-9]{0,6}\Z"))
def test_an_address_is_loopback_or_refused(text):
    with contextlib.suppress(ProtocolError):
        host, port = parse_address(text)
        assert host.startswith(("127.", "::ffff:7f")) or host == "::1"
        assert 0 < port < 65536


def test_requests_and_replies_come_back():
    request = Request(2**63, Part(3, 2**40, 2**41), 7, MAX_RUN_NBYTES)
    data = bytearray(pack_request(request) * 3 + b"x")
    assert list(read_requests(data, 2)) == [request] * 2
    assert data == pack_request(request) + b"x"
    assert read_reply(pack_reply(5, OK, 9), 5, 9)
    assert not read_reply(pack_reply(5, NOT_OFFERED, 0), 5, 9)
