"""SGLang: which boundaries each target family's `set_eagle3_layers_to_capture` and layer loop capture.

Read in the wheels of all 69 releases on PyPI from 0.4.4.post2 (the first with EAGLE-3) to 0.5.23. A family's row ends
where one of them reads otherwise. Boundary 0 fails with a TypeError wherever the loop adds `hidden_states + residual`
before the first layer, where the residual is None; boundary N is out of reach of a loop over the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eagle3.wiring.convention import BEGINNING, Convention, Rule
from eagle3.wiring.version import Version

NEWEST = "0.5.23"
READ = "2026-11-29"
# Up to here the CUDA graph runner calls `set_eagle3_layers_to_capture()` without ids just before it captures, and the
# checkpoint's ids are set only afterwards: verification runs in graphs that hold the default layers (sglang PR 22836).
LAST_WITH_DEFAULT_GRAPHS, FIRST_WITHOUT = "0.5.10.post1", "0.5.11"
# Older ones capture the default layers in every forward pass.
IDS_READ_SINCE = "0.4.9"
_SETTER = "set_eagle3_layers_to_capture"
_NO_EMBEDDING, _EMBEDDING, _BOTH_ENDS = (False, False), (True, False), (True, True)


@dataclass(frozen=True)
class _Span:
    """Releases from `first` to the next span, which read alike; `ends`: boundary 0 and boundary N can be captured."""

    first: str
    last: str
    ends: tuple[bool, bool]
    rule: Rule = Rule.OUTPUT_INDEX


def _family(family: str, file: str, *spans: _Span, before: str, why: str = "") -> Iterator[Convention]:
    """A family's rows; `before` is the last release without support, `why` says what it lacks."""
    row = Convention(
        "sglang", family, BEGINNING, before, Rule.OUTPUT_INDEX, f"sglang/srt/models/{file}, {_SETTER}", READ
    )
    reason = f"{why or f'its target class has no {_SETTER}'} up to SGLang {before}"
    yield replace(row, unsupported=reason)
    for span in spans:
        embedding, last_layer = span.ends
        yield from _split_by_graphs(
            replace(row, first=span.first, last=span.last, rule=span.rule, embedding=embedding, last_layer=last_layer)
        )


def _split_by_graphs(row: Convention) -> Iterator[Convention]:
    if Version(row.first) > Version(LAST_WITH_DEFAULT_GRAPHS):
        yield row
    elif Version(row.last) <= Version(LAST_WITH_DEFAULT_GRAPHS):
        yield replace(row, graphs_ignore_ids=True)
    else:
        yield replace(row, last=LAST_WITH_DEFAULT_GRAPHS, graphs_ignore_ids=True)
        yield replace(row, first=FIRST_WITHOUT)


def _deepseek_like(family: str, file: str, first: str, before: str, embedding: tuple[str, str]) -> Iterator[Convention]:
    """The rule changed in 0.5.13 (sglang PR 25454); `embedding`: last release without boundary 0, first with it."""
    rule = Rule.OUTPUT_INDEX_IF_FIRST_IS_1
    return _family(
        family,
        file,
        _Span(first, "0.5.12.post1", _NO_EMBEDDING),
        _Span("0.5.13", embedding[0], _NO_EMBEDDING, rule),
        _Span(embedding[1], NEWEST, _EMBEDDING, rule),
        before=before,
    )


_GEMMA3_WITHOUT_RESIDUAL = Convention(
    "sglang",
    "gemma3",
    "0.5.17",
    NEWEST,
    Rule.OUTPUT_INDEX,
    "sglang/srt/models/gemma3_causal.py, Gemma3TextModel.forward",
    READ,
    unsupported="it captures each layer's output without the residual, which since 0.5.17 is kept apart: no layer's "
    "output that a drafter could be trained on",
)

