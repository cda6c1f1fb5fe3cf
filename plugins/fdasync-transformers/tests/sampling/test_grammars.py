"""Grammars: the masks lead to texts that they allow, a resumed matcher goes on, bad ones are refused."""

from __future__ import annotations

import json
import re
from array import array
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tokenizers
import torch
from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers, StepMatchers
from fdasync_transformers.sampling import grammars as grammars_module
from fdasync_transformers.sampling.grammars import Grammars
from fdasync_transformers.sampling.plan import MASKS, plan_samples
from fdasync_transformers.sampling.sampler import compute_samples, read_samples
from fdasync_transformers.weights.random_checkpoints import EOS_ID, VOCAB_SIZE, make_random_checkpoint
from sampled import sample
from sampler_cases import spec
from tokenizers import decoders, models

from fdasync.errors import BadInput, CheckpointError, InvariantBroken
from fdasync.events.actions import RunStep, SeqStart
from fdasync.request import Grammar

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
LARK = 'start: "<" INNER ">"\nINNER: /[a-c]{1,4}/'
GBNF = 'root ::= "<" [a-c]+ ">"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(path, "qwen3_moe", size="tiny")
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder / "tokenizer.json", VOCAB_SIZE, (EOS_ID,))


def allowed(masks: np.ndarray) -> np.ndarray:
    """Bool [rows, tokens], bit by bit."""
    return np.array([[bool(int(row[i // 32]) >> (i % 32) & 1) for i in range(VOCAB_SIZE)] for row in masks])


def answer_of(grammars: Grammars, grammar: Grammar, seed: int, most: int = 400) -> list[int]:
    """A text drawn at random from what the masks allow, up to EOS."""
    random = Random(seed)
    matcher = grammars.matcher(0, grammar.packed(), array("i"))
    mask = np.zeros((1, grammars.words), np.int32)
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS_ID:
        matcher.fill(mask[0])
        choices = np.flatnonzero(allowed(mask)[0]).tolist()
        # to the end soon, where it may end
        tokens.append(EOS_ID if EOS_ID in choices and random.random() < 0.3 else random.choice(choices))
        matcher.accept(tokens[-1])
        assert not matcher.problem
        assert len(tokens) < most
    return tokens


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_what_the_schema_says(grammars: Grammars, seed: int) -> None:
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    value = json.loads(text_of(answer_of(grammars, Grammar("json_schema", json.dumps(schema)), seed)))
    assert set(value) == {"name", "ages", "kind"}
    assert len(value["name"]) <= 8
    assert all(0 <= age <= 99 for age in value["ages"])
    assert len(value["ages"]) <= 3
    assert value["kind"] in ("a", "bc")


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        (Grammar("regex", r"[0-9]{3}-[x-z]+"), r"[0-9]{3}-[x-z]+"),
        (Grammar("lark", LARK), r"<[a-c]{1,4}>"),
        (Grammar("gbnf", GBNF), r"<[a-c]+>"),
    ],
)
def test_every_kind_leads_to_its_texts(grammars: Grammars, grammar: Grammar, form: str) -> None:
    grammars.check(grammar)
    for seed in range(5):
        assert re.fullmatch(form, text_of(answer_of(grammars, grammar, seed)))


def test_a_resumed_matcher_goes_on(grammars: Grammars) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    tokens = answer_of(grammars, grammar, 7)
    whole = grammars.matcher(1, grammar.packed(), array("i"))
    for count in range(len(tokens) + 1):
        again = grammars.matcher(1, grammar.packed(), array("i", tokens[:count]))
        masks = np.zeros((2, grammars.words), np.int32)
        whole.fill(masks[0])
        again.fill(masks[1])
        assert np.array_equal(masks[0], masks[1])
        if count < len(tokens):
            whole.accept(tokens[count])
    # behind the end EOS alone is left, and what is overrun changes nothing
    whole.accept(3)
    whole.fill(masks[0])
    assert np.flatnonzero(allowed(masks[:1])[0]).tolist() == [EOS_ID]
    assert not whole.problem


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "no json"), "expected ident"),
        (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("json_schema", '{"if": {"type": "string"}}'), "Unimplemented"),
        (Grammar("json_schema", '{"$ref": "#"}'), "cannot be kept|no token"),
        (Grammar("regex", "(a"), "cannot be kept"),
        (Grammar("regex", "(?=a)b"), "cannot be kept"),
        (Grammar("lark", "start: nowhere"), "nowhere"),
        (Grammar("gbnf", "root ::= nowhere"), "nowhere"),
        (Grammar("json_schema", '{"items": ' * 5000 + "{}" + "}" * 5000), "recursion"),
    ],
)
def test_bad_grammars_are_refused(grammars: Grammars, grammar: Grammar, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        grammars.check(grammar)
    assert caught.value.field == "grammar"


def test_a_grammar_that_breaks_leaves_eos_and_tells_once(grammars: Grammars) -> None:
    packed = Grammar("regex", "a+").packed()
    matcher = grammars.matcher(4, packed, array("i"))
    step = StepMatchers([1], [matcher], [0], grammars.words)
    # a token that the mask did not allow: as a sampler that ignores it would
    assert step.is_ready
    ((key, problem),) = step.accept([0, ord("b")])
    assert key == 4
    assert problem
    assert np.flatnonzero(allowed(step.masks())[0]).tolist() == [EOS_ID]
    assert step.accept([0, EOS_ID]) == ()
    # one that cannot be compiled, as a decode instance may meet it
    broken = grammars.matcher(5, Grammar("regex", "(a").packed(), array("i"))
    assert broken.problem


def test_masks_that_take_too_much_of_the_host_end_their_answer_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, slow = (grammars.matcher(key, Grammar("regex", "[a-z]+").packed(), array("i")) for key in (1, 2))
    masks = np.zeros((2, grammars.words), np.int32)
    other.fill(masks[0])
    monkeypatch.setattr(grammars_module, "_MASKS_S", 0.0)
    monkeypatch.setattr(grammars_module, "_MASK_S", 0.0)
    slow.fill(masks[1])
    assert "take too long" in slow.problem
    assert np.flatnonzero(allowed(masks[1:])[0]).tolist() == [EOS_ID]
    assert not other.problem
    ((key, problem),) = StepMatchers([0], [slow], [0], grammars.words).accept([EOS_ID])
    assert (key, problem) == (2, slow.problem)


def start(key: int, grammar: Grammar | None, tokens: list[int], prompt_len: int) -> SeqStart:
    own = spec(prompt_len=prompt_len, grammar=b"" if grammar is None else grammar.packed())
    return SeqStart(key, array("i", tokens).tobytes(), 0, (), (), (), own)


def test_lanes_that_change_hands_keep_the_steps_matchers(grammars: Grammars) -> None:
    lanes = {7: 1, 8: 0, 9: 1}
    table = SimpleNamespace(samplers=[None, None], length=np.zeros(2, np.int64), lane_of=lanes.__getitem__)
    matchers = LaneMatchers(grammars, table)  # type: ignore[arg-type]
    both = [start(7, Grammar("regex", "ab"), [1, 2, ord("a")], 2), start(8, None, [1], 1)]
    matchers.follow(RunStep(1, starts=tuple(both)))
    table.samplers = [both[1].sampler, both[0].sampler]
    table.length[:] = 1, 3
    step = matchers.of(np.array([0, 1]))
    assert step is not None
    assert (step.rows, step.is_ready) == ([1], True)
    assert np.flatnonzero(allowed(step.masks())[0]).tolist() == [ord("b")]
    # the step after it is planned before this one has ended
    table.length[:] = 2, 4
    following = matchers.of(np.array([0, 1]))
    assert following is not None
    assert not following.is_ready
    matchers.follow(RunStep(2, leaves=(7,), starts=(start(9, Grammar("regex", "c"), [5], 1),)))
    assert step.accept([3, ord("b")]) == ()
    assert following.is_ready
    assert np.flatnonzero(allowed(following.masks())[0]).tolist() == [EOS_ID]
    assert matchers.of(np.array([0])) is None
    with pytest.raises(InvariantBroken, match="the model has none"):
        LaneMatchers(None, table).follow(RunStep(3, starts=(both[0],)))  # type: ignore[arg-type]


def test_a_mask_bars_tokens_whatever_their_bias(grammars: Grammars) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(4, VOCAB_SIZE)).astype(np.float32))
    grammar = Grammar("regex", "[qr]x").packed()
    common = {"prompt_len": 3, "raw": True, "processed": True, "top": 3}
    own = [
        spec(**common, grammar=grammar, bias={5: 100.0}),
        spec(**common),
        spec(**common, grammar=grammar, temperature=1.0, top_k=2),
        spec(**common, temperature=1.0),
    ]
    masks = np.zeros((2, grammars.words), np.int32)
    for mask in masks:
        grammars.matcher(0, grammar, array("i")).fill(mask)
    histories = [np.array([1, 2, 3], np.int32)] * 4
    under = sample(logits, own, [3] * 4, histories, masks)
    free = [spec(**common, bias={5: 100.0}), own[1], spec(**common, temperature=1.0, top_k=2), own[3]]
    without = sample(logits, free, [3] * 4, histories)
    for row in (0, 2):
        assert under.tokens[row] in (ord("q"), ord("r"))
        # the two that are left share all of the probability
        two = torch.log_softmax(logits[row, [ord("q"), ord("r")]].double(), 0).tolist()
        assert under.processed is not None
        assert under.processed[row] == pytest.approx(two[under.tokens[row] - ord("q")], abs=1e-6)
        assert under.raw is not None
        assert under.raw[row] == pytest.approx(torch.log_softmax(logits[row], 0)[under.tokens[row]].item(), abs=1e-6)
    assert without.tokens[0] == 5
    assert [under.tokens[row] for row in (1, 3)] == [without.tokens[row] for row in (1, 3)]
    # a vocabulary that ends in the middle of a word of the mask
    narrow = sample(logits[:1, :200], [spec(grammar=grammar)], [3], histories[:1], masks[:1])
    assert narrow.tokens[0] in (ord("q"), ord("r"))


