"""What the fused step takes of a GPU's memory, tensor by tensor, as `step` and `chunk` make them.

It computes in bfloat16 on a GPU (`fused.cuda`), two bytes an element, and where that is wanted multiplies in float8;
sums are in float32. Who adds a tensor of many rows to the step adds it here, or in `chunk_memory`; a test runs the
step's own code on the meta device and counts the storages that are alive.

Legend: T tokens of a batch, L supervised ones, S sources, C chains, R chains of a chunk's step 0, N rows of a chunk
over all steps, K TTT steps, A aux layers, H hidden, I MLP width, q the width of all queries, p that of all keys and
values, h query heads, d head width, D draft vocab, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.draft.chains import ChainPlan
from eagle3.draft.config import DraftConfig, TTTSettings
from eagle3.draft.fused.chunk_memory import BF16, SCALE, SUMS, chunk_entries, columns, rounded, widths
from eagle3.draft.fused.layout import KEY_BLOCK, chunk_counts
from eagle3.draft.fused.ledger import Entry, Ledger, Phase, span
from eagle3.draft.loss import TEACHER_ROWS

_INDEX_BYTES = 48
"""Of a row: what `Chunk` says of it, its loss, its greedy token."""
_PROGRAMS, _NORM_PROGRAMS = 2000, 264
"""Of `kernels.attention_grad` and `kernels.norm`, which import Triton."""
_DEQUANTIZED = 1 + 4 + 4
"""Bytes that an eight-bit value takes while `states.dequantize` widens it."""
_NORMING = 10
"""Most bytes that a value takes besides while `fc_norm` or `norm_before_fc` norms it."""
_UNNORMING = 8
"""Most bytes that a value takes besides on the way back through them, gradients included."""
_CUBLAS = 2 * (32 << 20)
"""Workspaces that torch gives cuBLAS on Hopper: one for the thread that goes forward, one for autograd's."""


@dataclass(frozen=True)
class Sizes:
    """How large a micro-batch is.

    Attributes:
        tokens: T, padding included.
        supervised: L.
        sources: S.
        chains: C.
        chunks: the chains at each step, of each chunk.
    """

    tokens: int
    supervised: int
    sources: int
    chains: int
    chunks: Sequence[Sequence[int]]

    @classmethod
    def of(cls, plan: ChainPlan, tokens: int, supervised: int, chunk: int) -> Sizes:
        """Of a micro-batch's plan on the CPU."""
        return cls(tokens, supervised, len(plan.sources), len(plan.chains), chunk_counts(plan, chunk))

    @classmethod
    def at_most(cls, tokens: int, supervised: int, ttt: TTTSettings) -> Sizes:
        """No micro-batch with so many tokens, and as many supervised ones, takes more."""
        assert ttt.chunk is not None
        chains = supervised if ttt.chain_rule == "served" else tokens
        full, rest = divmod(chains, ttt.chunk)
        chunks = [[ttt.chunk] * ttt.steps] * full + ([[rest] * ttt.steps] if rest else [])
        return cls(tokens, supervised, tokens, chains, chunks)


@dataclass(frozen=True)
class Types:
    """Bytes of an element.

    Attributes:
        weights: of trained weights and their gradients: 4, or 2 (bfloat16).
        embedding: of the frozen embedding.
        head: of the target's head.
        states: of the batch's aux and last states.
        scaled: whether these have a scale for each row and slot.
        float8: whether the step multiplies in float8 (`ttt.float8`).
        argmax: whether batches bring the target's greedy tokens: then the draft vocab's rows of its head are enough.
    """

    weights: int = 4
    embedding: int = 4
    head: int = 2
    states: int = 2
    scaled: bool = False
    float8: bool = False
    argmax: bool = False


def step_ledger(config: DraftConfig, types: Types, sizes: Sizes) -> Ledger:
    """The step of a micro-batch that is the only one of its window, with weights and gradients, without optimiser."""
    return Ledger((*_weights(config, types), *_batch(config, types, sizes), *_step(config, types, sizes)))


