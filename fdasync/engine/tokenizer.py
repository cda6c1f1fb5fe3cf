"""What the engine needs of a tokenizer, and incremental decoding on top of it.

Plugins register a factory under `fdasync.tokenizers`: a callable that takes the model folder and
returns a `Tokenizer`. Used by `prepare.py` (encode) and `output.py` (decode); without one the engine is
tokens in, tokens out.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer(Protocol):
    """Text to token ids and back. Both calls are pure and may be made from any process."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects at its start.

        Called for rare characters, too, to find out how this tokenizer spells them (`TokenKinds`).
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out. Incomplete UTF-8 becomes U+FFFD.

        It need not be the texts of single tokens in a row; `IncrementalDecoder` says what may depend on what.
        """
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A tokenizer that says what it is made of, so that two instances can tell whether they have the same one."""

    def fingerprint(self) -> bytes:
        """Equal for tokenizers that do the same with every text and every token id; another one for any other."""
        ...


# characters that no vocabulary has as a token: a tokenizer that knows bytes spells them
_RARE = ("\U0010fffd", "\U000f1e5d", "\U00012031")
_REPLACEMENT = "\ufffd"
# where nothing is spelled in bytes, they are looked for among so many tokens, and so many that may end a character
_SEARCHED_TOKENS = 1024
_MAX_CONTINUATIONS = 16
# a character of UTF-8 has up to four bytes, so one that is not complete up to three; decoders show one U+FFFD for it
# or one for each byte
_MAX_INCOMPLETE = 3
# a window of more tokens is cut to its last ones: enough for a character, and for what a space needs before it
_MAX_WINDOW_TOKENS = 16
_KEPT_TOKENS = 8
# a window that cannot be cut is decoded each time it has twice as many
_MAX_STUCK_TOKENS = 64


class TokenKind(Enum):
    """What a token does to its neighbours' text.

    Attributes:
        PIECE: has text of its own, or a part of a character (byte-level).
        BYTE: a byte of a run that is decoded as one: clean if the run is UTF-8 from its first byte to its last, else
            one U+FFFD for each byte (the `ByteFallback` of the `tokenizers` library: Llama 2, Mistral, Gemma).
        UNSEEN: as if it were not there, in the middle of a character too: special tokens, ids without a token.
    """

    PIECE = auto()
    BYTE = auto()
    UNSEEN = auto()


