"""The fast way through template and tokenizer gives what the long way gives: Transformers' own, text by text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle3.data.chat.blocks import in_blocks, token_lengths
from eagle3.data.chat.encoding import Encoder
from eagle3.data.chat.render import Renderer
from eagle3.data.chat.workers import _rendering
from eagle3.data.conversations import Conversation

from . import chat_cases
from .chat_cases import talk, tokenizer
from .target_templates import TARGETS, target_tokenizer
from .test_chat_properties import TEXTS, TURNS, conversation

EXAMPLES = settings(derandomize=True, max_examples=120, deadline=None, database=None)
OWN = [name for name in vars(chat_cases) if name.isupper() and name not in ("SPECIAL", "TOOLS")]
MERGES = [("l", "l"), ("Ċ", "Ċ"), ("Ċ", "l"), ("ä", "½"), ("h", "i"), ("<", "|")]


def long_way(tok: PreTrainedTokenizerFast) -> Renderer:
    renderer = Renderer(tok)
    renderer.chat.encoder.__dict__["plain"] = False
    return renderer


def toy(name: str, merges: bool) -> PreTrainedTokenizerFast:
    return tokenizer(getattr(chat_cases, name), merges=MERGES if merges else ())


@EXAMPLES
@given(
    st.sampled_from([*OWN, *TARGETS]),
    st.booleans(),
    st.lists(st.tuples(TURNS, st.none() | TEXTS, st.booleans()), min_size=1, max_size=3),
    st.sampled_from(["auto", "always", "never"]),
)
def test_both_ways_give_the_same_samples_and_the_same_problems(
    name: str, merges: bool, given: list[tuple[Any, str | None, bool]], split: Any
) -> None:
    tok = target_tokenizer(name) if name in TARGETS else toy(name, merges)
    items = [conversation(turns, system) for turns, system, _ in given]
    items = [
        Conversation(
            str(place), item.messages, answer_ids=tok(item.messages[-1]["content"])["input_ids"] if ids else None
        )
        for place, (item, (_, _, ids)) in enumerate(zip(items, given, strict=True))
    ]
    items = [item for item in items if item.answer_ids != []]
    fast, slow = Renderer(tok), long_way(tok)
    fast.ahead(items)
    for item in items:
        assert _rendering(fast, item, split) == _rendering(slow, item, split)


@EXAMPLES
@given(st.text(st.sampled_from("hil \n世<|>"), max_size=8), st.text(st.sampled_from("hil \n世<|>"), max_size=8))
def test_an_ending_merges_with_nothing_that_it_should_not(before: str, after: str) -> None:
    """The prompt's last characters are tokenized without what follows them in the whole text."""
    encoder = Encoder(toy("CHATML", merges=True))
    whole = f"<|start|>{before}<|end|>{after}ll"
    known = encoder.known(whole, encoder.ids(whole))
    assert known is not None
    for end in range(len(whole) + 1):
        assert encoder.ids_after(whole[:end], known) == encoder.ids(whole[:end])


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_that_take_more_along_take_the_long_way(option: str) -> None:
    tok = toy("CHATML", merges=False)
    encoder = Encoder(tok)
    assert encoder.known("<|start|>x", encoder.ids("<|start|>x")) is not None
    tok.backend_tokenizer.add_tokens([AddedToken("<odd>", **{"normalized": False, option: True})])
    assert Encoder(tok).known("<|start|>x", encoder.ids("<|start|>x")) is None


def test_a_call_with_truncation_before_does_not_cut_what_comes_after() -> None:
    tok = toy("CHATML", merges=False)
    whole = Renderer(tok).whole(talk("Hi", "Hello."))
    tok("text", truncation=True, max_length=1)
    assert Renderer(tok).whole(talk("Hi", "Hello.")) == whole
    assert json.dumps(whole.input_ids) == json.dumps(long_way(tok).whole(talk("Hi", "Hello.")).input_ids)


def test_a_mark_that_goes_on_in_the_whole_text_is_not_the_prompts() -> None:
    encoder = Encoder(tokenizer(special=("<s>", "</s>", "<|", "<|end|>")))
    known = encoder.known("a<|end|>b", encoder.ids("a<|end|>b"))
    for prompt in ("a<|", "a<|e", "a<|end|>", "a"):
        assert encoder.ids_after(prompt, known) == encoder.ids(prompt)


def test_a_token_is_in_a_block_if_a_character_of_it_is() -> None:
    offsets = [(0, 2), (2, 4), (4, 4), (4, 5), (4, 5), (5, 9)]
    assert in_blocks(offsets, [(2, 4)]) == [False, True, False, False, False, False]
    assert in_blocks(offsets, [(1, 3), (4, 5)]) == [True, True, False, True, True, False]
    assert in_blocks(offsets, [(8, 9)]) == [False, False, False, False, False, True]


@EXAMPLES
@given(st.text(st.sampled_from("hil \n世🎉é<|>."), max_size=16), st.booleans(), st.data())
def test_lengths_say_of_every_block_what_offsets_say(text: str, merges: bool, data: st.DataObject) -> None:
    """Blocks anywhere, empty ones within a token too."""
    tok = toy("GENERATION", merges).backend_tokenizer
    lengths = token_lengths(tok)
    assert lengths is not None
    text = f"{text}<|end|>{text}"
    places = st.integers(0, len(text))
    blocks = [tuple(sorted(pair)) for pair in data.draw(st.lists(st.tuples(places, places), max_size=3))]
    encoded = tok.encode(text, add_special_tokens=False)
    assert lengths.in_blocks(encoded.ids, text, blocks) == in_blocks(encoded.offsets, blocks)


def test_an_empty_block_within_a_token_marks_it() -> None:
    tok = toy("GENERATION", merges=True).backend_tokenizer
    lengths, encoded = token_lengths(tok), tok.encode("hi", add_special_tokens=False)
    assert lengths is not None and len(encoded.ids) == 1
    assert lengths.in_blocks(encoded.ids, "hi", [(1, 1)]) == in_blocks(encoded.offsets, [(1, 1)]) == [True]


def test_tokens_that_are_not_all_of_the_text_have_no_places() -> None:
    tok = toy("GENERATION", merges=False).backend_tokenizer
    lengths = token_lengths(tok)
    assert lengths is not None
    assert lengths.in_blocks(tok.encode("hil", add_special_tokens=False).ids, "hi", [(0, 1)]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.NFKC()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"post_processor": processors.ByteLevel(trim_offsets=True)},
    ],
)
def test_tokenizers_that_change_a_text_or_move_places_are_asked_for_offsets(change: dict[str, Any]) -> None:
    tok = toy("GENERATION", merges=False)
    assert not Encoder(tok).needs_offsets
    for name, value in change.items():
        setattr(tok.backend_tokenizer, name, value)
    assert Encoder(tok).needs_offsets
