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


def stopped(token_ids, stops):
    """The tokens up to the first that completes a stop string, as an engine finds it; the string, and where it begins
    in the text with special tokens shown."""
    for count in range(1, len(token_ids) + 1):
        text = Bytes(shows=True).decode(token_ids[:count])
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda one: (one[0], stops.index(one[1])))
            return token_ids[:count], stop, at
    return token_ids, "", None


def ended(text, token_ids, stop_token_id=None, stop_string=""):
    return SimpleNamespace(text=text, token_ids=token_ids, stop_token_id=stop_token_id, stop_string=stop_string)


def form_of(*, specials=False, keeps_stop=False, stop=()):
    return TextForm(SimpleNamespace(tokenizer=Bytes()), specials=specials, keeps_stop=keeps_stop, stop=stop)


tokens = st.lists(
    st.one_of(st.sampled_from(TEXTS).map(lambda text: list(text.encode())), st.sampled_from([[256], [257], [0xE2]])),
    max_size=20,
).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.ci
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
    token_ids, stop, begin = stopped(token_ids, stops)
    stop_token = None if stop else stop_token
    ends = [*token_ids, 257] if stop_token else token_ids
    visible = ends[:-1] if stop_token and not keeps_stop else ends
    whole = Bytes(shows=specials).decode(visible)
    # text that shows no special tokens is cut where its own text has the string
    right = whole[:begin] if stop and specials and not keeps_stop else whole
    # without wishes the text is the engine's
    engine = Bytes().decode(token_ids)
    text = form_of(specials=specials, keeps_stop=keeps_stop, stop=stops).of_sample()
    given_out, at = "", 0
    for size in sizes:
        new, ids = (engine[at : at + size], []) if plain else ("not looked at", token_ids[at : at + size])
        given_out += text.add(new, ids)
        at = min(at + size, len(engine if plain else token_ids))
        so_far = engine[:at] if plain else Bytes(shows=specials).decode(token_ids[:at])
        held = 0
        if not (plain or keeps_stop) and stops:
            # a stop string ends in what the last token added, if in anything
            held = max(map(len, stops)) - 1
            so_far = Bytes(shows=specials).decode(token_ids[: max(at - 1, 0)])
        # text of a character that is not whole comes later
        assert so_far.startswith(given_out)
        assert len(so_far.rstrip("\ufffd")) - held <= max(len(given_out), 0)
        assert len(given_out) <= max(len(so_far) - held, 0)
    assert given_out + text.rest(ended(engine, ends, stop_token, stop)) == (engine if plain else right)


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_text_is_not_cut_where_tokens_ran_on(keeps_stop):
    # a stop string that ended nothing: it was barred by `min_tokens`
    text = form_of(specials=True, keeps_stop=keeps_stop, stop=["ab"]).of_sample()
    token_ids = [*b"xab", 256, *b"ab"]
    given_out = text.add("", token_ids[:4])
    assert given_out + text.rest(ended("not looked at", token_ids)) == "xab<s>ab"
    text = form_of(specials=True, stop=["ab"]).of_sample()
    assert text.end(ended("not looked at", token_ids, stop_string="ab")) == "xab<s>"


@pytest.mark.parametrize("specials", [False, True])
def test_what_grows_is_given_out_once_however_long_the_text_is(specials):
    text = form_of(specials=specials, stop=["\n\n"]).of_sample()
    pieces = [text.add("é", list("é".encode())) for _ in range(20_000)]
    assert max(map(len, pieces)) == 1
    whole = "é" * 20_000
    rest = text.rest(ended(whole, list(whole.encode())))
    assert "".join(pieces) + rest == whole
    # the last letter, and one before it
    assert len(rest) == 2 * specials
