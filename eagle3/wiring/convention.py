"""What an entry of the conventions' tables says; the tables are in `sglang_table.py` and `other_tables.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ENGINE_NAMES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "tensorrt_llm": "TensorRT-LLM",
    "speculators": "speculators",
    "transformers": "Transformers",
}
ANY_FAMILY = "*"
BEGINNING = "0"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_KEY = f"eagle_config.{LAYER_IDS}"


class Rule(Enum):
    """How an engine turns an id into a boundary."""

    OUTPUT_INDEX = "id + 1"
    BOUNDARY = "id"
    OUTPUT_INDEX_IF_FIRST_IS_1 = "id + 1 if the first id is 1, else id"
    BOUNDARY_IF_LAST_IS_N = "id if the largest id is the number of layers, else id + 1"
    DEFAULTS = "2, N // 2, N - 3, whatever the ids"


@dataclass(frozen=True)
class Convention:
    """One engine's convention for one target family over a closed range of versions.

    Attributes:
        first, last: the range, both ends included.
        source: file and symbol the rule was read in.
        read: the day it was read there, in every release of the range.
        key: where the ids are read from.
        embedding: boundary 0 can be captured.
        last_layer: boundary N can be captured.
        graphs_ignore_ids: CUDA graphs are captured with the default layers, whatever the ids.
        unsupported: why this family cannot be a target there; empty if it can.
    """

    engine: str
    family: str
    first: str
    last: str
    rule: Rule
    source: str
    read: str
    key: str = NESTED_KEY
    embedding: bool = False
    last_layer: bool = False
    graphs_ignore_ids: bool = False
    unsupported: str = ""
