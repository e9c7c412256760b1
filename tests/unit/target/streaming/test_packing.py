"""Which tokens go through a layer together, and their positions."""

from __future__ import annotations

import torch

from eagle3.target.streaming.packing import micro_batches

CPU = torch.device("cpu")


def test_documents_stay_whole_and_in_order() -> None:
    documents = [[1] * 3, [2] * 4, [3] * 9, [4] * 2, [5] * 1]

    found = micro_batches(documents, 7, CPU)

    assert [micro.lengths for micro in found] == [[3, 4], [9], [2, 1]]
    assert [(micro.begin, micro.end) for micro in found] == [(0, 7), (7, 16), (16, 19)]
    tokens = [token for micro in found for token in micro.input_ids[0].tolist()]
    assert tokens == [token for document in documents for token in document]


def test_positions_start_again_in_each_document() -> None:
    [micro] = micro_batches([[7, 7, 7], [8], [9, 9]], 100, CPU)

    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
