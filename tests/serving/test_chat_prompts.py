"""What is put before an answer is what the real SGLang makes of the same messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.data.chat.template import Applied, ChatTemplate
from tests.serving.conftest import EngineScript
from tests.unit.data.target_templates import TARGETS, target_tokenizer
from tests.unit.data.test_target_templates import tool_talk

PARTS = [{"type": "text", "text": "Look"}, {"type": "text", "text": "here 世"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": PARTS},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
READS_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is not defined %}nothing{% elif message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool_messages(arguments: Any, results: Any) -> list[dict[str, Any]]:
    """With a call whose content is none."""
    messages = [dict(message) for message in tool_talk("reasoning_content").messages]
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages[2] = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Add."}
    messages[3] = {"role": "tool", "content": results, "tool_call_id": "functions.add:0"}
    return [*messages, {"role": "user", "content": "And 3?"}]


CASES: list[tuple[list[dict[str, Any]], Any, dict[str, Any]]] = [
    (TALK, None, {}),
    (TALK, None, {"thinking": False, "enable_thinking": False}),
    (tool_messages('{"a": 2, "b": [2.5, null]}', "4"), TOOLS, {}),
    (tool_messages("{}", PARTS), TOOLS, {"thinking": False, "enable_thinking": False}),
]


def test_prompts_are_those_of_sglangs_chat_endpoint(engine: EngineScript, tmp_path: Path) -> None:
    asked, ours, names = [], [], []
    for name in [*TARGETS, "reads parts"]:
        tok = target_tokenizer("smollm2" if name == "reads parts" else name)
        if name == "reads parts":
            tok.chat_template = READS_PARTS
        tok.save_pretrained(tmp_path / name)
        for number, (messages, tools, kwargs) in enumerate(CASES):
            asked.append({"tokenizer": tmp_path / name, "messages": messages, "tools": tools, "kwargs": kwargs})
            dumped = tools and [{**tool, "defer_loading": None} for tool in tools]  # 0.5.23 adds that key
            template = Applied(ChatTemplate(tok, kwargs), dumped, name)
            ours.append(template.ids(messages, add_generation_prompt=True))
            names.append(f"{name} {number}")

    theirs = engine("chat_prompts", asked)

    differing = {name: (mine, other) for name, mine, other in zip(names, ours, theirs, strict=True) if mine != other}
    assert not differing, {name: [tok.decode(ids) for ids in pair] for name, pair in differing.items()}


def test_a_typed_mark_is_a_control_token_to_sglang(engine: EngineScript, tmp_path: Path) -> None:
    """Which is why such conversations are refused."""
    toks = {name: target_tokenizer(name) for name in TARGETS}
    asked = []
    for name, tok in toks.items():
        tok.save_pretrained(tmp_path / name)
        for text in ("a b", f"a {tok.eos_token} b"):
            messages = [{"role": "user", "content": text}]
            asked.append({"tokenizer": tmp_path / name, "messages": messages, "tools": None, "kwargs": {}})

    replies = engine("chat_prompts", asked)

    for number, tok in enumerate(toks.values()):
        plain, marked = (ids.count(tok.eos_token_id) for ids in replies[2 * number : 2 * number + 2])
        assert marked == plain + 1
