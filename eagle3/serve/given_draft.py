"""A drafter in any folder that SGLang's `LlamaForCausalLMEagle3` could be loaded from, whoever wrote it.

`eagle3 export`, SpecForge and the tools that follow it write such folders. Names may be `midlayer.*` or `layers.0.*`,
with or without `model.`; weights lie in one safetensors file or in several. Nothing is ever unpickled.

Shapes: D draft vocab, H hidden, V target vocab.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, ProblemsError
from eagle3.files import read_json_object
from eagle3.wiring.checkpoint_config import DraftShape, check_config, draft_shape, layer_ids, option
from eagle3.wiring.checkpoint_tensors import (
    EMBEDDING,
    canonical_names,
    check_tables,
    check_tensors,
    expected_tensors,
)
from eagle3.wiring.checks import check_checkpoint
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.conventions import LAYER_IDS, NESTED_KEY
from eagle3.wiring.draft_vocab import target_ids_of
from eagle3.wiring.layouts import LOADERS, Layout, recognise
from eagle3.wiring.targets import CONFIG_FILE
from eagle3.wiring.weights import WEIGHTS_FILE, Weights, read_weights

_TABLES = ("d2t", "t2d")
_DEFAULT_EPS = 1e-6
"""Of Transformers' Llama config, and so of a server, where config.json has no `rms_norm_eps`."""
_FLAGS = ("norm_output", "fc_norm", "norm_before_fc", "norm_before_residual")
_OTHER = "start from a drafter like ours, or train without init_from"
_T = TypeVar("_T")


@dataclass
class GivenDraft:
    """What a folder holds, as far as it can be read, and everything that is wrong with it.

    Attributes:
        fields: config.json, flat.
        tool: who writes such a config.json, in words.
        shape: as config.json means it; None where a size is wrong.
        values: the drafter's fields but its rope, by the names of `DraftConfig`; empty where a size is wrong.
        config: None where it is no drafter that is trained here.
        vocab: None where the tables are wrong.
        contract: None in a folder that another tool wrote.
        state: trained weights in their stored types, by SGLang's names; empty unless asked for.
        files: of the weights.
    """

    fields: Mapping[str, Any]
    tool: str
    shape: DraftShape | None = None
    values: dict[str, Any] = field(default_factory=dict)
    config: DraftConfig | None = None
    vocab: DraftVocab | None = None
    contract: WiringContract | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, problems: Iterable[Problem]) -> list[Problem]:
        """Adds what is not there yet; returns all that was given."""
        given = list(problems)
        self.problems = list(dict.fromkeys([*self.problems, *given]))
        return given

    def attempt(self, call: Callable[[], _T]) -> _T | None:
        """The value, or None after adding what was raised."""
        try:
            return call()
        except ProblemsError as error:
            self.add(error.problems)
            return None


def read_given(folder: Path, values: bool) -> GivenDraft:
    """Reads a folder with a config.json.

    Args:
        folder: the folder.
        values: read the weights too; else headers and the draft vocab's tables only.

    Raises:
        ProblemsError: config.json is no JSON object; kinds `file.*`. All else is in the result: whatever
            `check_checkpoint` finds in a folder with a contract; `config.*`, `layer_ids.*`, `checkpoint.*`,
            `safetensors.*`, `tensor.*`, `draft_vocab.*`, `draft.*`; `init.architecture`.
    """
    where = str(folder / CONFIG_FILE)
    layout = recognise(read_json_object(folder / CONFIG_FILE, "a checkpoint's config.json"))
    given = GivenDraft(layout.fields, layout.tool)
    if os.path.lexists(folder / CONTRACT_FILE):
        layout = replace(layout, own=True)
        given.contract = given.attempt(lambda: WiringContract.load(folder))
        given.add(check_checkpoint(folder, cuda_graphs=False))
    unsound = given.add([*_unknown_parts(layout, where), *check_config(layout, where), *_id_problems(layout, where)])
    weights = given.attempt(lambda: read_weights(folder))
    given.shape = draft_shape(layout, _aux_layers(weights, layout.fields))
    if given.shape is not None:
        given.values = _values(given.fields, given.shape)
        given.config = None if unsound else _config(given, where)
    if given.shape is not None and weights is not None:
        given.files = sorted(set(weights.files.values()))
        _read_weights(given, weights, given.shape, layout.own, folder, values)
    return given


