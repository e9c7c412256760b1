"""Prompts that SGLang's own chat endpoint makes of messages, with a template and a tokenizer that are given.

Request: `{"tokenizer": folder, "messages", "tools", "kwargs"}` each. Reply: token ids each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    jinja_template_may_reorder_tool_results,
)
from transformers import AutoTokenizer


def prompt_ids(asked: dict[str, Any]) -> list[int]:
    """What the endpoint would send to the engine; only what a server's start sets up is stood in for."""
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    endpoint: Any = object.__new__(OpenAIServingChat)
    endpoint.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="target")
    endpoint.template_manager = SimpleNamespace(
        jinja_template_content_format=detect_jinja_template_content_format(tokenizer.chat_template),
        jinja_template_may_reorder_tool_results=jinja_template_may_reorder_tool_results(tokenizer.chat_template),
        python_chat_template=None,
        reasoning_config=None,
        chat_template_name=None,
    )
    endpoint.is_minimax_m3 = False
    endpoint.chat_encoding_spec = None
    endpoint._encoding_adapter = None
    endpoint._prompt_text_round_trip_is_lossy = False
    endpoint._tokenizer_auto_adds_specials = True
    endpoint._thinking_requested = lambda request: False
    request = ChatCompletionRequest(
        model="target", messages=asked["messages"], tools=asked["tools"], chat_template_kwargs=asked["kwargs"]
    )
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    return list(endpoint._apply_jinja_template(request, tools, False).prompt_ids)


if __name__ == "__main__":
    request_file, reply_file = map(Path, sys.argv[1:])
    asked = json.loads(request_file.read_text(encoding="utf-8"))
    reply_file.write_text(json.dumps([prompt_ids(item) for item in asked]), encoding="utf-8")
