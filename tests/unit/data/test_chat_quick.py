"""Templates compiled to run faster write what Transformers' compiled ones write, blocks included."""

from __future__ import annotations

import jinja2
import pytest
from transformers.utils import chat_template_utils

from eagle3.data.chat import quick
from eagle3.data.chat.direct import DirectTemplate

from .chat_cases import tokenizer

TALK = [
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Yes. 世"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "No."},
]
EACH = "{% for m in messages %}"
TEMPLATES = {
    "cuts white space": EACH
    + "{{ m.role }}:\n {%- generation -%}\n {{ m.content }} {%- endgeneration %}\n{% endfor %}",
    "counts its loop": EACH
    + "{% generation %}{{ loop.index }}{{ m.content if loop.last }}{% endgeneration %}{% endfor %}",
    "sets a name inside": "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}",
    "sets a namespace": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
    "leaves its loop before a block": EACH
    + "{% if loop.index > 2 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "has an empty block": "a{% generation %}{% endgeneration %}b",
    "has no block": EACH + "{{ m.role }} {{ m.content }}{% endfor %}",
    "calls a macro beside it": "{% macro f(x) %}<{{ x }}>{% endmacro %}"
    "{{ f(1) }}{% generation %}{{ f(2) }}{% endgeneration %}",
    "keeps a block's text": "a{% set x %}{% generation %}b{% endgeneration %}{% endset %}c{{ x }}d",
    "has a block in a macro": "{% macro f(x) %}<{% generation %}{{ x }}{% endgeneration %}>{% endmacro %}a{{ f(1) }}",
    "filters a block": "a{% filter upper %}b{% generation %}c{% endgeneration %}{% endfilter %}",
    "measures a block": "{% set x %}{% generation %}b{% endgeneration %}{% endset %}{{ x | length }}",
    "loops through itself": "{% for m in messages recursive %}{% generation %}{{ m.role }}{% endgeneration %}"
    "{{ loop([{'role': 'x'}]) | upper if m.content == '' }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_text_and_blocks_are_transformers_own(template: str) -> None:
    tok = tokenizer()
    direct = DirectTemplate(tok, template, {})
    text, blocks = chat_template_utils._render_with_assistant_indices(
        chat_template_utils._compile_jinja_template(template), TALK, None, None, False, **tok.special_tokens_map
    )
    assert direct.takes(True, None)
    assert direct.text_and_blocks(TALK) == (text, blocks)
    assert direct.text(TALK, add_generation_prompt=False) == text


def test_blocks_are_marked_without_transformers_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = DirectTemplate(tokenizer(), TEMPLATES["cuts white space"], {})
    expected = direct.text_and_blocks(TALK)
    monkeypatch.setattr(direct, "_tracked", jinja2.Template(""))
    assert direct.text_and_blocks(TALK) == expected and len(expected[1]) == 4


def test_a_mark_within_a_piece_is_no_answer() -> None:
    assert quick.without_marks(["a", quick.BEGIN, "b", quick.END]) == ("ab", [(1, 2)])
    assert quick.without_marks([f"a{quick.BEGIN}b{quick.END}"]) is None


def test_the_sandbox_stays_shut() -> None:
    direct = DirectTemplate(tokenizer(), "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}", {})
    with pytest.raises(jinja2.TemplateError):
        direct.text(TALK, add_generation_prompt=False)
