"""One decoder layer of a target, read from its checkpoint, for a drafter that starts from it (`draft.init`).

Legend: H hidden, I MLP width, q the width of all queries, p that of all keys, as of all values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.config import TargetConfig
from eagle3.draft.config import DraftConfig
from eagle3.draft.init import LAYER_NAMES
from eagle3.errors import Problem, raise_problems
from eagle3.target.head_tensors import read_tensor, tensor_places, tensor_problem
from eagle3.target.resolve import find_target

_FIX = "use draft.init=target_head, or a target whose layers are Llama's"


def read_layer(target: TargetConfig, layer: int | None, draft: DraftConfig) -> dict[str, Tensor]:
    """The tensors of decoder layer `layer` (its output index; None: the last one), by `LAYER_NAMES`, as stored.

    Raises:
        ProblemsError: kind `init.target_layer`, for everything that the drafter's layer cannot take over: another kind
            of attention or MLP, biases, norms on heads, other widths; there is no such layer; kinds
            `target.missing_weights`, `target.mismatched_weights`, `target.quantized`.
    """
    files = find_target(target)
    count = files.facts.num_hidden_layers
    number = count - 1 if layer is None else layer
    if not 0 <= number < count:
        fix = f"give an output index, 0 to {count - 1}, or leave it out for the last layer"
        raise_problems([Problem("draft.init_layer", "init.target_layer", f"is {number}, of {count} layers", fix)])
    model = files.spec.empty(files.folder, torch.float32)
    module = files.spec.decoder_layers(model)[number]
    prefix = next(name for name, part in model.named_modules() if part is module)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    problems = _differences(shapes, draft, f"layer {number} of {files.facts.name}")
    raise_problems(problems, "cannot start the drafter's layer from the target's")
    names = {name: f"{files.spec.weight_prefix}{prefix}.{name}" for name in LAYER_NAMES}
    places = tensor_places(files.folder)
    found = (tensor_problem(files.folder, names[name], shapes[name], places.get(names[name])) for name in LAYER_NAMES)
    raise_problems(problem for problem in found if problem is not None)
    return {name: read_tensor(places[stored][0], stored) for name, stored in names.items()}


def _differences(shapes: dict[str, tuple[int, ...]], draft: DraftConfig, where: str) -> list[Problem]:
    hidden, inner = draft.hidden_size, draft.intermediate_size
    query, pair = (heads * draft.head_dim for heads in (draft.num_attention_heads, draft.num_key_value_heads))
    wanted = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (pair, hidden),
        "self_attn.v_proj.weight": (pair, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    assert set(wanted) == set(LAYER_NAMES)
    messages = [f"has no {name}" for name in wanted if name not in shapes]
    messages += [f"has {name}, which the drafter's layer does not" for name in shapes if name not in wanted]
    messages += [
        f"has {name} {list(shapes[name])}, the drafter {list(shape)}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape
    ]
    many = 6
    shown = messages[:many] + ([f"and {len(messages) - many} more"] if len(messages) > many else [])
    return [Problem(where, "init.target_layer", "; ".join(shown), _FIX)] if messages else []
