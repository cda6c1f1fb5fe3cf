"""`fdasync top` refuses what is no URL and no key in words."""

from __future__ import annotations

import pytest

from fdasync.cli.top_sources import FrontSource
from fdasync.errors import FdasyncError


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://[::1", ""), ("http://a..b/", ""), ("http://127.0.0.1:1", "a\nb"), ("http://127.0.0.1:1", "\u043a")],
)
def test_odd_urls_and_keys_are_refused_in_words(url: str, key: str) -> None:
    with pytest.raises(FdasyncError):
        FrontSource(url, key, 15.0).look()
