"""A draft checkpoint's tensors: names, shapes and types against config.json, and the draft vocab's values.

The names are those that `load_weights` in `sglang/srt/models/llama_eagle3.py` and `kimi_k25_eagle3.py` map onto
parameters: they skip a name that they do not know, and leave a parameter that no name reaches uninitialised. Both are
errors here.

Legend: A aux layers, H draft hidden, G target hidden, I MLP width, Q query width, P key/value width, D draft vocab,
V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagle3.errors import Problem
from eagle3.wiring.checkpoint_config import DraftShape, MlaShape
from eagle3.wiring.draft_vocab import check_draft_vocab, draft_vocab_digest, target_ids_of
from eagle3.wiring.weights import WEIGHTS_FILE as WEIGHTS_FILE
from eagle3.wiring.weights import Weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FLOAT_DTYPES = ("BF16", "F16", "F32")
_CORRECT = "correct it, or export it again with `eagle3 export`"


def expected_tensors(shape: DraftShape) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Canonical tensor name -> allowed dtypes, exact shape. Optional ones are included."""
    hidden, aux = shape.hidden_size, shape.num_aux * shape.target_hidden_size
    attention = _attention(shape) if shape.mla is None else _mla(shape.mla, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        **{f"midlayer.self_attn.{name}.weight": size for name, size in attention.items()},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "midlayer.mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, shape.intermediate_size),
        "norm.weight": (hidden,),
        HEAD: (shape.draft_vocab_size, hidden),
        EMBEDDING: (shape.vocab_size, hidden),
    }
    if shape.norm_before_fc:
        shapes["input_norm.weight"] = (aux,)
    if shape.fc_norm:
        shapes |= {f"fc_norm.{slot}.weight": (shape.target_hidden_size,) for slot in range(shape.num_aux)}
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "d2t": (("I64",), (shape.draft_vocab_size,)),
        "t2d": (("BOOL",), (shape.vocab_size,)),
    }
    return expected | {name: (FLOAT_DTYPES, size) for name, size in shapes.items()}


def _attention(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden_size
    norms = {} if shape.head_norm is None else {"q_norm": (shape.head_norm,), "k_norm": (shape.head_norm,)}
    return {
        "q_proj": (shape.query_size, 2 * hidden),
        "k_proj": (shape.key_value_size, 2 * hidden),
        "v_proj": (shape.key_value_size, 2 * hidden),
        "o_proj": (hidden, shape.query_size),
        **norms,
    }


def _mla(mla: MlaShape, hidden: int) -> dict[str, tuple[int, ...]]:
    query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank
    low_rank = {"q_proj": (query, 2 * hidden)}
    if rank is not None:
        low_rank = {"q_a_proj": (rank, 2 * hidden), "q_b_proj": (query, rank)}
    return {
        **low_rank,
        **({} if rank is None else {"q_a_layernorm": (rank,)}),
        "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, 2 * hidden),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": (hidden, mla.num_heads * mla.v_head_dim),
    }


def optional_tensors(shape: DraftShape, own: bool) -> set[str]:
    """Tensors that a server does without: the embedding, where the target's has the same width (it replaces the
    draft's), the tables of a draft vocab that is the whole vocab, and t2d, which other tools may leave out."""
    optional = {EMBEDDING} if shape.target_hidden_size == shape.hidden_size else set()
    whole = shape.draft_vocab_size == shape.vocab_size
    return optional | ({"d2t", "t2d"} if whole else set()) | (set() if own else {"t2d"})


def check_tensors(weights: Weights, shape: DraftShape, own: bool, where: str) -> list[Problem]:
    """Every missing, extra, repeated, mis-shaped or wrongly typed tensor; kinds `tensor.*`. Reads no values, so it
    does not prove that they are finite or trained."""
    expected, names = expected_tensors(shape), canonical_names(weights.tensors)
    problems = []
    for name in sorted(expected.keys() - set(names.values()) - optional_tensors(shape, own)):
        message = f"no tensor {name}, expected shape {list(expected[name][1])}: {_without(name)}"
        problems.append(Problem(where, "tensor.missing", message, _CORRECT))
    for stored, name in names.items():
        if name not in expected:
            message = f"unknown tensor {stored}, which a server skips without a word"
            problems.append(Problem(where, "tensor.extra", message, "remove it, or export again"))
            continue
        info, (dtypes, size) = weights.tensors[stored], expected[name]
        if list(names.values()).count(name) > 1:
            message = f"{stored} and another tensor both stand for {name}"
            problems.append(Problem(where, "tensor.repeated", message, "keep one of them"))
        if info.shape != size:
            message = f"{stored} has shape {list(info.shape)}, config.json means {list(size)}"
            problems.append(Problem(where, "tensor.shape", message, _CORRECT))
        if info.dtype not in dtypes:
            message = f"{stored} is {info.dtype}, expected {' or '.join(dtypes)}"
            fix = "never cast the tables" if name in ("d2t", "t2d") else "store it as a floating-point tensor"
            problems.append(Problem(where, "tensor.dtype", message, fix))
    return problems


def canonical_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Stored name -> the name it stands for: servers may also read `model.` before all but the head, `layers.0.` for
    `midlayer.`, and vLLM calls d2t `draft_id_to_target_id` (see `check_names` for who reads which)."""
    names = {}
    for stored in stored_names:
        name = stored.removeprefix("model.") if stored != "model.lm_head.weight" else stored
        name = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
        names[stored] = "d2t" if name == "draft_id_to_target_id" else name
    return names


def check_tables(weights: Weights, shape: DraftShape, own: bool, where: str) -> tuple[str | None, list[Problem]]:
    """The digest of the draft vocab in the weights, and what is wrong with the tables' values.

    Tables that `check_tensors` has a problem with are not read, nor any if the head has another size.
    """
    expected = expected_tensors(shape)
    vocab_tensors = ("d2t", "t2d", HEAD)
    stored = {name: stored for stored, name in canonical_names(weights.tensors).items() if name in vocab_tensors}
    for name, key in stored.items():
        info, (dtypes, size) = weights.tensors[key], expected[name]
        if info.dtype not in dtypes or info.shape != size:
            return None, []
    if {*vocab_tensors} - stored.keys() - optional_tensors(shape, own):
        return None, []
    d2t = weights.read_ints(stored["d2t"]) if "d2t" in stored else [0] * shape.draft_vocab_size
    t2d = weights.read_ints(stored["t2d"]) if "t2d" in stored else None
    problems = check_draft_vocab(d2t, t2d, shape.vocab_size, where)
    return None if problems else draft_vocab_digest(target_ids_of(d2t), shape.vocab_size), problems


def _without(name: str) -> str:
    if name == HEAD:
        return "the config promises an own head, which the server would leave uninitialised"
    if name == "d2t":
        return "draft ids would be taken for target ids"
    if name == "t2d":
        return "it says which target ids the drafter can propose"
    return "the server would leave it uninitialised"
