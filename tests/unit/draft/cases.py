"""Tiny drafters and documents, in float64 so that equality means equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.loss import LastHiddenKind, TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, TTTOutput, count_terms
from eagle3.draft.vocab import DraftVocab

VOCAB, HIDDEN, AUX = 24, 16, 3


@dataclass(frozen=True)
class Document:
    """One conversation: ids [T], loss mask [T], aux [T, A * H], last hidden states [T, H]."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


def make_config(**overrides: object) -> DraftConfig:
    values = dict(
        hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        vocab_size=VOCAB, draft_vocab_size=10, num_aux=AUX, target_hidden_size=HIDDEN, rms_norm_eps=1e-5,
        max_position_embeddings=64, rope=RopeConfig(rope_theta=100.0),
    )  # fmt: skip
    return DraftConfig(**{**values, **overrides})  # type: ignore[arg-type]


def make_model(config: DraftConfig | None = None, seed: int = 0) -> DraftModel:
    """Every weight random, norms too, so that no factor can be forgotten unseen."""
    model = DraftModel(config or make_config()).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(1 + 0.3 * noise if value.ndim == 1 else 0.4 * noise)
    return model


def make_document(mask: Sequence[int], seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return Document(
        ids=torch.randint(0, VOCAB, (length,), generator=generator),
        mask=torch.tensor(mask, dtype=torch.bool),
        aux=torch.randn(length, AUX * HIDDEN, generator=generator, dtype=torch.float64),
        last=torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64),
    )


def make_batch(rows: Sequence[Sequence[Document]], padding: int = 0) -> DraftBatch:
    """Packs each row's documents and pads at the right with values that must not matter."""
    width = max(sum(len(document.ids) for document in row) for row in rows) + padding
    shape = (len(rows), width)
    last = torch.full((*shape, HIDDEN), torch.nan, dtype=torch.float64)
    batch = DraftBatch(
        input_ids=torch.full(shape, VOCAB - 1),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        aux=torch.full((*shape, AUX * HIDDEN), torch.nan, dtype=torch.float64),
        last_hidden=last[0],
        document_ids=torch.full(shape, -1),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        sample_ids=[],
    )
    for row, documents in enumerate(rows):
        begin = 0
        for number, document in enumerate(documents):
            place = (row, slice(begin, begin + len(document.ids)))
            batch.input_ids[place] = document.ids
            batch.loss_mask[place] = document.mask
            batch.aux[place] = document.aux
            last[place] = document.last
            batch.document_ids[place] = number
            batch.position_ids[place] = torch.arange(len(document.ids))
            begin += len(document.ids)
    return replace(batch, last_hidden=last[batch.loss_mask])


def random_documents(count: int, seed: int, longest: int = 11) -> list[Document]:
    """Masks of random runs; some documents have no chain at all, some start supervised."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        mask = (torch.rand(length, generator=generator) < 0.85).int().tolist()
        documents.append(make_document(mask, seed=1000 * seed + number))
    return documents


def make_head(kind: LastHiddenKind = "post_norm") -> TargetHead:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    norm = 1 + 0.3 * torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    return TargetHead(weight, norm, 1e-5, kind)


def make_vocab() -> DraftVocab:
    return DraftVocab(torch.tensor([0, 2, 3, 5, 8, 9, 13, 17, 20, 21]), VOCAB)


def run_loss(
    model: DraftModel, batch: DraftBatch, settings: TTTSettings, denominators: torch.Tensor | None = None
) -> TTTOutput:
    """Counts and computes one batch; the denominators are its own unless given."""
    head, vocab = make_head(), make_vocab()
    counts = count_terms(batch, head, vocab, settings)
    divisors = counts.in_vocab if denominators is None else denominators
    return TTTLoss(model, vocab, settings)(batch, counts, divisors)


def gradients(model: DraftModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of every trainable parameter; all must be connected."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