SGLANG: tuple[Convention, ...] = (
    *_family(
        "llama",
        "llama.py",
        _Span("0.4.4.post2", "0.4.8.post1", _NO_EMBEDDING, Rule.DEFAULTS),
        _Span("0.4.9", "0.5.21", _NO_EMBEDDING),
        _Span("0.5.22", NEWEST, _EMBEDDING),
        before="0.4.4.post1",
        why="there is no EAGLE-3",
    ),
    *_family(
        "llama4",
        "mllama4.py and llama4.py",
        _Span("0.4.9", "0.5.20", _NO_EMBEDDING),
        _Span("0.5.21", NEWEST, _EMBEDDING),
        before="0.4.8.post1",
    ),
    *_family("qwen2", "qwen2.py", _Span("0.5.2", NEWEST, _EMBEDDING), before="0.5.1.post3"),
    *_family("qwen2_moe", "qwen2_moe.py", _Span("0.5.2", NEWEST, _EMBEDDING), before="0.5.1.post3"),
    *_family("qwen2_5_vl", "qwen2_5_vl.py and qwen2.py", _Span("0.5.2", NEWEST, _EMBEDDING), before="0.5.1.post3"),
    *_family("qwen3", "qwen3.py", _Span("0.4.9", NEWEST, _EMBEDDING), before="0.4.8.post1"),
    *_family("qwen3_moe", "qwen3_moe.py", _Span("0.4.9", NEWEST, _EMBEDDING), before="0.4.8.post1"),
    *_family("qwen3_next", "qwen3_next.py", _Span("0.5.9", NEWEST, _EMBEDDING), before="0.5.8.post1"),
    *_family("qwen3_vl", "qwen3_vl.py", _Span("0.5.11", NEWEST, _EMBEDDING), before="0.5.10.post1"),
    *_family(
        "qwen3_5",
        "qwen3_5_text.py and qwen3_vl.py",
        _Span("0.5.22", NEWEST, _EMBEDDING),
        before="0.5.21",
        why="its layer loop captures nothing",
    ),
    *_family(
        "minimax_m2",
        "minimax_m2.py",
        _Span("0.5.5.post1", "0.5.10.post1", _NO_EMBEDDING),
        _Span("0.5.11", NEWEST, _EMBEDDING),
        before="0.5.5",
    ),
    *_family(
        "minimax_m3",
        "minimax_m3.py and minimax_m3_vl.py",
        _Span("0.5.18", "0.5.22", _EMBEDDING),
        _Span("0.5.23", "0.5.23", _BOTH_ENDS),
        before="0.5.17",
        why="its layer loop captures nothing",
    ),
    *_family(
        "gpt_oss",
        "gpt_oss.py",
        _Span("0.5.1", "0.5.16", _NO_EMBEDDING),
        _Span("0.5.17", NEWEST, _BOTH_ENDS, Rule.BOUNDARY_IF_LAST_IS_N),
        before="0.4.10.post2",
    ),
    *_family(
        "glm4_moe",
        "glm4_moe.py",
        _Span("0.5.5", "0.5.20", _NO_EMBEDDING),
        _Span("0.5.21", NEWEST, _EMBEDDING),
        before="0.5.4.post3",
    ),
    *_family(
        "longcat_flash",
        "longcat_flash.py",
        _Span("0.5.6", "0.5.20", _NO_EMBEDDING),
        _Span("0.5.21", NEWEST, _EMBEDDING),
        before="0.5.5.post3",
    ),
    *_family("bailing_moe", "bailing_moe.py", _Span("0.5.9", NEWEST, _EMBEDDING), before="0.5.8.post1"),
    *_family(
        "exaone_moe",
        "exaone_moe.py",
        _Span("0.5.9", "0.5.21", _NO_EMBEDDING),
        _Span("0.5.22", NEWEST, _EMBEDDING),
        before="0.5.8.post1",
    ),
    *_family(
        "apertus",
        "apertus.py",
        _Span("0.5.3", "0.5.21", _NO_EMBEDDING),
        _Span("0.5.22", NEWEST, _EMBEDDING),
        before="0.5.2",
    ),
    *_family("gemma3", "gemma3_causal.py and gemma3_mm.py", _Span("0.5.12", "0.5.16", _BOTH_ENDS), before="0.5.11"),
    _GEMMA3_WITHOUT_RESIDUAL,
    *_family("gemma4", "gemma4_causal.py and gemma4_mm.py", _Span("0.5.12", NEWEST, _BOTH_ENDS), before="0.5.11"),
    *_family("mimo_v2", "mimo_v2_flash.py and mimo_v2.py", before=NEWEST),
    *_deepseek_like("deepseek", "deepseek_v2.py", "0.5.4.post2", "0.5.4.post1", ("0.5.13.post1", "0.5.14")),
    *_deepseek_like("glm_moe_dsa", "deepseek_v2.py", "0.5.9", "0.5.8.post1", ("0.5.13.post1", "0.5.14")),
    *_deepseek_like("glm4_moe_lite", "glm4_moe_lite.py", "0.5.8", "0.5.7", ("0.5.20", "0.5.21")),
    *_deepseek_like(
        "kimi_k25", "kimi_k25.py, delegating to deepseek_v2.py", "0.5.10", "0.5.9", ("0.5.13.post1", "0.5.14")
    ),
)
