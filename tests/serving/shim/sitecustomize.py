"""On PYTHONPATH, so that it runs in every process that SGLang spawns, before anything of SGLang is imported."""

import sglang_on_cpu

sglang_on_cpu.prepare()
