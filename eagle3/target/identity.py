"""What makes two runs the same run: digests of the target and of the data, for settings that a resume must match."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from transformers import PreTrainedTokenizerBase

from eagle3.config import TargetConfig
from eagle3.data.chat import template_digest, tokenizer_digest
from eagle3.data.conversations import Conversation
from eagle3.files import digest_json
from eagle3.target.resolve import TargetFiles, weights_digest
from eagle3.wiring.targets import config_digest


def target_identity(files: TargetFiles, tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> dict[str, str]:
    """What the target's tokens and states depend on; its folder's name and its device are not part of it."""
    return {
        "config": config_digest(files.config),
        "weights": weights_digest(files.folder),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "dtype": target.dtype,
    }


def conversations_digest(conversations: Iterable[Conversation]) -> str:
    """`sha256:<hex>` of their content, in order, wherever the file is."""
    return digest_json([asdict(conversation) for conversation in conversations])
