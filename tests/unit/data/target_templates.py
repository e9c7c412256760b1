"""Small chat templates that behave as those of known targets do, in our own words, each with its special tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from .chat_cases import tokenizer

_CALLS_OF = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"

# Past answers, up to the last one without calls, get an empty think block; later ones keep their reasoning.
KIMI = (
    "{% set past = namespace(end=-1) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set past.end = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% set mark = m.role if m.role in ('user', 'assistant') else 'system' %}"
    "<|im_{{ mark }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}"
    "{% set keeps = loop.index0 > past.end and thinking | default(true) %}"
    "<think>{{ m.reasoning_content or '' if keeps else '' }}</think>"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>" + _CALLS_OF + "<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ f.arguments if f.arguments is string else f.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>"
    "{% if not thinking | default(true) %}</think>{% endif %}{% endif %}"
)
KIMI_TOKENS = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<think>", "</think>"),
)

# Every system text goes to the front; calls are written only where the content is none.
DEEPSEEK_V3 = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}"
    "{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.content is none %}" + _CALLS_OF + "<｜tool▁call▁begin｜>{{ f.name }}{{ f.arguments | tojson }}"
    "<｜tool▁call▁end｜>{% endfor %}"
    "{% else %}<｜Assistant｜>{{ m.content }}{% endif %}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)

# Texts are trimmed; a call is the whole answer; a result is JSON.
LLAMA_3 = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% set name = 'ipython' if m.role == 'tool' else m.role %}"
    "<|start_header_id|>{{ name }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if m.tool_calls %}"
    + _CALLS_OF
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

# Reasoning is kept after the last user turn only; the last answer always has a think block; other roles vanish.
QWEN3 = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.user and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}" + _CALLS_OF + "\n<tool_call>\n{{ f.name }} {{ f.arguments | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

# Channels; a final answer ends in another token where it is the last, and analysis before a final one is dropped.
GPT_OSS = (
    "<|start|>system<|message|>You are a model.<|end|>"
    "{% set final = namespace(at=-1) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set final.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role in ('system', 'developer') %}<|start|>developer<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}"
    "{% if m.thinking and (loop.index0 > final.at or loop.last) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}" + _CALLS_OF + "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GPT_OSS_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")

# ChatML with a system turn of its own where there is none.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful model.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TARGETS = {
    "kimi-k2.5": (KIMI, KIMI_TOKENS, "[BOS]", "[EOS]"),
    "deepseek-v3": (DEEPSEEK_V3, DEEPSEEK_TOKENS, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "llama-3": (LLAMA_3, LLAMA_TOKENS, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": (QWEN3, QWEN_TOKENS, None, "<|im_end|>"),
    "gpt_oss": (GPT_OSS, GPT_OSS_TOKENS, None, "<|return|>"),
    "smollm2": (SMOLLM2, SMOLLM2_TOKENS, None, "<|im_end|>"),
}


def target_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the target's special tokens and a template that behaves as its own."""
    template, tokens, bos, eos = TARGETS[name]
    return tokenizer(template, special=tokens, bos_token=bos, eos_token=eos)
