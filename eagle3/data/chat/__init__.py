"""Conversations -> token ids and loss mask, as the server would see and the target would emit them.

The rule for every supervised answer: the ids before it are exactly the ids of its prompt with the generation
prompt, and the supervised ids run from there to the end-of-turn token, that token included.
"""

from eagle3.data.chat.prepare import prepare_samples, prepare_stream
from eagle3.data.chat.render import Rendered, render, render_prompt
from eagle3.data.chat.report import PrepareReport, TokenSample
from eagle3.data.chat.tokenizer import Tokenizer, load_tokenizer, special_token_ids, template_digest, tokenizer_digest

__all__ = [
    "PrepareReport",
    "Rendered",
    "TokenSample",
    "Tokenizer",
    "load_tokenizer",
    "prepare_samples",
    "prepare_stream",
    "render",
    "render_prompt",
    "special_token_ids",
    "template_digest",
    "tokenizer_digest",
]
