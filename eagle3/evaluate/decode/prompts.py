"""Sets of prompts: each file is one, and each of its conversations is answered turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from transformers import PreTrainedTokenizerBase

from eagle3.config import ConversationsConfig, DecodeConfig
from eagle3.data.conversations import load_conversations
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.target.dialogue import Dialogue, Prompt, make_dialogues


@dataclass
class PromptSet:
    """The conversations of a file.

    Attributes:
        name: the file's, without its ending.
        dialogues: each with the prompt of its first turn, which is not too long.
        prefix: what stands before its ids where there are several sets.
        skipped: records left out as bad (`data.skip_bad`), by reason.
        too_long: turns left out, since their prompt has more tokens than may be.
    """

    name: str
    dialogues: list[tuple[Dialogue, Prompt]]
    prefix: str = ""
    skipped: Counter[str] = field(default_factory=Counter)
    too_long: int = 0

    @property
    def answers(self) -> int:
        return sum(len(dialogue.names) for dialogue, _ in self.dialogues)


def read_sets(cfg: DecodeConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> list[PromptSet]:
    """The sets of `cfg.prompts`, in their order.

    Args:
        longest: most tokens of a prompt.

    Raises:
        ProblemsError: everything that is wrong with any of them.
    """
    names = [PurePath(path).stem for path in cfg.prompts]
    problems = [
        Problem(path, "decode.sets", f"is a second set of the name {name!r}", "rename one of the files")
        for place, (path, name) in enumerate(zip(cfg.prompts, names, strict=True))
        if name in names[:place]
    ]
    sets = []
    for path, name in zip(cfg.prompts, names, strict=True):
        try:
            sets.append(_read(cfg, path, name, tokenizer, longest))
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return sets


def _read(cfg: DecodeConfig, path: str, name: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> PromptSet:
    given = cfg.data.model_dump(exclude={"chat_template_kwargs"})
    conversations, dropped = load_conversations(ConversationsConfig(path=path, **given))
    prefix = f"{name}/" if len(cfg.prompts) > 1 else ""
    asked = [replace(item, id=prefix + item.id) for item in conversations]
    dialogues, problems = make_dialogues(tokenizer, asked, cfg.data.chat_template_kwargs, "all")
    skipped = Counter(dict(dropped.by_reason()))
    if problems and not cfg.data.skip_bad:
        raise ProblemsError(problems)
    bad = {item.where: item.kind for item in reversed(problems)}
    skipped.update(bad.values())
    fitting = [pair for pair in dialogues if len(pair[1].input_ids) <= longest and pair[0].conversation.id not in bad]
    if not fitting:
        message = f"no prompt is left of {len(conversations)}: each is bad, or has more than {longest} tokens"
        raise problem_error(path, "decode.no_prompts", message, "check the file, or raise data.max_length")
    left_out = [pair for pair in dialogues if len(pair[1].input_ids) > longest]
    return PromptSet(name, fitting, prefix, skipped, sum(len(dialogue.names) for dialogue, _ in left_out))


def reasons(counts: Mapping[str, int]) -> Sequence[str]:
    """In words, the most frequent first."""
    return [f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])]
