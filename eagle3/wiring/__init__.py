"""Layer wiring for EAGLE-3: one numbering, one contract, and checks that say what a server would read.

Standard library only, so that any tool can import it. A draft model trained on the outputs of some target layers and
served with others loses most of its acceptance without an error; these checks name that before a server is started.
"""

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.checks import assert_wiring, check_checkpoint, check_dataset, describe_checkpoint
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract, config_digest
from eagle3.wiring.draft_vocab import check_draft_vocab, draft_vocab_digest
from eagle3.wiring.engines import (
    EngineIds,
    Version,
    boundaries_read,
    find_convention,
    ids_to_write,
    newest_known,
)
from eagle3.wiring.layers import EMBEDDING, LayerWiring, check_output_indices, default_output_indices
from eagle3.wiring.report import exit_code, explain, render_explain, render_json, render_text
from eagle3.wiring.targets import KNOWN_TARGETS, TargetFacts, family_of_model_type, target_facts

__all__ = [
    "CONTRACT_FILE",
    "EMBEDDING",
    "KNOWN_TARGETS",
    "EngineIds",
    "LayerWiring",
    "Problem",
    "ProblemsError",
    "TargetFacts",
    "Version",
    "WiringContract",
    "assert_wiring",
    "boundaries_read",
    "check_checkpoint",
    "check_dataset",
    "check_draft_vocab",
    "check_output_indices",
    "config_digest",
    "default_output_indices",
    "describe_checkpoint",
    "draft_vocab_digest",
    "exit_code",
    "explain",
    "family_of_model_type",
    "find_convention",
    "ids_to_write",
    "newest_known",
    "render_explain",
    "render_json",
    "render_text",
    "target_facts",
]
