"""The contract of tokenizers, and incremental decoding on top of it.

A plugin registers a factory under `fdasync.tokenizers`: a callable that takes the model folder and returns a
`Tokenizer`, which may be a `ChatTokenizer` too. Without a tokenizer an engine is tokens in, tokens out. Knows no
requests. Called by `prepare.py` (encode) and `request_state.py` (decode); no engine calls a `ChatTokenizer`'s methods.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fdasync.errors import ChatUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: an object of JSON, as a caller's request holds it
    JsonObject = Mapping[str, Any]


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
    """A tokenizer with a fingerprint, by which two instances tell whether they have the same one."""

    def fingerprint(self) -> bytes:
        """Equal for tokenizers that do the same with every text and every token id, and for no others."""
        ...


@runtime_checkable
class WithSpecials(Protocol):
    """A tokenizer that can also show special tokens in text, for clients that ask for them."""

    def with_specials(self) -> Tokenizer:
        """The same tokenizer, whose `decode` gives special tokens the text that they have."""
        ...


@runtime_checkable
class WithPieces(Protocol):
    """A tokenizer that tells what one token puts into a text, for log-probs that name tokens, and how it is spelled.

    `decode` of one token is not that: a decoder drops a space at the start of a text, and has U+FFFD for a part of a
    character.
    """

    def piece(self, token_id: int) -> bytes:
        """What a token puts into a text behind other text, in UTF-8: with the space that it begins with; of a part of a
        character, its bytes; of a special token, the text that it has. b"" for an id without a token."""
        ...

    def spelling(self, token_id: int) -> str:
        """How the vocabulary spells a token, as `\u2581cat` or `\u0120cat`; "" for an id without one."""
        ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that makes tokens of chat messages, by the chat template of its checkpoint.

    A template is a program from the checkpoint, and a long conversation takes it long: call these methods in a process
    that may block, not on the loop of an engine. An engine calls none of them.
    """

    def chat_template(self, *, with_tools: bool = False) -> str:
        """The text of the template, from which a caller may tell the form of tool calls; "" where there is none.

        Args:
            with_tools: of the template for messages with tools, where the checkpoint has one of its own for them.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: JsonObject | None = None,
    ) -> list[int]:
        """Token ids of a conversation, special tokens included.

        Args:
            messages: {"role": ..., "content": ...} and what else the template knows; read, never changed.
            tools: JSON schemas of functions, as OpenAI's `tools` has them; None: none.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end within the last message, which the model goes on with; only without
                `add_generation_prompt`.
            template_kwargs: further variables of the template ("enable_thinking"); they cannot replace the template.

        Raises ChatUnsupported without a template; BadInput with the template's own words for messages that it refuses.
        """
        ...

    def parse_response(
        self, token_ids: Sequence[int], prompt_token_ids: Sequence[int], *, tools: Sequence[JsonObject] | None = None
    ) -> dict[str, Any] | None:
        """The message that an answer is: its role, content, reasoning and tool calls, as the checkpoint declares how to
        read them; None where it declares nothing.

        Args:
            token_ids: of the answer.
            prompt_token_ids: of the conversation before it, as `apply_chat_template` gave them: a template may have
                begun the answer.
            tools: as given with the messages; arguments of tool calls get the types that these say.

        Raises TokenizerFailed for an answer that cannot be read.
        """
        ...


def chat_of(tokenizer: Tokenizer) -> ChatTokenizer:
    """The tokenizer as one for chats. Raises ChatUnsupported naming its class, if its plugin has no chat methods."""
    if not isinstance(tokenizer, ChatTokenizer):
        raise ChatUnsupported(type(tokenizer).__name__, "knows no chat templates")
    return tokenizer


# characters that no vocabulary has as a token: a tokenizer with byte tokens spells them in bytes
_RARE = ("\U0010fffd", "\U000f1e5d", "\U00012031")
_REPLACEMENT = "\ufffd"
# where no character is spelled in bytes, byte tokens are searched among the first tokens, and so many are tried as the
# end of a character
_SEARCHED_TOKENS = 1024
_MAX_CONTINUATIONS = 16
# a character of UTF-8 has up to four bytes, so an incomplete one up to three; decoders show one U+FFFD for it or one
# for each byte
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
    """The kind of each token of a tokenizer, found by decoding each token once, beside a rare character.

    One object serves all requests of an engine. It probes the tokenizer at the first call of `of`.

    Attributes:
        tokenizer: the tokenizer that is probed.
        known: the probe worked. If not (the tokenizer cannot encode, or decodes to no text), all tokens are pieces.
        spelling: the tokens of a rare character, if they are bytes of a run (`TokenKind.BYTE`); else ().
        spelled: the rare character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known = False
        self.spelling: tuple[int, ...] = ()
        self.spelled = ""
        self._asked = False
        # an unseen token between these two changes nothing
        self._before: tuple[int, ...] = ()
        self._behind: tuple[int, ...] = ()
        self._without = ""
        self._kinds: dict[int, TokenKind] = {}
        self._specials: dict[int, str] = {}

    def special_text(self, token_id: int) -> str:
        """Text of a special token, which `decode` leaves out; "" for another token, and where the tokenizer cannot
        show it. Raises what the tokenizer raises."""
        text = self._specials.get(token_id)
        if text is None:
            text, own = "", self.tokenizer
            if isinstance(own, WithSpecials) and not own.decode([token_id]):
                text = own.with_specials().decode([token_id])
            self._specials[token_id] = text
        return text

    def of(self, token_id: int) -> TokenKind:
        """The kind of a token. Raises what the tokenizer raises when it decodes this token."""
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
        # a byte that completes no character spoils its run from the start
        if self.spelling and not decode([*self.spelling, token_id, self.spelling[0]]).startswith(self.spelled):
            return TokenKind.BYTE
        return TokenKind.PIECE

    def _ask(self) -> None:
        try:
            self._find_probe()
        except Exception:
            # the decoder waits longer for clean text then; an error over a request's tokens shows when they are decoded
            self.known = False

    def _find_probe(self) -> None:
        decode = self.tokenizer.decode
        for character in _RARE:
            spelling = self._spell(character)
            if len(spelling) < 2:
                continue
            # in the middle of a character every byte shows, whatever the tokenizer does with stray bytes
            middle = len(spelling) // 2
            self._before, self._behind, self._without = spelling[:middle], spelling[middle:], character
            self.known = True
            if not decode([*spelling, spelling[0]]).startswith(character):
                self.spelling, self.spelled = spelling, character
            return
        # no character is spelled in bytes: any text will do
        letter = tuple(self.tokenizer.encode("a"))
        self._before = self._behind = letter
        self._without = decode([*letter, *letter])
        self.known = "" != decode(letter) != self._without and _REPLACEMENT not in self._without
        # a model may sample byte tokens all the same
        self._find_bytes()

    def _find_bytes(self) -> None:
        """Find two byte tokens of a run: no text alone, and a character together. Vocabularies have their bytes at the
        beginning, in order."""
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

    This is exact for tokenizers that concatenate the texts of tokens, whatever they do at the start of a text (they
    drop a space there), where characters are cut (byte-level; U+FFFD for each byte or each incomplete character, or
    nothing), and with such runs. It is wrong for a tokenizer that rewrites clean text when more tokens come, such as
    one that cleans up spaces before punctuation over several tokens.

    A token costs the same however long the text is, and however long it stays unclear. The exception is a long stretch
    without any clean text whose kinds are unknown (`TokenKinds.known`) or whose pieces have no text: it is decoded each
    time that it has doubled. Text comes late then, never wrong.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds | None = None) -> None:
        """`kinds`: shared with other decoders of this tokenizer; None: this decoder makes its own."""
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
        # the run's clean text, the number of tokens that it has, and the number that it was last tried with
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
        """The rest of the text, at its end. Raises what the tokenizer raises."""
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
        # where bytes come in runs, the text before the open run is whole
        if not final and not self._kinds.spelling:
            while stable and len(text) - stable < _MAX_INCOMPLETE and text[stable - 1] == _REPLACEMENT:
                stable -= 1
        new = text[self._given : stable]
        self._given = max(self._given, stable)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut_window(text)
        return new

    def _cut_window(self, text: str) -> None:
        """Keep the last tokens of the window, if they hold all text that may still change."""
        kept = self._window[-_KEPT_TOKENS:]
        # the cut may fall anywhere, so the first characters may differ; text that is not given out yet is at the end
        rest = text[self._given :]
        shown = self._decode(kept)
        # there must be text before the rest, as spaces are dropped at the start of a text. Where kinds are unknown, the
        # kept tokens may all be unseen, and have no part in an incomplete character
        if len(shown) > len(rest) and shown.endswith(rest) and (self._kinds.known or not text.endswith(_REPLACEMENT)):
            self._window = kept
            self._given = len(shown) - len(rest)
            self._due = 0
        elif len(self._window) > _MAX_STUCK_TOKENS:
            self._due = 2 * len(self._window)
