"""What kernels, ranges and functions are called, and what that says.

Read in SGLang 0.5.16 and 0.5.23 (`sglang/srt/speculative/eagle_worker_v2.py`, `eagle_utils.py`,
`sglang/srt/utils/profile_utils.py`, `nvtx_utils.py`), in NCCL (`ncclDevKernel_*`, before 2.19 `ncclKernel_*`), and in
torch's symmetric memory.
"""

from __future__ import annotations

import re

COMMUNICATION = re.compile(
    r"nccl|cross_device_reduce|all_?reduce|allreduce|all_?gather|reduce_?scatter|all_?to_?all|"
    r"(one|two)_shot|quick_?reduce|mscclpp|multimem_|nvshmem|deep_ep::|Memcpy PtoP",
    re.IGNORECASE,
)
"""Of kernels and copies: they move data between GPUs, or wait for another one."""
CPU_COMMUNICATION = re.compile(r"^(c10d::|gloo:|nccl:|record_param_comms|sgl_kernel::shm_all)")
"""Of operators and ranges on the CPU."""
BUILDS_TREE = re.compile(r"build_?(eagle_?)?tree", re.IGNORECASE)
"""The last kernel of drafting: it lays the drafts out for the verify."""
ACCEPTS = re.compile(
    r"verify_?tree|tree_?speculative|chain_?speculative|reject(ion)?_?sampl|fill_(new_)?(bonus|accept|verified)",
    re.IGNORECASE,
)
"""Kernels that decide what of the drafts is committed: only after a verify."""

DRAFT, DRAFT_EXTEND = "draft", "draft_extend"
STEP = re.compile(r"step\[(\w+) bs=(\d+)")
"""SGLang's range around a model's forward: its mode and batch."""
VERIFY_MODES = ("TARGET_VERIFY", "VERIFY")
PREFILL_MODES = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")

_WORKER = r"speculative/(multi_layer_)?eagle_worker\w*\.py\(\d+\): "
STACK_DRAFT = re.compile(_WORKER + r"draft$")
STACK_EXTEND = re.compile(_WORKER + r"(_draft_extend_for_decode|forward_draft_extend_after_decode)$")
STACK_PREFILL = re.compile(_WORKER + r"(_draft_extend_for_prefill|forward_target_extend|forward_draft_extend)$")
STACK_VERIFY = re.compile(r"speculative/(multi_layer_)?eagle_worker\w*\.py\(\d+\): (verify|run_eagle_verify)$")
STACK_TARGET = re.compile(r"managers/tp_worker\.py\(\d+\): forward_batch_generation$")
STACK = (STACK_DRAFT, STACK_EXTEND, STACK_PREFILL, STACK_VERIFY, STACK_TARGET)
"""Frames of a trace with stacks."""

GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch", re.IGNORECASE)
