"""Text that the front tokenises itself."""

from __future__ import annotations

import pytest
from fdasync_http.text import encoded

from fdasync.errors import TokenizerFailed
from fdasync.testing import LetterTokenizer


class Chosen:
    """Raises an error of the house."""

    def encode(self, text):
        raise TokenizerFailed("chosen", text)


def test_every_error_of_a_tokenizer_is_one_of_the_house():
    assert encoded(LetterTokenizer(), "ab") == LetterTokenizer().encode("ab")
    with pytest.raises(TokenizerFailed, match=r"LetterTokenizer: encode raised ValueError"):
        encoded(LetterTokenizer(), "?")
    with pytest.raises(TokenizerFailed, match="tokenizer chosen: why"):
        encoded(Chosen(), "why")


async def test_text_that_a_tokenizer_cannot_read_is_no_defect_of_the_front(scene_of):
    async with scene_of() as scene:
        for path, body in (
            ("/tokenize", {"prompt": "?"}),
            ("/v1/completions", {"prompt": "?", "return_token_ids": True}),
            # tokenised by the engine
            ("/v1/completions", {"prompt": "?"}),
            ("/generate", {"text": "?"}),
        ):
            response = await scene.client.post(path, json=body)
            assert response.status_code == 503, path
            assert response.json()["error"]["code"] == "TokenizerFailed"
