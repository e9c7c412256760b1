"""Llama and models of its exact shape in Transformers (SmolLM2 is one)."""

from eagle3.target.spec import TargetSpec

LLAMA = TargetSpec("llama")
