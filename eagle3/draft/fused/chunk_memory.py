"""What a chunk takes of a GPU's memory: the part of `memory`'s ledger that `chunk` makes, in bfloat16 or in float8.

Where products are made in float8, rows that only matrices are multiplied with are kept rounded, one byte a value and a
scale a row, and those that others read are kept in both types (`products.Float8Operand`). A weight's gradient reads
rounded rows column by column: a second rounded copy, which lives for one product.

Legend: as in `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from eagle3.draft.config import DraftConfig
from eagle3.draft.fused.chunk import HEAD_ROWS
from eagle3.draft.fused.ledger import Entry, span
from eagle3.draft.fused.quantized import MULTIPLE

if TYPE_CHECKING:
    from eagle3.draft.fused.memory import Types

BF16, SUMS, SCALE = 2, 4, 4
"""Bytes: of a value that is computed with, of one in a sum, of a rounded row's scale."""


def chunk_entries(config: DraftConfig, types: Types, chunks: Sequence[Sequence[int]]) -> Iterator[Entry]:
    """Of the largest chunk.

    Args:
        chunks: the chains at each step, of each chunk.
    """
    counts, several = max(chunks, key=sum, default=[0]), len(chunks) > 1
    live = {"forward": span("forward", "sums"), "head": span("head", "sums"), "backward": span("backward", "sums")}
    for phase, tensors in _sizes(config, counts, types.float8).items():
        for name, size in tensors.items():
            yield Entry("activations", name, size, live[phase])
    forward, backward = _forward(config, counts, types.float8), _backward(config, counts)
    yield Entry("workspace", "queries, keys and values, rows to round", forward, span("forward", "forward"))
    head = _head(config, types, sum(counts), several)
    yield Entry("workspace", "logits, the head's gradient before it is added", head, span("head", "head"))
    yield Entry("workspace", "gradients of one step's rows", backward, span("backward", "backward"))
    sums = _sums(config, types, sum(counts), several)
    yield Entry("workspace", "columns, a weight's gradient before it is added", sums, span("sums", "sums"))


def widths(config: DraftConfig) -> tuple[int, int]:
    """q and p."""
    return config.num_attention_heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim


def rounded(rows: int, width: int) -> int:
    """Bytes of a matrix in float8 with a scale for each row."""
    return rows * (width + SCALE)


def columns(rows: int, width: int) -> int:
    """Bytes of a rounded matrix's copy by columns, whose rows are filled up."""
    return rounded(width, -(-rows // MULTIPLE) * MULTIPLE)


def _sizes(config: DraftConfig, counts: Sequence[int], float8: bool) -> dict[str, dict[str, int]]:
    """Bytes of a chunk's tensors, by the phase that makes them (all live to the chunk's end) and `ChunkStep`'s names.

    Args:
        counts: the chunk's chains at each step.
    """
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    query, pair = widths(config)
    rows, first = sum(counts), counts[0]
    state, wide = rows * hidden * BF16, rows * inner * BF16
    forward = {name: state for name in ("middle", "outputs")}
    forward |= {"handed_on": state} if config.norm_output else {}
    forward |= {name: rounded(rows, hidden) if float8 else state for name in ("normed", "middle_normed")}
    forward |= {"gates": wide, "ups": wide, "acts": rounded(rows, inner) if float8 else wide}
    forward |= {name: rows * query * BF16 for name in ("queries", "attended")}
    forward |= {name: rows * heads * SUMS for name in ("log_sums", "means")}
    forward |= {name: rows * SUMS for name in ("normed_factors", "middle_factors")}
    forward |= {"own": (len(counts) - 1) * first * pair * BF16, "start": first * hidden * BF16}
    forward |= {"turns": rows * config.head_dim * SUMS}
    backward = {
        "middle_grad": state,
        "attended_grad": rows * query * BF16,
        "qkv_grad": rows * (query + pair) * BF16,
    }
    if float8:
        forward["attended_rows"] = rounded(rows, query)
        backward |= {name: rounded(rows, hidden) for name in ("output_slopes", "middle_slopes")}
        backward |= {name: rounded(rows, inner) for name in ("gate_slopes", "up_slopes")}
        backward["qkv_slopes"] = rounded(rows, query + pair)
    return {
        "forward": forward,
        "head": {"output_grad": state, "output_factors": rows * SUMS},
        "backward": backward,
    }


def _forward(config: DraftConfig, counts: Sequence[int], float8: bool) -> int:
    """Rows of one step before they are rotated; in float8 also those to round and a product before it is added."""
    query, pair = widths(config)
    first, later = counts[0], counts[1] if len(counts) > 1 else 0
    more = 3 * config.hidden_size if float8 else 0
    return max(first * (query + more), later * (query + pair + more)) * BF16


def _head(config: DraftConfig, types: Types, rows: int, several: bool) -> int:
    """The most that a piece takes."""
    first = _head_piece(config, types, min(rows, HEAD_ROWS), several)
    others = min(rows - HEAD_ROWS, HEAD_ROWS)
    return max(first, _head_piece(config, types, others, True)) if others > 0 else first


def _head_piece(config: DraftConfig, types: Types, rows: int, added: bool) -> int:
    """Normed states and logits, and the head's gradient where it is added to what is there."""
    hidden, vocab = config.hidden_size, config.draft_vocab_size
    size = rows * (hidden + vocab) * BF16 + _product(types, vocab, hidden, added)
    if types.float8:
        size += rounded(rows, hidden) + rounded(rows, vocab) + columns(rows, hidden) + columns(rows, vocab)
    return size


def _backward(config: DraftConfig, counts: Sequence[int]) -> int:
    hidden, (query, pair) = config.hidden_size, widths(config)
    first, later = counts[0], counts[1] if len(counts) > 1 else 0
    attention = first * (2 * hidden + query + pair)
    return (later * hidden + max(first * config.intermediate_size, attention)) * BF16


def _sums(config: DraftConfig, types: Types, rows: int, several: bool) -> int:
    """The most that any of the products for the weights' gradients takes."""
    hidden, inner, (query, pair) = config.hidden_size, config.intermediate_size, widths(config)
    if not types.float8:
        return _product(types, max(inner, query + pair), hidden, several)
    state, wide = columns(rows, hidden), columns(rows, inner)
    return max(
        columns(rows, query + pair) + state + _product(types, query + pair, hidden, several),
        wide + 2 * state + _product(types, inner, hidden, several),  # `down_proj`'s, while `gate_proj`'s rows are alive
    )


def _product(types: Types, rows: int, width: int, added: bool) -> int:
    """Bytes of a weight's gradient that cannot be put where it belongs.

    Args:
        added: to what is there from the rows before.
    """
    apart = added if types.float8 else types.weights != BF16
    return rows * width * types.weights if apart else 0
