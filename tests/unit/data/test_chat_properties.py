"""Properties of rendering that hold for every conversation, with every template."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eagle3.data.chat.render import Rendered, Renderer
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError

from . import chat_cases
from .cases import kinds
from .chat_cases import supervised, tokenizer
from .target_templates import TARGETS, target_tokenizer

_MERGES = [("l", "l"), ("Ċ", "Ċ"), ("ä", "½"), ("h", "i")]
_OWN = {"REWRITES_HISTORY": "<think></think>"}
PLAIN = ("CHATML", "GENERATION", "GENERATION_WITHOUT_END", "GENERATION_WITH_HEADER", "REWRITES_HISTORY")

EXAMPLES = settings(derandomize=True, max_examples=300, deadline=None, database=None)
TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("hil \n世🎉é<|>")), max_size=12)
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4)


def conversation(turns: list[tuple[str, str]], system: str | None) -> Conversation:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, answer in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Conversation("c", messages)


def check(tok: PreTrainedTokenizerFast, given: Conversation, split: Any, expected: list[str], **kwargs: Any) -> None:
    """Lengths, prefixes and texts of all samples of a conversation; `expected` lists the answers as emitted."""
    renderer = Renderer(tok, kwargs)
    try:
        found = renderer.samples(given, split)
    except ProblemsError as error:
        assert set(kinds(error)) == {"chat.boundary_merged"}
        return
    turns = [number for number, message in enumerate(given.messages) if message["role"] == "assistant"]
    runs: list[str] = []
    for name, rendered in found:
        assert len(rendered.loss_mask) == len(rendered.input_ids)
        _, _, turn = name.partition("#")
        for number, start in zip([int(turn)] if turn else turns, starts(rendered), strict=True):
            assert rendered.input_ids[:start] == renderer.prompt(given.messages[:number], None, "prompt")
        runs += supervised(tok, rendered)
        assert not any(rendered.loss_mask[: starts(rendered)[0]])
    assert runs == expected


def starts(rendered: Rendered) -> list[int]:
    mask = rendered.loss_mask
    return [place for place, on in enumerate(mask) if on and not (place and mask[place - 1])]


@EXAMPLES
@given(st.sampled_from(PLAIN), st.booleans(), TURNS, st.none() | TEXTS, st.sampled_from(["auto", "always"]))
def test_supervised_is_the_answer_and_its_end_and_nothing_else(
    name: str, merges: bool, turns: list[tuple[str, str]], system: str | None, split: str
) -> None:
    tok = tokenizer(getattr(chat_cases, name), merges=_MERGES if merges else ())
    check(tok, conversation(turns, system), split, [f"{_OWN.get(name, '')}{answer}<|end|>" for _, answer in turns])


@EXAMPLES
@given(st.sampled_from(list(TARGETS)), TURNS, st.none() | TEXTS, st.sampled_from(["auto", "always"]))
def test_the_same_with_templates_as_targets_have(
    name: str, turns: list[tuple[str, str]], system: str | None, split: str
) -> None:
    end = {"gpt_oss": "<|return|>", "deepseek-v3": TARGETS["deepseek-v3"][3], "llama-3": "<|eot_id|>"}
    before = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    answers = [answer.strip() if name == "llama-3" else answer for _, answer in turns]
    expected = [f"{before}{answer}{end.get(name, '<|im_end|>')}" for answer in answers]
    thinking = {"kimi-k2.5": {"thinking": False}, "qwen3": {"enable_thinking": False}}
    check(target_tokenizer(name), conversation(turns, system), split, expected, **thinking.get(name, {}))


@EXAMPLES
@given(st.sampled_from(list(TARGETS)), TURNS, TEXTS, TEXTS, st.data())
def test_a_typed_mark_is_never_rendered(
    name: str, turns: list[tuple[str, str]], before: str, after: str, data: st.DataObject
) -> None:
    tok = target_tokenizer(name)
    given = conversation(turns, None)
    place = data.draw(st.integers(0, len(given.messages) - 1))
    mark = data.draw(st.sampled_from([token for token in TARGETS[name][1] if "think" not in token]))
    given.messages[place]["content"] = f"{before}{mark}{after}"
    for split in ("auto", "always", "never"):
        try:
            Renderer(tok).samples(given, split)  # type: ignore[arg-type]
        except ProblemsError as error:
            assert set(kinds(error)) == {"chat.control_token"}
        else:
            raise AssertionError("it was rendered")
