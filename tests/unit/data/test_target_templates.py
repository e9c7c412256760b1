"""What is supervised, behind which ids, with templates that behave as those of known targets."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3.data.chat.render import Renderer, SplitTurns
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError

from .cases import kinds
from .chat_cases import supervised, talk
from .target_templates import TARGETS, target_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
END = {
    "kimi-k2.5": "<|im_end|>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "llama-3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gpt_oss": "<|return|>",
    "smollm2": "<|im_end|>",
}


def tool_talk(reasoning_key: str = "", final: str = "It is 4.", call: Any = CALL) -> Conversation:
    """Five turns; the call is reasoned about under `reasoning_key`, if that is given."""
    reasoning = {reasoning_key: "Add."} if reasoning_key else {}
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **reasoning},
        {"role": "tool", "content": "4", "tool_call_id": "functions.add:0"},
        {"role": "assistant", "content": final},
    ]
    return Conversation("sum", messages, tools=TOOLS)


def samples(
    name: str, conversation: Conversation, split: SplitTurns = "auto", **kwargs: Any
) -> dict[str, tuple[list[str], str]]:
    """By name: what is supervised, and the text before the first of it. Each answer follows what a server would get."""
    tok = target_tokenizer(name)
    renderer, found = Renderer(tok, kwargs), {}
    for sample, rendered in renderer.samples(conversation, split):
        starts = [
            place for place, on in enumerate(rendered.loss_mask) if on and not (place and rendered.loss_mask[place - 1])
        ]
        _, _, turn = sample.partition("#")
        answers = [number for number, item in enumerate(conversation.messages) if item["role"] == "assistant"]
        for number, start in zip([int(turn)] if turn else answers, starts, strict=True):
            prompt = renderer.prompt(conversation.messages[:number], conversation.tools, "prompt")
            assert rendered.input_ids[:start] == prompt
        found[sample] = (supervised(tok, rendered), str(tok.decode(rendered.input_ids[: starts[0]])))
    return found


def texts(found: dict[str, tuple[list[str], str]]) -> dict[str, list[str]]:
    return {name: runs for name, (runs, _) in found.items()}


def refused(name: str, conversation: Conversation, split: SplitTurns = "auto", **kwargs: Any) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        samples(name, conversation, split, **kwargs)
    return kinds(error.value)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("split", ["auto", "always"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_answer_is_supervised_with_its_own_end_token(name: str, split: SplitTurns, system: str | None) -> None:
    """`samples` also checks that each follows exactly what a server would be sent."""
    found = samples(name, talk("Hi", "Hello. 世界🎉", "And?", "🎉", system=system), split)
    runs = [run for sample in found.values() for run in sample[0]]
    assert len(runs) == 2
    assert runs[0].endswith(f"Hello. 世界🎉{END[name]}") and runs[1].endswith(f"🎉{END[name]}")
    if split == "always":
        assert list(found) == [f"talk#{turn + (system is not None)}" for turn in (1, 3)]


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target[2]])
def test_fault_04_bos_comes_once_in_every_sample(name: str) -> None:
    tok = target_tokenizer(name)
    for split in ("auto", "always"):
        for _, rendered in Renderer(tok).samples(talk("Hi", "Ho", "And?", "Bye"), split):
            assert rendered.input_ids.count(tok.bos_token_id) == ("bos_token" in TARGETS[name][0])


def test_smollm2_has_its_own_system_turn() -> None:
    found = samples("smollm2", talk("Hi", "Hello.", "And?", "Bye"))
    assert found["talk"][0] == ["Hello.<|im_end|>", "Bye<|im_end|>"]
    assert found["talk"][1].startswith("<|im_start|>system\nYou are a helpful model.<|im_end|>\n<|im_start|>user\nHi")


def test_llama_3_trims_texts_and_calls_in_json() -> None:
    assert texts(samples("llama-3", talk("Hi", " Hello. \n"))) == {"talk": ["Hello.<|eot_id|>"]}
    found = samples("llama-3", tool_talk())
    assert texts(found) == {
        "sum": ['{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "It is 4.<|eot_id|>"],
    }
    assert '"name": "add", "parameters": {}' in found["sum"][1]


def test_deepseek_v3_puts_a_later_system_turn_first_so_the_answers_are_split() -> None:
    messages = talk("Hi", "Hello.", system="A.").messages
    later = [*messages, {"role": "system", "content": "B."}, *talk("And?", "Bye").messages]
    found = samples("deepseek-v3", Conversation("talk", later))
    assert found == {
        "talk#2": (["Hello.<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>A.<｜User｜>Hi<｜Assistant｜>"),
        "talk#5": (
            ["Bye<｜end▁of▁sentence｜>"],
            "<｜begin▁of▁sentence｜>A.B.<｜User｜>Hi<｜Assistant｜>Hello.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜>",
        ),
    }


def test_fault_01_deepseek_v3_leaves_a_call_out_and_that_is_refused() -> None:
    """It writes calls where the content is none, which no server sends."""
    assert refused("deepseek-v3", tool_talk()) == ["chat.left_out"]
    with pytest.raises(ProblemsError, match=r"messages\[2\]: the chat template leaves out the call of 'add'"):
        samples("deepseek-v3", tool_talk())


def test_fault_02_qwen3_drops_earlier_reasoning_so_the_answers_are_split() -> None:
    conversation = talk("Hi", "Hello.", "And?", "Bye")
    conversation.messages[1]["reasoning_content"] = "One."
    conversation.messages[3]["reasoning_content"] = "Two."
    assert samples("qwen3", conversation) == {
        "talk#1": (
            ["<think>\nOne.\n</think>\n\nHello.<|im_end|>"],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        "talk#3": (
            ["<think>\nTwo.\n</think>\n\nBye<|im_end|>"],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        ),
    }
    assert refused("qwen3", conversation, "never") == ["chat.history_rewritten"]


def test_qwen3_reads_reasoning_inside_the_content_too() -> None:
    conversation = talk("Hi", "<think>\nOne.\n</think>\n\nHello.")
    assert texts(samples("qwen3", conversation)) == {"talk": ["<think>\nOne.\n</think>\n\nHello.<|im_end|>"]}


def test_fault_02_qwen3_without_thinking_has_the_empty_block_in_the_prompt() -> None:
    found = samples("qwen3", talk("Hi", "Hello.", "And?", "Bye"), enable_thinking=False)
    assert texts(found) == {"talk#1": ["Hello.<|im_end|>"], "talk#3": ["Bye<|im_end|>"]}
    assert all(before.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for _, before in found.values())
    conversation = talk("Hi", "Hello.")
    conversation.messages[1]["reasoning_content"] = "One."
    assert refused("qwen3", conversation, enable_thinking=False) == ["chat.history_rewritten"]


def test_qwen3_reasoned_calls_and_their_results() -> None:
    assert texts(samples("qwen3", tool_talk("reasoning_content"))) == {
        "sum": [
            '<think>\nAdd.\n</think>\n\n<tool_call>\nadd {"a": 2, "b": 2}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
        ]
    }


def test_fault_01_qwen3_has_no_developer_role_and_a_lost_turn_is_refused() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *talk("Hi", "Hello.").messages]
    with pytest.raises(
        ProblemsError, match=r"messages\[0\]: the chat template leaves out this developer turn"
    ) as error:
        samples("qwen3", Conversation("talk", messages))
    assert kinds(error.value) == ["chat.left_out"]
    assert texts(samples("gpt_oss", Conversation("talk", messages)))


def test_kimi_instant_supervises_what_follows_the_empty_block() -> None:
    found = samples("kimi-k2.5", talk("Hi", "Hello.", "And?", "Bye"), thinking=False)
    assert found == {
        "talk": (
            ["Hello.<|im_end|>", "Bye<|im_end|>"],
            "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
        )
    }
    tools = samples("kimi-k2.5", tool_talk(), thinking=False)
    assert texts(tools) == {
        "sum": [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 2, "b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            "It is 4.<|im_end|>",
        ]
    }
    assert tools["sum"][1].startswith("<|im_system|>tool_declare<|im_middle|>[{")


def test_kimi_thinking_goes_on_after_the_opened_block() -> None:
    assert texts(samples("kimi-k2.5", talk("Hi", "Hello."))) == {"talk": ["</think>Hello.<|im_end|>"]}


def test_fault_02_kimi_drops_the_reasoning_of_a_finished_answer_and_that_is_refused() -> None:
    """Its template has no form in which a finished answer keeps its reasoning: only the target's own ids do."""
    conversation = talk("Hi", "Hello.")
    conversation.messages[1]["reasoning_content"] = "One."
    assert refused("kimi-k2.5", conversation) == ["chat.left_out"]
    own = target_tokenizer("kimi-k2.5")("One.</think>Hello.<|im_end|>").input_ids
    verbatim = Conversation("talk", conversation.messages, answer_ids=own)
    assert samples("kimi-k2.5", verbatim) == {
        "talk": (
            ["One.</think>Hello.<|im_end|>"],
            "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
        )
    }


