"""Text of a sample as a client asked for it, where that is not the engine's: special tokens shown, stops kept.

The engine's text leaves out special tokens and ends before a stop. Both are wishes of SGLang's and vLLM's clients, so
this module decodes a sample's tokens once more, in the front's process. Called by the rooms of paths.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from fdasync.engine.tokenizer import IncrementalDecoder, TokenKinds, WithSpecials
from fdasync.errors import FdasyncError, TokenizerFailed
from fdasync_http.bodies import check_text_size
from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import Tokenizer
    from fdasync_http.front import Front


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokens of a text. Raises TokenizerFailed for every error of the tokenizer, as engines do.

    Args:
        add_special_tokens: False: without those that the tokenizer puts around a text.
    """
    try:
        tokens = list(tokenizer.encode(text))
    except FdasyncError:
        raise
    except Exception as error:
        problem = f"encode raised {type(error).__name__}: {error}"
        raise TokenizerFailed(type(tokenizer).__name__, problem) from error
    if add_special_tokens:
        return tokens
    before, behind = added_by(tokenizer)
    return tokens[len(before) : len(tokens) - len(behind)]


def added_by(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text and behind it. Raises TokenizerFailed."""
    around = encoded(tokenizer, "")
    # those that a text has before it as well
    pairs = zip(around, encoded(tokenizer, "x"), strict=False)
    before = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return before, around[len(before) :]


def prompt_tokens(front: Front, field: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokens of a prompt, where the answer depends on them before the engine tells them. Raises Refused (400)."""
    if front.tokenizer is None:
        raise Refused(400, f"{field}: this server has no tokenizer; give token ids", param=field)
    check_text_size(field, text, front)
    return encoded(front.tokenizer, text, add_special_tokens=add_special_tokens)


class TextForm:
    """How the text of one request is made.

    Args:
        specials: special tokens have text.
        keeps_stop: the text goes on to the end of the sample's tokens, whatever stopped it.
        stop: the request's stop strings.
    """

    def __init__(self, front: Front, *, specials: bool, keeps_stop: bool, stop: Sequence[str]) -> None:
        self._tokenizer: Tokenizer | None = None
        self._keeps_stop = keeps_stop
        self._stop = tuple(stop)
        tokenizer = front.tokenizer
        if tokenizer is None or not (specials or keeps_stop):
            return
        if specials and not isinstance(tokenizer, WithSpecials):
            raise Refused(
                400, "skip_special_tokens=false: this tokenizer has no text of them", param="skip_special_tokens"
            )
        self._tokenizer = tokenizer.with_specials() if specials and isinstance(tokenizer, WithSpecials) else tokenizer

    def of_sample(self) -> SampleText:
        """Makes the text of one sample."""
        decoder = None
        if self._tokenizer is not None:
            decoder = IncrementalDecoder(self._tokenizer, TokenKinds(self._tokenizer))
        return SampleText(decoder, () if self._keeps_stop else self._stop, keeps_stop=self._keeps_stop)


class SampleText:
    """The text of one sample: what has become settled as it grows, and the whole at its end. A token costs the same
    however long the text is."""

    def __init__(self, decoder: IncrementalDecoder | None, stop: tuple[str, ...], *, keeps_stop: bool) -> None:
        self._decoder = decoder
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._fed = 0
        # what was decoded; of that, how many characters were given out, and the text that was not
        self._parts: list[str] = []
        self._given = 0
        self._held = ""
        # so many characters at the end may be the beginning of a stop string
        self._most_held = max(map(len, stop)) - 1 if decoder is not None and stop else 0

    def add(self, text: str, token_ids: Sequence[int]) -> str:
        """New text of the engine, and the tokens that came with it. Returns the text that has become settled: no stop
        string can take it away any more."""
        if self._decoder is not None:
            text = self._decoder.feed(token_ids)
            self._fed += len(token_ids)
        self._parts.append(text)
        held = self._held + text
        settled = max(len(held) - self._most_held, 0)
        self._held = held[settled:]
        self._given += settled
        return held[:settled]

    def rest(self, text: str, token_ids: Sequence[int], stop_token_id: int | None) -> str:
        """What `end` returns behind the text that `add` returned."""
        return self.end(text, token_ids, stop_token_id)[self._given :]

    def end(self, text: str, token_ids: Sequence[int], stop_token_id: int | None) -> str:
        """The whole text of a sample that has ended; called once.

        Args:
            text: the engine's.
            token_ids: all tokens of the sample.
            stop_token_id: the token that ended it, if one did.
        """
        if self._decoder is None:
            return text
        last = len(token_ids)
        if stop_token_id is not None and not self._keeps_stop and self._fed < last:
            last -= 1
        whole = "".join([*self._parts, self._decoder.feed(token_ids[self._fed : last]), self._decoder.flush()])
        found = [at for stop in self._stop if (at := whole.find(stop)) >= 0]
        return whole[: min(found)] if found else whole
