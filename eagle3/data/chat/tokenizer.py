"""The target's tokenizer: loading it, what identifies it, which of its tokens are marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from eagle3.errors import problem_error
from eagle3.files import digest_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""Its type, for modules that do not import Transformers: who only reads a store does not wait seconds for it."""


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The target's tokenizer.

    Raises:
        ProblemsError: it is not there, or needs its own code and `trust_remote_code` is off.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file makes it raise almost anything, `Exception` itself included
        fix = "check the path; a tokenizer with its own code needs target.trust_remote_code=true (read the code first)"
        message = f"cannot load the tokenizer: {type(error).__name__}: {error}"
        raise problem_error(path, "tokenizer.unreadable", message, fix) from error


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """`sha256:<hex>` of what each id stands for: the vocabulary and the added tokens.

    Merges and normalisation are left out: they choose among ids, they do not change their meaning.
    """
    added = {str(index): [token.content, token.special] for index, token in tokenizer.added_tokens_decoder.items()}
    return digest_json({"vocab": tokenizer.get_vocab(), "added": added})


def template_digest(tokenizer: Tokenizer) -> str:
    """`sha256:<hex>` of the chat template's text."""
    return digest_json(template_text(tokenizer))


def template_text(tokenizer: Tokenizer) -> str:
    """The chat template.

    Raises:
        ProblemsError: kind `chat.no_template`.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        fix = "use an instruct model, or put its chat_template.jinja beside the tokenizer"
        raise problem_error(tokenizer.name_or_path, "chat.no_template", f"no chat template: {error}", fix) from error


def special_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens added to the vocabulary (end of turn, think and tool marks ...): the draft vocab keeps them."""
    return sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids})