def test_fault_02_kimi_reasoned_calls_are_refused_by_turn_once_an_answer_follows() -> None:
    """The call is rendered with its reasoning, but no rendering has the answer behind that."""
    with pytest.raises(
        ProblemsError, match=r"messages\[4\]: the chat template renders the prompt of this answer"
    ) as error:
        samples("kimi-k2.5", tool_talk("reasoning_content"))
    assert kinds(error.value) == ["chat.history_rewritten"]
    unfinished = tool_talk("reasoning_content")
    unfinished = Conversation("sum", unfinished.messages[:3], unfinished.tools)
    [[run]] = texts(samples("kimi-k2.5", unfinished)).values()
    assert run.startswith("Add.</think><|tool_calls_section_begin|>")


def test_gpt_oss_ends_an_answer_as_the_target_does_in_every_sample() -> None:
    conversation = talk("Hi", "Hello.", "And?", "Bye")
    conversation.messages[1]["thinking"] = "One."
    found = samples("gpt_oss", conversation)
    assert texts(found) == {
        "talk#1": [
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
        ],
        "talk#3": ["<|channel|>final<|message|>Bye<|return|>"],
    }
    assert "One." not in found["talk#3"][1] and "Hello.<|end|>" in found["talk#3"][1]


def test_gpt_oss_calls_and_json_results() -> None:
    found = texts(samples("gpt_oss", tool_talk(final='So "4".'), "always"))
    assert found["sum#2"] == [' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}<|call|>']
    assert found["sum#4"] == ['<|channel|>final<|message|>So "4".<|return|>']
    quoted = tool_talk()
    quoted.messages[3]["content"] = 'said "4"\nand ü'
    assert samples("gpt_oss", quoted, "always")


