"""What makes two runs the same run: digests of the target and of the data, for settings that a resume must match."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from transformers import PreTrainedTokenizerBase

from eagle3.config import TargetConfig
from eagle3.data.chat import template_digest, tokenizer_digest
from eagle3.data.conversations import Conversation
from eagle3.files import canonical_json
from eagle3.target.resolve import TargetFiles, weights_digest
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.layers import LayerWiring
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


def target_contract(
    files: TargetFiles, identity: Mapping[str, str], wiring: LayerWiring, last_hidden_states: str, dtype: str
) -> WiringContract:
    """The contract of states of this target.

    Args:
        identity: `target_identity` of it.
        wiring: the captured layers.
        last_hidden_states: `post_norm` or `pre_norm`.
        dtype: of the stored states.
    """
    facts = files.facts
    return WiringContract(
        target_name=facts.name,
        target_family=facts.family,
        target_config_digest=identity["config"],
        num_hidden_layers=facts.num_hidden_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        output_indices=wiring.output_indices,
        last_hidden_states=last_hidden_states,
        dtype=dtype,
        tokenizer_digest=identity["tokenizer"],
        chat_template_digest=identity["chat_template"],
    )


def conversations_digest(conversations: Iterable[Conversation]) -> str:
    """`sha256:<hex>` of their content, in order, wherever the file is."""
    digest = ConversationsDigest()
    deque(digest.passing(conversations), maxlen=0)
    return digest.value()


class ConversationsDigest:
    """The digest of conversations that go by, as that of one JSON list of them all."""

    def __init__(self) -> None:
        self._digest, self._before = hashlib.sha256(b"["), b""

    def passing(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The same conversations."""
        for conversation in conversations:
            self._digest.update(self._before + canonical_json(vars(conversation)).encode())
            self._before = b","
            yield conversation

    def value(self) -> str:
        """Of all that went by so far."""
        whole = self._digest.copy()
        whole.update(b"]")
        return f"sha256:{whole.hexdigest()}"