def test_masks_are_applied_as_the_plan_says(grammars: Grammars) -> None:
    own = [spec(grammar=b"x"), spec()]
    plan = plan_samples(own, [3, 3], [0, 1])
    assert not plan.plain
    assert plan.masked == 1
    logits = torch.zeros(2, 64)
    logits[:, 9] = 1.0
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    sent[MASKS] = torch.tensor([[1 << 4, -(1 << 31)]], dtype=torch.int32)
    results = compute_samples(logits, plan, sent, None)
    out = read_samples(plan, {name: values.numpy() for name, values in results.items()})
    assert out.tokens == [4, 9]
    sent[MASKS] = torch.tensor([[0, -(1 << 31)]], dtype=torch.int32)
    results = compute_samples(logits, plan, sent, None)
    # the sign bit is the last token of its word
    assert results["tokens"].tolist() == [63, 9]


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="llguidance"):
        Grammars(path, 10, (1,))


@pytest.mark.parametrize(
    ("decoder", "told"),
    [
        (None, "its decoder is missing; the decoders ByteLevel"),
        (decoders.WordPiece(), "its decoder is WordPiece; the"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "its decoder is Replace . Fuse; the"),
    ],
)
def test_a_decoder_that_is_not_known_is_told_by_its_name(decoder, told, tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    if decoder is not None:
        made.decoder = decoder
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=f"llguidance cannot read it: {told}"):
        Grammars(tmp_path / "tokenizer.json", 10, (1,))
