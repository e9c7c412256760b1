"""Stand-ins in plain PyTorch for the native CPU kernels of SGLang 0.5.23, whose CPU build no package index carries.

Only what its CPU path calls when it speculates greedily with EAGLE-3.
Each does what the Triton kernel of the same purpose does on a GPU (`sglang/kernels/ops`). Slow; for tests.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0+torch"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# These two are called as torch operators.
for _operator in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)
