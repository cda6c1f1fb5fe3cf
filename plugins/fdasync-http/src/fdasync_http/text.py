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

    from fdasync import Sample
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync_http.front import Front


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokens of a text. Raises TokenizerFailed for every error of the tokenizer, as engines do.

    Args:
        add_special_tokens: False: without the special tokens that the tokenizer puts around a text.
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
    # the special tokens that any text has before it, too
    pairs = zip(around, encoded(tokenizer, "x"), strict=False)
    before = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return before, around[len(before) :]


def prompt_tokens(front: Front, field: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokens of a prompt, where the answer depends on them before the engine tells them. Raises Refused (400)."""
    if front.tokenizer is None:
        raise Refused(400, "this server has no tokenizer; give token ids", param=field)
    check_text_size(field, text, front)
    return encoded(front.tokenizer, text, add_special_tokens=add_special_tokens)


class TextForm:
    """How the text of one request is made.

    Args:
        specials: special tokens have text.
        keeps_stop: the text goes on to the end of the sample's tokens, whatever stopped it.
        stop: the request's stop strings.

    Attributes:
        specials: see there.
    """

    def __init__(self, front: Front, *, specials: bool, keeps_stop: bool, stop: Sequence[str]) -> None:
        self.specials = specials
        self._tokenizer: Tokenizer | None = None
        self._keeps_stop = keeps_stop
        self._stop = tuple(stop)
        tokenizer = front.tokenizer
        if tokenizer is None or not (specials or keeps_stop):
            return
        if specials and not isinstance(tokenizer, WithSpecials):
            raise Refused(400, "false: this tokenizer has no text of them", param="skip_special_tokens")
        self._tokenizer = tokenizer.with_specials() if specials and isinstance(tokenizer, WithSpecials) else tokenizer

    def of_sample(self) -> SampleText:
        """Makes the text of one sample."""
        decoder = None
        if self._tokenizer is not None:
            decoder = IncrementalDecoder(self._tokenizer, TokenKinds(self._tokenizer))
        return SampleText(decoder, self._stop, keeps_stop=self._keeps_stop)


class SampleText:
    """The text of one sample: what has become settled as it grows, and the whole at its end. A token costs the same
    however long the text is."""

    def __init__(self, decoder: IncrementalDecoder | None, stop: tuple[str, ...], *, keeps_stop: bool) -> None:
        self._decoder = decoder
        self._keeps_stop = keeps_stop
        self._fed = 0
        # what was decoded; of that, how many characters were there before the last token, how many were given out, and
        # the text that was not
        self._parts: list[str] = []
        self._count = 0
        self._before = 0
        self._given = 0
        self._held = ""
        # so many characters before the last token's text may be the beginning of a stop string that it completes; None:
        # nothing is held back
        self._begun = max(map(len, stop)) - 1 if decoder is not None and stop and not keeps_stop else None

    def add(self, text: str, token_ids: Sequence[int]) -> str:
        """New text of the engine, and the tokens that came with it. Returns the text that has become settled: neither a
        stop string nor a stop token can take it away any more."""
        if self._decoder is not None:
            text = self._feed(self._decoder, token_ids)
        else:
            self._parts.append(text)
        held = self._held + text
        settled = len(held) if self._begun is None else max(self._before - self._begun - self._given, 0)
        self._held = held[settled:]
        self._given += settled
        return held[:settled]

    def _feed(self, decoder: IncrementalDecoder, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        text = decoder.feed(token_ids[:-1])
        self._before = self._count + len(text)
        text += decoder.feed(token_ids[-1:])
        self._count += len(text)
        self._fed += len(token_ids)
        self._parts.append(text)
        return text

    def rest(self, sample: Sample) -> str:
        """What `end` returns behind the text that `add` returned."""
        return self.end(sample)[self._given :]

    def end(self, sample: Sample) -> str:
        """The whole text of a sample that has ended; called once."""
        if self._decoder is None:
            return sample.text
        tokens, last = sample.token_ids, len(sample.token_ids)
        # a token that stops it is no text
        is_cut = sample.stop_token_id is not None and not self._keeps_stop
        self._feed(self._decoder, tokens[self._fed : last - 1 if is_cut else last])
        whole = "".join([*self._parts, self._decoder.flush()])
        if is_cut:
            return whole[: self._before] if self._fed == last else whole
        if sample.stop_string and not self._keeps_stop:
            # it ends in what the last token added; what stands before may have been barred by `min_tokens`
            at = whole.find(sample.stop_string, max(self._before - len(sample.stop_string) + 1, 0))
            return whole[:at] if at >= 0 else whole
        return whole
