"""SGLang's own drafter and ours compute the same: every logit of every chain, at every depth, from one export.

In float32 to 1e-5 of the largest value: SGLang computes rotary angles in float32, we in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import RopeConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import unroll
from eagle3.serve.export import export_run
from eagle3.serve.saved_draft import load_exported
from eagle3.target.tiny import make_tiny_llama
from tests.serving.sglang_venv import SERVED_VERSION, run_script
from tests.serving.test_loader import kimi_like, llama_like
from tests.unit.serve.cases import HIDDEN, VOCAB, serve

TOKENS, STEPS = 20, 5
LLAMA3 = RopeConfig("llama3", 100.0, 8.0, 1.0, 4.0, 32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kimi": {},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all norms": {"norm_output": True, "fc_norm": True, "norm_before_fc": True},
    "two layers": {"outputs": (1, 8)},
    "linear rope": {"rope": RopeConfig("linear", 100.0, 3.0)},
    "llama3 rope": {"rope": LLAMA3},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """An export and what the real drafter computes with it, for every case; one process computes all of them."""
    folder = tmp_path_factory.mktemp("forward")
    made: dict[str, dict[str, Path]] = {}
    for number, (name, options) in enumerate(CASES.items()):
        make = kimi_like if name == "kimi" else llama_like
        run = make(folder / str(number), spread=0.25, **options)  # more, and rounding grows threefold a step
        values = {"dtype": "float32", "engine_version": SERVED_VERSION}
        export = export_run(serve(run, folder / f"export-{number}", **values)).output
        generator = torch.Generator().manual_seed(number)
        slots = [torch.randn(TOKENS, HIDDEN, generator=generator) * 3**slot for slot in range(run.config.num_aux)]
        inputs = {
            "tokens": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
            "aux": torch.cat(slots, -1),
            "embed_tokens.weight": run.embedding,
        }
        save_file(inputs, folder / f"inputs-{number}")
        made[name] = {"checkpoint": export, "inputs": folder / f"inputs-{number}", "save": folder / f"real-{number}"}
    computed = {"starts": list(range(TOKENS - STEPS - 1)), "steps": STEPS}
    request = {"target": make_tiny_llama(folder / "target"), "cases": [case | computed for case in made.values()]}
    run_script("draft_forward", request, folder)
    return made


@torch.no_grad()
def ours(model: DraftModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `draft_forward` saves it: `logits.START` [K, D] and `states.START` [K, H] of every chain of K steps."""
    count = len(inputs["tokens"])
    batch = DraftBatch(
        input_ids=inputs["tokens"][None],
        loss_mask=torch.ones(1, count, dtype=torch.bool),
        aux=inputs["aux"][None],
        last_hidden=torch.zeros(count, HIDDEN),
        document_ids=torch.zeros(1, count, dtype=torch.int64),
        position_ids=torch.arange(count)[None],
        sample_ids=["sample"],
    )
    plan = plan_chains(batch.loss_mask, batch.document_ids, STEPS, "served")
    found: dict[str, list[torch.Tensor]] = {}
    for rows, output in zip(plan.steps, unroll(model, batch, plan), strict=True):
        logits, states = model.logits(output), model.handed_on(output)
        for row, start in enumerate(plan.sources[rows.sources].tolist()):
            found.setdefault(f"logits.{start}", []).append(logits[row])
            found.setdefault(f"states.{start}", []).append(states[row])
    return {name: torch.stack(values) for name, values in found.items() if len(values) == STEPS}


@pytest.mark.parametrize("name", CASES)
def test_the_real_drafter_computes_what_ours_does_at_every_depth(name: str, cases: dict[str, dict[str, Path]]) -> None:
    inputs, real = load_file(cases[name]["inputs"]), load_file(cases[name]["save"])
    model = load_exported(cases[name]["checkpoint"]).model(inputs["embed_tokens.weight"])

    mine = ours(model, inputs)

    assert real.keys() == mine.keys()
    apart = {key: float((mine[key] - value).abs().max() / value.abs().max()) for key, value in real.items()}
    assert max(apart.values()) < 1e-5, apart
    assert real["logits.0"].shape[0] == STEPS and real["logits.0"].std() > 0.1