def _unknown_parts(layout: Layout, where: str) -> Iterator[Problem]:
    """What is computed otherwise here, or said in two ways; kinds `init.architecture`, `draft.rope.value`."""
    if layout.mla:
        message = f"is {layout.architecture}: its attention is DeepSeek's latent one, drafters here have Llama's"
        yield Problem(where, "init.architecture", message, _OTHER)
    elif not isinstance(layout.architecture, str) or layout.architecture not in LOADERS["vllm"]:
        message = (
            f"architectures is {layout.fields.get('architectures')!r}, expected one of {', '.join(LOADERS['vllm'])}"
        )
        yield Problem(where, "init.architecture", message, _OTHER)
    nested = layout.fields.get("eagle_config")
    steps = nested.get("parallel_draft_step", 1) if isinstance(nested, dict) else 1
    if steps != 1:
        yield Problem(where, "init.architecture", f"parallel_draft_step is {steps!r}, drafters here have 1", _OTHER)
    for name in _FLAGS:
        if layout.fields.get(name, False) not in (True, False, None):
            message = f"{name} is {layout.fields[name]!r}, expected true or false"
            yield Problem(where, "init.architecture", message, "correct it")
    if option(layout.fields, "norm_before_residual"):
        message = "norm_before_residual is true: its residual is the normed state, here it is the state itself"
        yield Problem(where, "init.architecture", message, _OTHER)
    if layout.fields.get("model_type") == "qwen3":
        yield Problem(where, "init.architecture", "is of Qwen3's layers, with norms on each head's query", _OTHER)
    new = layout.fields.get("rope_parameters")
    thetas = [layout.fields.get("rope_theta"), new.get("rope_theta") if isinstance(new, dict) else None]
    if None not in thetas and thetas[0] != thetas[1]:
        message = f"rope_theta is {thetas[0]!r}, and {thetas[1]!r} in rope_parameters, expected one value"
        yield Problem(where, "draft.rope.value", message, "remove the wrong one")


def _id_problems(layout: Layout, where: str) -> list[Problem]:
    """Lists of layer ids that are no such lists; that they are missing is said where they are needed."""
    found = [problem for key in (NESTED_KEY, LAYER_IDS) for problem in layer_ids(layout.fields, key, where)[1]]
    return [problem for problem in found if problem.kind != "layer_ids.missing"]


def _aux_layers(weights: Weights | None, fields: Mapping[str, Any]) -> int:
    """As many as `fc` reads, for a config.json that does not say."""
    names = {} if weights is None else {name: stored for stored, name in canonical_names(weights.tensors).items()}
    width = fields.get("target_hidden_size") or fields.get("hidden_size")
    if weights is None or "fc.weight" not in names or not isinstance(width, int) or width < 1:
        return 3
    shape = weights.tensors[names["fc.weight"]].shape
    return max(1, shape[-1] // width) if shape else 3


def _values(fields: Mapping[str, Any], shape: DraftShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": fields["num_attention_heads"],
        "num_key_value_heads": fields["num_key_value_heads"],
        "head_dim": shape.query_size // fields["num_attention_heads"],
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_aux": shape.num_aux,
        "target_hidden_size": shape.target_hidden_size,
        "rms_norm_eps": fields.get("rms_norm_eps", _DEFAULT_EPS),
        "max_position_embeddings": fields["max_position_embeddings"],
        "norm_output": option(fields, "norm_output"),
        "fc_norm": shape.fc_norm,
        "norm_before_fc": shape.norm_before_fc,
        "num_hidden_layers": fields.get("num_hidden_layers"),
    }


def _config(given: GivenDraft, where: str) -> DraftConfig | None:
    """The drafter that a server would build; the problems name config.json."""
    try:
        return DraftConfig(**given.values, rope=RopeConfig.from_hf(dict(given.fields)))
    except ProblemsError as error:
        given.add(replace(problem, where=where, fix=_OTHER) for problem in error.problems)
        return None


def _read_weights(
    given: GivenDraft, weights: Weights, shape: DraftShape, own: bool, folder: Path, values: bool
) -> None:
    where = str(folder if len(given.files) > 1 else folder / WEIGHTS_FILE)
    given.add(check_tensors(weights, shape, own, where))
    digest, problems = check_tables(weights, shape, own, where)
    given.add(problems)
    names = canonical_names(weights.tensors)
    if digest is not None:
        stored = next((stored for stored, name in names.items() if name == "d2t"), None)
        offsets = [0] * shape.draft_vocab_size if stored is None else weights.read_ints(stored)
        given.vocab = DraftVocab(torch.tensor(target_ids_of(offsets)), shape.vocab_size)
    expected = expected_tensors(shape)
    for file in given.files if values else ():
        with safe_open(file, "pt") as opened:
            for stored, name in names.items():
                info = weights.tensors[stored]
                dtypes, size = expected.get(name, ((), ()))
                if weights.files[stored] != file or name in (*_TABLES, EMBEDDING) or info.dtype not in dtypes:
                    continue
                if info.shape == size:
                    given.state[name] = opened.get_tensor(stored)
                    given.add(_not_finite(given.state[name], stored, file))


def _not_finite(tensor: Tensor, name: str, file: Path) -> Iterator[Problem]:
    if bad := int((~torch.isfinite(tensor)).sum()):
        message = f"{name} holds {bad} NaN or infinite values as {tensor.dtype}"
        yield Problem(str(file), "tensor.not_finite", message, "start from another checkpoint: this one is damaged")
