"""DeepSeek-V3 (R1 included)."""

from eagle3.target.spec import TargetSpec

DEEPSEEK = TargetSpec("deepseek_v3")
