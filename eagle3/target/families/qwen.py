"""Qwen2, Qwen3 and the Qwen3 mixture of experts."""

from eagle3.target.spec import TargetSpec

QWEN = TargetSpec("qwen2", "qwen3", "qwen3_moe")
