"""A draft checkpoint's model.safetensors: names, shapes and types against config.json, and the draft vocab's values.

The names are those that `load_weights` in `sglang/srt/models/llama_eagle3.py` maps onto parameters: it skips a name
that it does not know, and leaves a parameter that no name reaches uninitialised. Both are errors here.

Legend: A aux layers, H draft hidden, G target hidden, I MLP width, Q query width, P key/value width, D draft vocab,
V target vocab.
"""

from __future__ import annotations

from pathlib import Path

from eagle3.errors import Problem, problem_error
from eagle3.wiring.checkpoint_config import GENERAL_SINCE, DraftShape
from eagle3.wiring.draft_vocab import check_draft_vocab, draft_vocab_digest, target_ids_of
from eagle3.wiring.engines import Version
from eagle3.wiring.safetensors_header import Header, read_header, read_int_tensor

WEIGHTS_FILE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
FLOAT_DTYPES = ("BF16", "F16", "F32")
_EXPORT = "export it again with `eagle3 export`"


def expected_tensors(shape: DraftShape) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Canonical tensor name -> allowed dtypes, exact shape. Optional ones are included."""
    hidden, query, key_value = shape.hidden_size, shape.query_size, shape.key_value_size
    aux = shape.num_aux * shape.target_hidden_size
    shapes = {
        "fc.weight": (hidden, aux),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "midlayer.mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, shape.intermediate_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.draft_vocab_size, hidden),
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


def optional_tensors(shape: DraftShape) -> set[str]:
    """Tensors that a server does without: the embedding, where the target's has the same width (it replaces the
    draft's), and the tables of a draft vocab that is the whole vocab."""
    optional = {EMBEDDING} if shape.target_hidden_size == shape.hidden_size else set()
    return optional | ({"d2t", "t2d"} if shape.draft_vocab_size == shape.vocab_size else set())


def check_tensors(header: Header, shape: DraftShape, where: str) -> list[Problem]:
    """Every missing, extra, repeated, mis-shaped or wrongly typed tensor; kinds `tensor.*`. Reads no values, so it
    does not prove that they are finite or trained."""
    expected, names = expected_tensors(shape), canonical_names(header)
    problems = []
    for name in sorted(expected.keys() - set(names.values()) - optional_tensors(shape)):
        message = f"no tensor {name}, expected shape {list(expected[name][1])}: {_without(name)}"
        problems.append(Problem(where, "tensor.missing", message, _EXPORT))
    for stored, name in names.items():
        if name not in expected:
            message = f"unknown tensor {stored}, which a server skips without a word"
            problems.append(Problem(where, "tensor.extra", message, "remove it, or export again"))
            continue
        info, (dtypes, size) = header.tensors[stored], expected[name]
        if list(names.values()).count(name) > 1:
            message = f"{stored} and another tensor both stand for {name}"
            problems.append(Problem(where, "tensor.repeated", message, "keep one of them"))
        if info.shape != size:
            message = f"{stored} has shape {list(info.shape)}, config.json means {list(size)}"
            problems.append(Problem(where, "tensor.shape", message, _EXPORT))
        if info.dtype not in dtypes:
            message = f"{stored} is {info.dtype}, expected {' or '.join(dtypes)}"
            fix = "never cast the tables" if name in ("d2t", "t2d") else "store it as a floating-point tensor"
            problems.append(Problem(where, "tensor.dtype", message, fix))
    return problems


def check_layout(header: Header, sglang_version: str, where: str) -> list[Problem]:
    """Names that this SGLang version does not read; kind `tensor.unread`."""
    newer = [stored for stored in header.tensors if stored.removeprefix("model.").startswith("layers.0.")]
    if not newer or Version(sglang_version) >= Version(GENERAL_SINCE):
        return []
    message = f"SGLang {sglang_version} skips {newer[0]} and {len(newer) - 1} more: it reads midlayer.* only"
    fix = f"rename layers.0.* to midlayer.*, or use {GENERAL_SINCE} or newer"
    return [Problem(where, "tensor.unread", message, fix)]


def canonical_names(header: Header) -> dict[str, str]:
    """Stored name -> the name it stands for: SGLang also reads `model.` before all but the head, and (from 0.5.12)
    `layers.0.` for `midlayer.`."""
    names = {}
    for stored in header.tensors:
        name = stored.removeprefix("model.") if stored != "model.lm_head.weight" else stored
        names[stored] = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
    return names


def read_weights_header(folder: Path) -> Header:
    """The header of a checkpoint's weights.

    Raises:
        ProblemsError: kinds `checkpoint.pickle`, `checkpoint.sharded`, `checkpoint.no_weights`, `safetensors.*`.
    """
    path = folder / WEIGHTS_FILE
    if path.exists():
        return read_header(path)
    if pickles := [entry.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for entry in folder.glob(pattern)]:
        fix = f"save the weights as {WEIGHTS_FILE}; never load a pickle from a source you do not trust"
        raise problem_error(str(folder), "checkpoint.pickle", f"holds pickles ({', '.join(pickles)})", fix)
    if (folder / f"{WEIGHTS_FILE}.index.json").exists():
        message = "its weights are split over several files"
        raise problem_error(str(folder), "checkpoint.sharded", message, f"save them as one {WEIGHTS_FILE}")
    raise problem_error(str(folder), "checkpoint.no_weights", f"has no {WEIGHTS_FILE}", "give the exported folder")


def check_tables(folder: Path, header: Header, shape: DraftShape) -> tuple[str | None, list[Problem]]:
    """The digest of the draft vocab in the weights, and what is wrong with the tables' values.

    Tables that `check_tensors` has a problem with are not read.
    """
    expected, path = expected_tensors(shape), folder / WEIGHTS_FILE
    present = [name for name in ("d2t", "t2d") if name in header.tensors]
    for name in present:
        info, (dtypes, size) = header.tensors[name], expected[name]
        if info.dtype not in dtypes or info.shape != size:
            return None, []
    if {"d2t", "t2d"} - set(present) - optional_tensors(shape):
        return None, []
    d2t = read_int_tensor(path, "d2t") if "d2t" in present else [0] * shape.draft_vocab_size
    t2d = read_int_tensor(path, "t2d") if "t2d" in present else [1] * shape.vocab_size
    problems = check_draft_vocab(d2t, t2d, shape.vocab_size, str(path))
    return None if problems else draft_vocab_digest(target_ids_of(d2t), shape.vocab_size), problems


def _without(name: str) -> str:
    if name == "lm_head.weight":
        return "the config promises an own head, which the server would leave uninitialised"
    if name == "d2t":
        return "draft ids would be taken for target ids"
    if name == "t2d":
        return "it says which target ids the drafter can propose"
    return "the server would leave it uninitialised"
