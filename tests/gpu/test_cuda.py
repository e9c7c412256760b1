"""The same results on a GPU as on the CPU; run with `make test-gpu` where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import ExtractConfig, load_config
from eagle3.data.loader import collate
from eagle3.data.store import StoreReader
from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import DraftConfig, TTTSettings
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, TTTOutput, count_terms
from eagle3.draft.vocab import DraftVocab
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_kimi
from eagle3.train.trainer import run_training
from tests.stores import HIDDEN, INDICES, TARGET_CONFIG, VOCAB, train_config, write_random_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TTT = TTTSettings(steps=4, decay=0.8)


def make_module() -> tuple[TTTLoss, TargetHead]:
    config = DraftConfig.from_target(TARGET_CONFIG, num_aux=len(INDICES), draft_vocab_size=VOCAB // 2)
    model = DraftModel(config)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    head = TargetHead(torch.randn(VOCAB, HIDDEN, generator=generator), torch.ones(HIDDEN), 1e-5, "post_norm")
    return TTTLoss(model, DraftVocab(torch.arange(0, VOCAB, 2), VOCAB), TTT), head


def step(device: str, batch: DraftBatch, autocast: bool = False) -> tuple[TTTOutput, dict[str, torch.Tensor]]:
    module, head = make_module()
    module = module.to(device)
    head = head.to(device)
    batch = batch.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        counts = count_terms(batch, head, module.vocab, TTT)
        output = module(batch, counts, counts.in_vocab)
    output.loss.backward()
    gradients = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return output, gradients


@pytest.fixture
def batch(tmp_path: Path) -> DraftBatch:
    reader = StoreReader(write_random_store(tmp_path / "store"))
    samples = [reader.read(index) for index in range(6)]
    return collate([samples[:3], samples[3:]], 64)


def test_loss_and_gradients_on_the_gpu_equal_the_cpu(batch: DraftBatch) -> None:
    expected, expected_gradients = step("cpu", batch)
    found, gradients = step("cuda", batch)

    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-6)


def test_bf16_stays_within_two_percent_of_float32(batch: DraftBatch) -> None:
    expected, expected_gradients = step("cuda", batch)
    found, gradients = step("cuda", batch, autocast=True)

    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=0)
    for name, gradient in gradients.items():
        error = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert error < 0.05, (name, float(error))


def test_training_on_the_gpu_in_bf16_keeps_float32_weights_and_learns(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store")

    result = run_training(train_config(store, tmp_path / "run", mixed_precision="bf16", epochs=20))

    assert result.first_loss is not None and result.last_loss is not None
    assert result.last_loss < result.first_loss
    weights = load_file(result.best_checkpoint / "draft.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_extraction_on_the_gpu_equals_the_cpu(tmp_path: Path) -> None:
    target = make_tiny_kimi(tmp_path / "target")
    prompts = tmp_path / "data.jsonl"
    prompts.write_text(
        '{"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four five"}]}\n'
    )
    readers = []
    for device in ("cpu", "cuda"):
        values = [f"target.path={target}", f"target.device={device}", "target.dtype=float32", "store_dtype=float32"]
        values += [f"data.path={prompts}", f"output={tmp_path / device}", "output_indices=[2,30,58]"]
        run_extract(load_config(ExtractConfig, None, values))
        readers.append(StoreReader(tmp_path / device).read(0))

    for name in ("aux_hidden_states", "last_hidden_states"):
        expected, found = (getattr(sample, name) for sample in readers)
        error = (found - expected).norm() / expected.norm()
        assert error < 1e-3, (name, float(error))
