"""`fdasync top` refuses what is no URL and no key in words."""

from __future__ import annotations

import pytest
from fdasync_fleet.cli import top_sources
from fdasync_fleet.cli.top_sources import FrontSource

from fdasync.errors import FdasyncError, PeerUnreachable


class Dripping:
    """An answer that goes on, a byte at a time."""

    count = 0

    def read1(self, _most: int) -> bytes:
        self.count += 1
        return b"x"


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_sources, "_MOST_NBYTES", 1000)
    answer = Dripping()
    monkeypatch.setattr(top_sources.http.client.HTTPConnection, "request", lambda *_, **_options: None)
    monkeypatch.setattr(top_sources.http.client.HTTPConnection, "getresponse", lambda _: answer)
    with pytest.raises(PeerUnreachable, match="did not end"):
        FrontSource("http://127.0.0.1:1", "", 15.0).look()
    assert answer.count == 1001
    monkeypatch.setattr(top_sources, "_ANSWER_S", -1.0)
    with pytest.raises(PeerUnreachable, match="did not end"):
        FrontSource("http://127.0.0.1:1", "", 15.0).look()
    assert answer.count == 1002


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://[::1", ""), ("http://a..b/", ""), ("http://127.0.0.1:1", "a\nb"), ("http://127.0.0.1:1", "\u043a")],
)
def test_odd_urls_and_keys_are_refused_in_words(url: str, key: str) -> None:
    with pytest.raises(FdasyncError):
        FrontSource(url, key, 15.0).look()
