"""gpt-oss, from checkpoints in bfloat16 (the published MXFP4 ones are not read)."""

from eagle3.target.spec import TargetSpec

GPT_OSS = TargetSpec("gpt_oss")
