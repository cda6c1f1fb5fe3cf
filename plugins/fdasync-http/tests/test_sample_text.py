"""The text of a sample as it grows, against a decoding of all its tokens at each step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fdasync_http.text import TextForm
from hypothesis import given
from hypothesis import strategies as st

TEXTS = ["a", "b", "é", "€", "🙂", "ab", " ", "\n", '"', "\\"]
SPECIALS = ["<s>", "<end>"]


class Bytes:
    """A token for each byte, and special ones; characters may be cut anywhere."""

    def __init__(self, *, shows: bool = False) -> None:
        self._shows = shows

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        special = [text if self._shows else "" for text in SPECIALS]
        data = b"".join([bytes([token]) if token < 256 else special[token - 256].encode() for token in token_ids])
        return data.decode(errors="replace")

    def with_specials(self):
        return Bytes(shows=True)


def cut(text, stops):
    """Before the first stop string."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def form_of(*, specials=False, keeps_stop=False, stop=()):
    return TextForm(SimpleNamespace(tokenizer=Bytes()), specials=specials, keeps_stop=keeps_stop, stop=stop)


tokens = st.lists(
    st.one_of(st.sampled_from(TEXTS).map(lambda text: list(text.encode())), st.sampled_from([[256], [257], [0xE2]])),
    max_size=20,
).map(lambda parts: [token for part in parts for token in part])


@given(
    token_ids=tokens,
    sizes=st.lists(st.integers(0, 5), max_size=30),
    stops=st.lists(st.sampled_from(["ab", "é€", "<end>", "b🙂", " \n", "a<s>"]), max_size=2),
    specials=st.booleans(),
    keeps_stop=st.booleans(),
    stop_token=st.sampled_from([None, None, 257]),
)
def test_what_is_given_out_is_what_a_decoding_of_all_tokens_gives(
    token_ids, sizes, stops, specials, keeps_stop, stop_token
):
    plain = not (specials or keeps_stop)
    ends = [*token_ids, 257] if stop_token else token_ids
    visible = ends[:-1] if stop_token and not keeps_stop else ends
    whole = Bytes(shows=specials).decode(visible)
    right = whole if keeps_stop else cut(whole, stops)
    # without wishes the text is the engine's
    engine = cut(Bytes().decode(token_ids), stops)
    text = form_of(specials=specials, keeps_stop=keeps_stop, stop=stops).of_sample()
    given_out, at = "", 0
    for size in sizes:
        new, ids = (engine[at : at + size], []) if plain else ("not looked at", token_ids[at : at + size])
        given_out += text.add(new, ids)
        at = min(at + size, len(engine if plain else token_ids))
        so_far = engine[:at] if plain else Bytes(shows=specials).decode(token_ids[:at])
        held = 0 if plain or keeps_stop or not stops else max(map(len, stops)) - 1
        # text of a character that is not whole comes later
        assert so_far.startswith(given_out)
        assert len(so_far.rstrip("\ufffd")) - held <= max(len(given_out), 0)
        assert len(given_out) <= max(len(so_far) - held, 0)
    rest = text.rest(engine, ends, stop_token)
    if plain:
        assert given_out + rest == engine
    else:
        # a stop string that only this text shows may stand in what was given out
        assert given_out + rest == right or (not rest and given_out.startswith(right))


@pytest.mark.parametrize("specials", [False, True])
def test_what_grows_is_given_out_once_however_long_the_text_is(specials):
    text = form_of(specials=specials, stop=["\n\n"]).of_sample()
    pieces = [text.add("é", list("é".encode())) for _ in range(20_000)]
    assert max(map(len, pieces)) == 1
    whole = "é" * 20_000
    rest = text.rest(whole, list(whole.encode()), None)
    assert "".join(pieces) + rest == whole
    assert len(rest) == specials
