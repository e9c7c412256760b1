"""What is sent: the prompts of the named sets, rendered with the target's own template, in one fixed order."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.config import LoadSection, TargetConfig
from eagle3.data.chat import Tokenizer, load_tokenizer
from eagle3.data.chat.render import Renderer
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json
from eagle3.target.answer_servers.api import Sampling
from eagle3.target.dialogue import Dialogue, Prompt, make_dialogues
from eagle3.target.generate import folder_eos_ids
from eagle3.target.resolve import TargetFiles, find_target

NOT_ASKED = {"sets", "concurrency", "passes", "warmup", "timeout_seconds", "reference"}
"""Of the load's keys, those that do not change what a request is."""


@dataclass(frozen=True)
class Talk:
    """A conversation whose user turns are asked in order.

    Attributes:
        set_name: the set that it is of.
        first: the prompt of its first turn.
        kwargs: for the chat template.
    """

    set_name: str
    conversation: Conversation
    first: Prompt
    kwargs: Mapping[str, object]

    @property
    def key(self) -> str:
        """Unique in a bench."""
        return f"{self.set_name}/{self.conversation.id}"

    def dialogue(self) -> Dialogue:
        """It anew, nothing answered yet."""
        return Dialogue(self.conversation, "all")


@dataclass(frozen=True)
class Reference:
    """The target's own greedy answer; `cut` if it does not end with an end token."""

    ids: tuple[int, ...]
    cut: bool


@dataclass(frozen=True)
class Load:
    """All that is sent, and what it was made with.

    Attributes:
        talks: in the order of sending.
        left_out: how many of each set were left out, by reason.
        chat_ids: what the template makes of a short message.
        reference: the target's own answers, by the digest of the prompt's ids.
        digest: of the prompts and of how they are asked.
        renderers: by set.
        sampling: of every request, but for what the chat template is given.
    """

    cfg: LoadSection
    target: TargetConfig
    files: TargetFiles
    tokenizer: Tokenizer
    talks: tuple[Talk, ...]
    left_out: Mapping[str, Mapping[str, int]]
    chat_ids: list[int]
    reference: Mapping[str, Reference] | None
    digest: str
    renderers: Mapping[str, Renderer]
    sampling: Sampling

    def limit(self, prompt: Prompt) -> int:
        """Most tokens of its answer; below 1 where the prompt fills the context."""
        return min(self.cfg.max_new_tokens, self.files.facts.context_length - len(prompt.input_ids))


def make_load(cfg: LoadSection, target: TargetConfig) -> Load:
    """Reads, renders and orders every prompt; loads no weights.

    Raises:
        ProblemsError: the target, a set or the reference cannot be used (every problem of every set at once); or fewer
            conversations than are to be in flight.
    """
    files = find_target(target, weights=False)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=target.trust_remote_code)
    talks: list[Talk] = []
    problems: list[Problem] = []
    left_out: dict[str, dict[str, int]] = {}
    for name, section in cfg.sets.items():
        conversations, dropped = load_conversations(section)
        made, bad = make_dialogues(tokenizer, conversations, section.chat_template_kwargs, "all")
        counts = dict(dropped.by_reason())
        if section.skip_bad:
            for item in bad:
                counts[item.kind] = counts.get(item.kind, 0) + 1
        else:
            problems += bad
        longest = min(section.max_length, files.facts.context_length - 1)
        fitting = [(dialogue, prompt) for dialogue, prompt in made if len(prompt.input_ids) <= longest]
        if len(fitting) < len(made):
            counts["too_long"] = len(made) - len(fitting)
        if made and not fitting:
            message = f"every prompt has more than {longest} tokens"
            fix = f"raise load.sets.{name}.max_length"
            problems.append(Problem(section.path, "bench.too_long", message, fix))
        talks += [Talk(name, item.conversation, prompt, section.chat_template_kwargs) for item, prompt in fitting]
        if counts:
            left_out[name] = counts
    raise_problems(problems)
    random.Random(cfg.seed).shuffle(talks)  # sets of long and of short answers are spread over a pass
    _check_count(cfg, len(talks))
    chat_ids = Renderer(tokenizer, {}).prompt([{"role": "user", "content": "Hi"}], None, "probe")
    reference = None if cfg.reference is None else _reference(cfg.reference, tokenizer, folder_eos_ids(files))
    asked = cfg.model_dump(mode="json", exclude=NOT_ASKED)
    digest = digest_json([asked, [[talk.key, talk.first.digest] for talk in talks]])
    renderers = {name: Renderer(tokenizer, section.chat_template_kwargs) for name, section in cfg.sets.items()}
    sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, folder_eos_ids(files), files.facts.vocab_size)
    return Load(cfg, target, files, tokenizer, tuple(talks), left_out, chat_ids, reference, digest, renderers, sampling)


def _check_count(cfg: LoadSection, talks: int) -> None:
    most = max(cfg.concurrency)
    if talks < most:
        message = f"{talks} conversations are never {most} in flight"
        fix = "give more prompts, or a lower load.concurrency"
        raise problem_error("load.concurrency", "bench.too_few", message, fix)


def _reference(path: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> dict[str, Reference]:
    """The answers by the digest of their prompts.

    Raises:
        ProblemsError: kinds `conversations.*`; `bench.reference`: it holds no answers with token ids.
    """
    section = LoadSection.model_validate({"sets": {"reference": path}}).sets["reference"]
    conversations, _ = load_conversations(section)
    with_ids = {item.id: item for item in conversations if item.answer_ids is not None}
    if not with_ids:
        message = "holds no answer with its token ids (answer_ids)"
        raise problem_error(path, "bench.reference", message, "make it with `eagle3 regenerate`")
    renderer = Renderer(tokenizer, {})
    found = {}
    for item in with_ids.values():
        ids = renderer.prompt(item.messages[:-1], item.tools, f"{path}, {item.id}")
        answer = tuple(item.answer_ids or ())
        found[digest_json(ids)] = Reference(answer, answer[-1] not in stop_ids)
    return found
