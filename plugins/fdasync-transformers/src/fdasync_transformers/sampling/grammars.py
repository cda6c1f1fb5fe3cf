"""Grammars as bit masks over the vocabulary: what may be sampled next, given the tokens of an answer so far.

llguidance reads the grammars and makes the masks: it compiles as it goes, and needs no torch. `Grammars` compiles,
`Matcher` follows one answer. All of it is the host's; `math.py` applies the masks. Knows no model, no logits and no
steps. Called by `opened_runner.py`, `grammar_process.py` and `execution/parts/lane_matchers.py`.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from fdasync.errors import BadInput, CheckpointError
from fdasync.request import Grammar
from fdasync_transformers.sampling.paced import Paced

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

# compiled grammars that are kept: many requests share one. More than an engine takes for checked, so that no step
# compiles one
_MAX_COMPILED = 256
# of the host's CPU, what the masks of an answer may cost: so much at once, and so much more for each token. Masks of
# ordinary schemas take 0.01 to 1 ms of a vocabulary of 130,000
_MASKS_S, _MASK_S = 0.2, 0.002
# bounds on what one mask may cost, about 10 ms of them; they do not bound all of compiling (`grammar_process.py` does)
_INITIAL_FUEL, _STEP_FUEL, _STEP_ITEMS = 200_000, 150_000, 50_000
_LEXER_STATES, _GRAMMAR_SIZE, _ROW_ITEMS = 50_000, 20_000, 500
_WORD_BITS = 32
# of the loop's time, what compiling grammars may take; and seconds of it at once: some hundred ordinary ones
_COMPILING_SHARE, _COMPILING_BURST_S = 0.05, 0.3


class Grammars:
    """The grammars of one model's tokenizer.

    Args:
        tokenizer: the checkpoint's tokenizer.json.
        vocab_size: of the model; ids past the tokenizer's are never allowed.
        eos_ids: allowed where a text may end; not empty.

    Attributes:
        words: int32 words of a mask.

    Raises CheckpointError for a tokenizer that llguidance cannot read.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.words = -(-vocab_size // _WORD_BITS)
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_INITIAL_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            max_items_in_row=_ROW_ITEMS,
            max_lexer_states=_LEXER_STATES,
            max_grammar_size=_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        text = ""
        try:
            text = tokenizer.read_text()
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
        except Exception as error:  # the library raises bare errors for every kind of bad file
            raise CheckpointError(str(tokenizer), f"llguidance cannot read it: {_unreadable(text, error)}") from error
        self.ends = np.zeros(self.words, np.int32)
        for token in eos_ids:
            self.ends[token // _WORD_BITS] |= np.int32(np.uint32(1 << token % _WORD_BITS).view(np.int32))
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()
        self._compiling = Paced(_COMPILING_SHARE, _COMPILING_BURST_S)

    async def prepare(self, grammar: Grammar) -> None:
        """As `check`, so that no step compiles it; paced."""
        await self._compiling.run(partial(self.check, grammar))

    def check(self, grammar: Grammar) -> None:
        """Compile it, and make its first mask. Raises BadInput in the library's words."""
        matcher = Matcher(-1, self._compile(grammar.packed()).deep_copy(), self.ends)
        matcher.fill(np.empty(self.words, np.int32))
        if matcher.problem:
            raise BadInput("grammar", f"cannot be kept: {matcher.problem}")

    def matcher(self, key: int, packed: bytes, answer: array[int]) -> Matcher:
        """A matcher for a sequence whose answer begins with these tokens. A grammar that does not compile makes a
        matcher with a problem, since it is made in a step: one request's grammar must not end the others."""
        try:
            matcher = Matcher(key, self._compile(packed).deep_copy(), self.ends)
        except BadInput as error:
            matcher = Matcher(key, None, self.ends, error.problem)
        for token in answer:
            matcher.accept(token)
        return matcher

    def _compile(self, packed: bytes) -> Any:
        inner = self._compiled.get(packed)
        if inner is None:
            source = _source(Grammar.unpacked(packed))
            inner = llguidance.LLMatcher(self._tokenizer, source, limits=self._limits, log_level=0)
            self._compiled[packed] = inner
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(packed)
        return inner


def _unreadable(text: str, error: Exception) -> str:
    """Why the library cannot read a tokenizer. Of a decoder that it does not know, the type's name: the library's own
    words are the debug form of the decoder."""
    words = _in_a_line(str(error))
    if not words.startswith("can't determine decoder type"):
        return words
    decoder = json.loads(text).get("decoder")
    kinds = [one["type"] for one in (decoder or {}).get("decoders", [decoder]) if one]
    found = f"is {' + '.join(kinds)}" if kinds else "is missing"
    return f"its decoder {found}; the decoders ByteLevel and ByteFallback are known"


def _source(grammar: Grammar) -> str:
    """The grammar as the library wants it. Raises BadInput if it cannot be written so."""
    make = llguidance.LLMatcher
    try:
        if grammar.kind == "json_schema":
            return make.grammar_from_json_schema(grammar.text)
        if grammar.kind == "regex":
            return make.grammar_from_regex(grammar.text)
        return make.grammar_from_lark(grammar.text if grammar.kind == "lark" else any_to_lark(grammar.text))
    except Exception as error:  # the library's parsers raise errors of many types
        raise BadInput("grammar", f"cannot be read as {grammar.kind}: {_in_a_line(str(error))}") from error


def _in_a_line(problem: str) -> str:
    return " ".join(problem.split())[:500]


class Matcher:
    """One answer and its grammar.

    Args:
        inner: the library's matcher; None: there is none, for this `problem`.

    Attributes:
        key: the sequence.
        problem: why the grammar cannot be kept any further; then EOS alone is allowed. "" while it can.
        told: a step's output has named the problem.
        count: tokens of the answer that it took.
    """

    def __init__(self, key: int, inner: Any, ends: NDArray[np.int32], problem: str = "") -> None:
        self.key = key
        self.problem = problem
        self.told = False
        self.count = 0
        self._inner = inner
        self._ends = ends
        self._spent_s = 0.0
        self._look()

    @property
    def is_ended(self) -> bool:
        """Whether EOS alone is left."""
        return self._inner is None or bool(self._inner.is_stopped())

    def accept(self, token: int) -> None:
        """The answer goes on with this token. Tokens behind its end are overrun, and passed over."""
        self.count += 1
        if not self.is_ended and not self._inner.consume_token(token):
            self._look()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the mask of the next token: bit `i % 32` of word `i // 32` says whether token i is allowed.

        `mask`: int32 [words], contiguous.
        """
        if not self.is_ended:
            began = time.thread_time()
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._spent_s += time.thread_time() - began
            self._look()
        if self.is_ended:
            mask[:] = self._ends

    def _look(self) -> None:
        """Whether it can still be kept; the library's memory is freed where it cannot."""
        if self._inner is None:
            return
        if self._inner.is_error():
            self._end(_in_a_line(self._inner.get_error()) or "the library names no reason")
        elif self._spent_s > _MASKS_S + _MASK_S * self.count:
            self._end(f"its masks take too long: {self._spent_s:.2g} s for {self.count} tokens")

    def _end(self, problem: str) -> None:
        self.problem = problem
        self._inner = None
