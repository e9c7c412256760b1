"""Toy tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle3.data.chat import Rendered
from eagle3.data.conversations import Conversation

SPECIAL = ("<s>", "</s>", "<|start|>", "<|end|>", "<think>", "</think>")


def _chatml(answer: str) -> str:
    return (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
    )


CHATML = _chatml("{{ '<|start|>assistant\\n' + m.content + '<|end|>\\n' }}")
GENERATION = _chatml(
    "{{ '<|start|>assistant\\n' }}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
)
GENERATION_WITH_NEWLINE = _chatml(
    "{{ '<|start|>assistant\\n' }}{% generation %}{{ m.content + '<|end|>\\n' }}{% endgeneration %}"
)
GENERATION_WITHOUT_END = _chatml(
    "{{ '<|start|>assistant\\n' }}{%- generation -%}{{ m.content }}{%- endgeneration -%}{{ '<|end|>\\n' }}"
)
GENERATION_WITH_HEADER = _chatml(
    "{% generation %}{{ '<|start|>assistant\\n' + m.content + '<|end|>\\n' }}{% endgeneration %}"
)
GENERATION_LAST_ONLY = _chatml(
    "{{ '<|start|>assistant\\n' }}"
    "{% if loop.last %}{%- generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|end|>\\n' }}{% endif %}"
)
# A hybrid thinking template: an empty thinking block before the last answer only, no reasoning in earlier ones.
REWRITES_HISTORY = _chatml(
    "{{ '<|start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>' + m.get('reasoning_content', '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|end|>\\n' }}"
)
NO_END_TOKEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|start|>tools\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '[' + call.function.name + (call.function.arguments | tojson) + ']' }}"
    "{% endfor %}"
    "{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def tokenizer(
    template: str | None = CHATML,
    *,
    special: Sequence[str] = SPECIAL,
    merges: Sequence[tuple[str, str]] = (),
    adds_bos: bool = False,
    bos_token: str | None = "<s>",
    eos_token: str = "</s>",
) -> PreTrainedTokenizerFast:
    """One token for each byte (ids 0 to 255), for each merge, and for each special token."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special="think" not in token, normalized=False) for token in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos_token, eos_token=eos_token, chat_template=template
    )


def talk(*contents: str, system: str | None = None, **changes: Any) -> Conversation:
    """user, assistant, user, assistant ..."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for number, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[number % 2], "content": content})
    return Conversation(**{"id": "talk", "messages": messages, **changes})


def supervised(tok: PreTrainedTokenizerFast, rendered: Rendered) -> list[str]:
    """The text of each run of supervised tokens."""
    assert len(rendered.input_ids) == len(rendered.loss_mask)
    runs: list[list[int]] = []
    before = False
    for token, on in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        if on:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = on
    return [str(tok.decode(run)) for run in runs]