def copied_bytes(config: DraftConfig, types: Types) -> int:
    """The copies of the weights that the step computes with (`weights.Weights`)."""
    matrices, (query, pair) = _fused_parameters(config), widths(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = (query + pair) * 2 * hidden
    if not types.float8:
        return (projections if types.weights == BF16 else matrices) * BF16
    scales = 6 * hidden + 3 * inner + config.draft_vocab_size + 2 * query + pair
    twice = 2 * (matrices - projections + (query + pair) * hidden)
    return projections * BF16 + twice + scales * SCALE


def head_parameters(config: DraftConfig, types: Types) -> int:
    """Parameters of the target's head that are on the card."""
    return (config.draft_vocab_size if types.argmax else config.vocab_size) * config.hidden_size


def counted_bytes(config: DraftConfig, sizes: Sizes) -> int:
    """What `count_terms` leaves of a micro-batch until its window is done."""
    return _teacher_bytes(config, sizes) + _row_bytes(sizes)


def _fused_parameters(config: DraftConfig) -> int:
    """Parameters of the matrices that the fused step reads: all trained ones but `fc` and the norms."""
    heads = 3 * config.num_attention_heads + 4 * config.num_key_value_heads
    return config.hidden_size * (config.head_dim * heads + 3 * config.intermediate_size + config.draft_vocab_size)


def _weights(config: DraftConfig, types: Types) -> Iterator[Entry]:
    trained, embedding = config.parameter_counts()["trainable"], config.vocab_size * config.hidden_size
    matrices, narrow = _fused_parameters(config), types.weights == BF16
    fc = _fc_parameters(config)
    yield Entry("weights", "trained weights", trained * types.weights)
    yield Entry("weights", "frozen embedding", embedding * types.embedding)
    yield Entry("target head", "target's head", head_parameters(config, types) * types.head)
    yield Entry("weights", "copies to compute with", copied_bytes(config, types), span("share", "finish"))
    if not narrow:
        last: Phase = "autograd" if _norms(config) else "finish"  # kept by autograd, or by autocast
        kept = span("fuse", "fuse" if types.float8 else last)
        yield Entry("weights", "fc's copy", fc * BF16, kept)
    yield Entry("gradients", "gradients of the step", matrices * types.weights, span("share", "update"))
    yield Entry("gradients", "fc's gradient", fc * types.weights, span("autograd", "update"))
    if not narrow and not types.float8:
        yield Entry("workspace", "fc's gradient before its cast", fc * BF16, span("autograd", "autograd"))
    norms = 4 * _NORM_PROGRAMS * config.hidden_size * SUMS
    yield Entry("gradients", "parts of the norms' gradients", norms, span("share", "finish"))
    yield Entry("workspace", "cuBLAS", _CUBLAS)


def _batch(config: DraftConfig, types: Types, sizes: Sizes) -> Iterator[Entry]:
    hidden, aux = config.target_hidden_size, config.num_aux * config.target_hidden_size
    scales = 4 * (sizes.tokens * config.num_aux + sizes.supervised) if types.scaled else 0
    stored = (sizes.tokens * aux + sizes.supervised * hidden) * types.states
    yield Entry("batch", "aux and last states", stored + scales, span("count", "autograd"))
    ids = sizes.tokens * 25 + sizes.supervised * 8 * types.argmax
    yield Entry("batch", "ids, positions, loss mask", ids, span("count", "autograd"))
    teacher = _teacher_bytes(config, sizes)
    yield Entry("teacher", "the target's logits on the draft vocab", teacher, span("count", "autograd"))
    states = sizes.chains * hidden
    width = BF16 if types.scaled else types.states
    last = states * width
    chosen = states * _DEQUANTIZED if types.scaled else 2 * last
    cast = head_parameters(config, types) * BF16 if types.head != BF16 else 0
    if types.argmax:
        cast += states * ((types.head if width != types.head else 0) + (BF16 if types.head != BF16 else 0))
        reading = max(chosen - teacher, last + cast)
    else:
        logits = min(sizes.chains, TEACHER_ROWS) * config.vocab_size * BF16
        reading = max(chosen, last + max(logits + cast, teacher))
    yield Entry("workspace", "the teacher's reading", reading, span("count", "count"))
    yield Entry("activations", "rows' places and results", _row_bytes(sizes), span("count", "autograd"))


def _step(config: DraftConfig, types: Types, sizes: Sizes) -> Iterator[Entry]:
    yield from _fused_states(config, types, sizes)
    for name, size in _shared_sizes(config, sizes.sources, sizes.chains).items():
        yield Entry("activations", name, size, span("share", "finish"))
    yield Entry("workspace", "sharing", _sharing(config, sizes), span("share", "share"))
    yield from chunk_entries(config, types, sizes.chunks)
    yield Entry("workspace", "finishing", _finishing(config, types, sizes), span("finish", "finish"))


def _fused_states(config: DraftConfig, types: Types, sizes: Sizes) -> Iterator[Entry]:
    """What `DraftModel.fuse` keeps for its backward pass, and takes on the way."""
    values = sizes.sources * config.num_aux * config.target_hidden_size
    norms = _norms(config)
    yield Entry("activations", "aux states of the sources", values * BF16, span("fuse", "autograd"))
    if norms:
        kept = SUMS * norms * values
        yield Entry("activations", "what fc_norm and norm_before_fc keep", kept, span("fuse", "autograd"))
        back = _UNNORMING * values
        yield Entry("workspace", "backward through fc_norm and norm_before_fc", back, span("autograd", "autograd"))
    given = max(types.states, BF16)  # by `aux_rows`: alive until `fc` is done, beside its cast
    held = 0 if given == (types.weights if norms else BF16) else given
    wide = values * max(_DEQUANTIZED - BF16 if types.scaled else 0, held + (_NORMING if norms else 0))
    embedded = sizes.sources * config.hidden_size * (types.embedding if types.embedding != BF16 else 0)
    yield Entry("workspace", "reading and casting states", max(wide, embedded), span("fuse", "fuse"))
    if types.float8:
        yield Entry("workspace", "fc's rows in float8", _fc_rows(config, types, sizes), span("autograd", "autograd"))
    both = 2 * sizes.sources * config.hidden_size * BF16
    yield Entry("activations", "step 0's states, the tokens' embeddings", both, span("fuse", "finish"))


def _norms(config: DraftConfig) -> int:
    """How many values `fc_norm` and `norm_before_fc` keep of one; the second one's input needs a gradient."""
    return (0, 1, 3)[config.norm_before_fc + config.fc_norm]


def _fc_rows(config: DraftConfig, types: Types, sizes: Sizes) -> int:
    """What `linear` rounds for `fc`'s gradient, beside that gradient, and `fc` itself where what it reads needs one."""
    hidden, aux = config.hidden_size, config.num_aux * config.target_hidden_size
    both = rounded(sizes.sources, hidden) + columns(sizes.sources, hidden) + columns(sizes.sources, aux)
    weight = rounded(hidden, aux) + columns(hidden, aux) if _norms(config) else 0
    return weight + max(both + rounded(sizes.sources, aux) - hidden * aux * types.weights, both)


def _shared_sizes(config: DraftConfig, sources: int, chains: int) -> dict[str, int]:
    """Bytes of what chunks share, by the names of `Step`'s tensors."""
    hidden, (query, pair) = config.hidden_size, widths(config)
    states, pairs, queries = sources * hidden, sources * pair, chains * query
    programs = -(-sources // KEY_BLOCK) * config.num_key_value_heads
    group = config.num_attention_heads // config.num_key_value_heads
    splits = min(group, -(-_PROGRAMS // max(programs, 1)))
    return {
        "shared_query": queries * BF16,
        "shared_pair": pairs * BF16,
        "first": states * BF16,
        "keys_values": pairs * BF16,
        "turn": sources * config.head_dim * SUMS,
        "hidden_grad": states * BF16,
        "first_grad": states * BF16,
        "shared_query_grad": queries * SUMS,
        "shared_pair_grad": pairs * SUMS,
        "source_sums": splits * pairs * SUMS,
    }


def _teacher_bytes(config: DraftConfig, sizes: Sizes) -> int:
    return sizes.chains * config.draft_vocab_size * BF16


def _row_bytes(sizes: Sizes) -> int:
    return sum(map(sum, sizes.chunks)) * _INDEX_BYTES


def _fc_parameters(config: DraftConfig) -> int:
    return config.num_aux * config.target_hidden_size * config.hidden_size


def _sharing(config: DraftConfig, sizes: Sizes) -> int:
    return sizes.sources * (config.hidden_size + widths(config)[1]) * BF16


def _finishing(config: DraftConfig, types: Types, sizes: Sizes) -> int:
    hidden, (query, pair) = config.hidden_size, widths(config)
    pairs = sizes.sources * pair
    rows = (sizes.sources * hidden + pairs + sizes.chains * (query + hidden)) * BF16
    product = 0 if types.weights == BF16 else query * hidden * types.weights
    return pairs * BF16 + max(pairs * (SUMS + BF16), pairs * BF16 + rows + product)