class TokenKinds:
    """Which tokens of a tokenizer are of which kind; found by decoding each once, beside a character known to be rare.

    One object serves all requests of an engine. It looks at the tokenizer when it is first asked.

    Attributes:
        tokenizer: whose tokens.
        known: the tokenizer could be asked. If not (it cannot encode, or what it decodes is no text), all are pieces.
        spelling: the tokens of a rare character, if bytes of runs are (`TokenKind.BYTE`); else ().
        spelled: the rare character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known = False
        self.spelling: tuple[int, ...] = ()
        self.spelled = ""
        self._asked = False
        # between these a token that is unseen changes nothing
        self._before: tuple[int, ...] = ()
        self._behind: tuple[int, ...] = ()
        self._without = ""
        self._kinds: dict[int, TokenKind] = {}

    def of(self, token_id: int) -> TokenKind:
        """The kind of a token. Raises what the tokenizer raises over this one."""
        kind = self._kinds.get(token_id)
        if kind is None:
            if not self._asked:
                self._asked = True
                self._ask()
            kind = self._kind(token_id) if self.known else TokenKind.PIECE
            self._kinds[token_id] = kind
        return kind

    def _kind(self, token_id: int) -> TokenKind:
        decode = self.tokenizer.decode
        if not decode([token_id]) and decode([*self._before, token_id, *self._behind]) == self._without:
            return TokenKind.UNSEEN
        # a run goes on over it, and is spoilt from its start by a byte that nothing completes
        if self.spelling and not decode([*self.spelling, token_id, self.spelling[0]]).startswith(self.spelled):
            return TokenKind.BYTE
        return TokenKind.PIECE

    def _ask(self) -> None:
        try:
            self._find_probe()
        except Exception:
            # a tokenizer that cannot do this is decoded with more patience; what is wrong with a request's tokens
            # shows when they are decoded
            self.known = False

    def _find_probe(self) -> None:
        decode = self.tokenizer.decode
        for character in _RARE:
            spelling = self._spell(character)
            if len(spelling) < 2:
                continue
            # in the middle no byte goes unnoticed, whatever the tokenizer does with those that are of no character
            middle = len(spelling) // 2
            self._before, self._behind, self._without = spelling[:middle], spelling[middle:], character
            self.known = True
            if not decode([*spelling, spelling[0]]).startswith(character):
                self.spelling, self.spelled = spelling, character
            return
        # it spells nothing in bytes: any text will do
        letter = tuple(self.tokenizer.encode("a"))
        self._before = self._behind = letter
        self._without = decode([*letter, *letter])
        self.known = "" != decode(letter) != self._without and _REPLACEMENT not in self._without
        # but a model may give bytes all the same
        self._find_bytes()

    def _find_bytes(self) -> None:
        """Two tokens that are no text alone and a character together, if they are bytes of runs. Vocabularies have
        their bytes at the beginning, in order."""
        decode = self.tokenizer.decode
        unclear = [token for token in range(_SEARCHED_TOKENS) if decode([token]) == _REPLACEMENT]
        for second in unclear[:_MAX_CONTINUATIONS]:
            for first in unclear:
                character = decode([first, second])
                if len(character) == 1 and character != _REPLACEMENT:
                    if not decode([first, second, first]).startswith(character):
                        self.spelling, self.spelled = (first, second), character
                    return

    def _spell(self, character: str) -> tuple[int, ...]:
        """The tokens that are this character, without what the tokenizer puts before and behind a text."""
        decode = self.tokenizer.decode
        tokens = tuple(self.tokenizer.encode(character))
        while tokens and character in decode(tokens[1:]):
            tokens = tokens[1:]
        while tokens and character in decode(tokens[:-1]):
            tokens = tokens[:-1]
        return tokens if decode(tokens) == character else ()


class IncrementalDecoder:
    """Text of a growing token list, without decoding it from the start each time.

    Text is given out once it cannot change any more, so what `feed` and `flush` return, joined, is `decode` of all
    tokens, however they are cut. Two things can change: up to three U+FFFD at the end, which may be a character that
    is not complete; and, for tokenizers that have them, an open run of bytes (`TokenKind.BYTE`), which one bad byte
    turns into U+FFFD from its first character on. So the text of a run comes when a token of another kind ends it;
    what it would be if it ended now is in `open_text`.

    This is exact for decoders that put the text of tokens in a row, whatever they do at the start of a text (they
    drop a space there), with characters cut anywhere (byte-level; U+FFFD for each byte or for each character that is
    not whole, or nothing) and with such runs. It is not for one that rewrites clean text when more comes: the cleaning
    up of spaces before punctuation is one, unless it is done token by token.

    A token costs the same however long the text is, and however long it stays unclear. Only a long stretch without
    any clean text of which nothing can be known (`TokenKinds.known`), or of pieces that have none, is decoded each
    time that it has doubled: text comes late then, never wrong.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds | None = None) -> None:
        """`kinds`: of this tokenizer, found out together with others; None: for this decoder alone."""
        self._decode = tokenizer.decode
        self._kinds = kinds or TokenKinds(tokenizer)
        # the last tokens before the open run, and how many characters of their text were given out
        self._window: list[int] = []
        self._given = 0
        # the window is known to have text
        self._started = False
        # how many tokens the window must have before it is decoded again
        self._due = 0
        self._run: list[int] = []
        # of the run: its clean text, of how many of its tokens that is, and with how many that was tried
        self._open = ""
        self._whole = 0
        self._tried = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that has become final with these tokens; may be "". Raises what the tokenizer raises."""
        before = len(self._window)
        for token in token_ids:
            kind = self._kinds.of(token)
            if kind is TokenKind.BYTE:
                self._run.append(token)
            elif kind is TokenKind.PIECE:
                if self._run:
                    self._end_run()
                self._window.append(token)
        if len(self._window) == before or len(self._window) < self._due:
            return ""
        return self._take(final=False)

    def flush(self) -> str:
        """What was held back; the end of the text. Raises what the tokenizer raises."""
        self._end_run()
        return self._take(final=True)

    def open_text(self) -> str:
        """Clean text that would be final if the open run of bytes ended here, or where its last whole character did.

        "" where there is no run, where text before it is late, and once it can be clean no more. Ask after each token:
        a token costs one decoding. Raises what the tokenizer raises.
        """
        run, spelling, spelled = self._run, self._kinds.spelling, self._kinds.spelled
        if self._tried - self._whole > _MAX_INCOMPLETE or len(self._window) < self._due:
            return ""
        for stop in range(len(run), max(self._tried, len(run) - _MAX_INCOMPLETE - 1), -1):
            text = self._decode([*spelling, *run[self._whole : stop]])
            if text.startswith(spelled):
                if self._started or self._open:
                    self._open += text[len(spelled) :]
                else:
                    # at the start of a text a space may be left out
                    self._open = self._decode([*self._window, *run[:stop]])
                self._whole = stop
                break
        self._tried = len(run)
        return self._open if len(run) - self._whole <= _MAX_INCOMPLETE else ""

    def _end_run(self) -> None:
        self._window += self._run
        self._run.clear()
        self._open = ""
        self._whole = self._tried = 0

    def _take(self, *, final: bool) -> str:
        text = self._decode(self._window)
        self._started = bool(text)
        stable = len(text)
        # where bytes come in runs, what stands before the open one is whole
        if not final and not self._kinds.spelling:
            while stable and len(text) - stable < _MAX_INCOMPLETE and text[stable - 1] == _REPLACEMENT:
                stable -= 1
        new = text[self._given : stable]
        self._given = max(self._given, stable)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut_window(text)
        return new

    def _cut_window(self, text: str) -> None:
        """Keep the last tokens of the window, if they have all that may still count."""
        kept = self._window[-_KEPT_TOKENS:]
        # it starts anywhere, so its first characters may differ; what is not given out yet stands at its end
        rest = text[self._given :]
        shown = self._decode(kept)
        # some text before the rest: at the start of a text spaces are dropped. Of tokens that may be unseen even many
        # may have no part in the character that is not complete
        if len(shown) > len(rest) and shown.endswith(rest) and (self._kinds.known or not text.endswith(_REPLACEMENT)):
            self._window = kept
            self._given = len(shown) - len(rest)
            self._due = 0
        elif len(self._window) > _MAX_STUCK_TOKENS:
            self._due = 2 * len(self._window)