def test_reasoning_that_the_template_does_not_read_is_refused() -> None:
    conversation = talk("Hi", "Hello.")
    conversation.messages[1]["reasoning_content"] = "One."
    assert refused("smollm2", conversation) == ["chat.left_out"]


@pytest.mark.parametrize("arguments", ['{"a": 2, "b": 2}', {"a": 2, "b": 2}])
def test_arguments_as_json_text_are_rendered_as_a_server_renders_them(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    assert texts(samples("qwen3", tool_talk(call=call))) == texts(samples("qwen3", tool_talk()))


def test_text_parts_become_one_text_as_sglang_joins_them() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    conversation = Conversation("talk", [{"role": "user", "content": parts}, {"role": "assistant", "content": "Ho"}])
    assert "user\nHi there<|im_end|>" in samples("smollm2", conversation)["talk"][1]
    tok: PreTrainedTokenizerFast = target_tokenizer("smollm2")
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "Hithere" in str(tok.decode(Renderer(tok).whole(conversation).input_ids))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("place", ["user", "system", "assistant", "tool", "tools"])
def test_marks_that_somebody_typed_are_refused_wherever_they_are(name: str, place: str) -> None:
    """As a server would take them for control tokens."""
    mark = END[name]
    conversation = tool_talk()
    messages = [dict(message) for message in conversation.messages]
    for message in messages:
        if message["role"] == place:
            message["content"] = f"a {mark} b"
    tools = [{**TOOLS[0], "description": mark}] if place == "tools" else TOOLS
    found = refused(name, Conversation("sum", messages, tools))
    assert set(found) == {"chat.control_token"}


def test_a_typed_think_mark_is_refused_but_an_answer_may_hold_one() -> None:
    assert refused("qwen3", talk("What is </think>?", "A mark.")) == ["chat.control_token"]
    assert samples("qwen3", talk("What?", "<think>\nA.\n</think>\n\nB."))
    assert samples("smollm2", talk("What is </think>?", "A mark."))
