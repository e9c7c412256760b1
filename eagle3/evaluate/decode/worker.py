"""Target and drafter in memory, answering one prompt after the other.

Answers are lines as `eagle3 regenerate` writes them, with what was accepted under `decode`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.config import DecodeConfig
from eagle3.errors import problem_error
from eagle3.evaluate.decode.compare import Deviation, find_deviation
from eagle3.evaluate.decode.drafter import Drafter
from eagle3.evaluate.decode.draws import Narrowing
from eagle3.evaluate.decode.given import GivenDrafter
from eagle3.evaluate.decode.growth import Drafting
from eagle3.evaluate.decode.loop import Decoded, decode
from eagle3.evaluate.decode.result import Answer
from eagle3.evaluate.decode.target import CachedTarget
from eagle3.target.answer_file import Line
from eagle3.target.dialogue import Prompt
from eagle3.target.engines.transformers import load_model
from eagle3.target.generate import Generated, generate, prompt_seed
from eagle3.target.regenerate_session import answer_line
from eagle3.target.resolve import TargetFiles

_WARM_TOKENS = 4


@dataclass(frozen=True)
class Asked:
    """A prompt of a set.

    Attributes:
        name: its id without the set's, of which its seed is made.
        limit: most tokens of the answer.
    """

    set: str
    name: str
    prompt: Prompt
    limit: int


class Worker:
    """Loads the target and the drafter.

    Args:
        stop_ids: end-of-text tokens.

    Raises:
        ProblemsError: weights of either are missing or damaged; kind `decode.topk`.
    """

    def __init__(
        self,
        cfg: DecodeConfig,
        files: TargetFiles,
        given: GivenDrafter,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
    ) -> None:
        self.cfg, self.tokenizer, self.stop_ids = cfg, tokenizer, tuple(stop_ids)
        self.model = load_model(files, cfg.target)
        draft, vocab = given.model(files.spec.head_tensors(self.model)["embed_tokens.weight"])
        if cfg.topk > len(vocab):
            message = f"is {cfg.topk}, the draft vocab has {len(vocab)} tokens"
            raise problem_error("topk", "decode.topk", message, "give fewer branches")
        self.target = CachedTarget(self.model, files.spec, given.output_indices)
        self.drafter = Drafter(draft.to(self.model.device, self.model.dtype), vocab)
        self.plan = Drafting(cfg.steps, cfg.topk, cfg.verified, cfg.kind, cfg.temperature or 1.0)
        self.narrowing = Narrowing(cfg.temperature, cfg.top_p, cfg.top_k) if cfg.temperature else None

    def warm_up(self, asked: Asked) -> None:
        """What is slow the first time only is not to be in any answer's time."""
        short = Asked(asked.set, asked.name, asked.prompt, min(asked.limit, _WARM_TOKENS))
        self._decode(short)
        if self.cfg.plain:
            self._alone(short)

    def answer(self, asked: Asked) -> Line:
        """An answer by speculative decoding, compared with the target's own if that is wanted."""
        found = self._decode(asked)
        text = self.tokenizer.decode(found.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        how = {"set": asked.set, "accepted": found.accepted, "seconds": found.seconds, "own": None}
        line = answer_line(asked.prompt, str(text), found.finish, answer_ids=found.ids, decode=how)
        return self.compare(asked, line) if self.cfg.plain else line

    def compare(self, asked: Asked, line: Line) -> Line:
        """The line of an answer with what the target alone took, and said otherwise."""
        began = time.perf_counter()
        alone = self._alone(asked)
        own: dict[str, Any] = {
            "tokens": len(alone.ids),
            "seconds": time.perf_counter() - began,
            "compared": self.cfg.verifies,
            "deviation": None,
        }
        if self.cfg.verifies:
            where, prompt = (asked.set, asked.prompt.id), asked.prompt.input_ids
            found = find_deviation(self.model, where, prompt, line["answer_ids"], alone.ids, self.cfg.tolerance)
            own["deviation"] = None if found is None else asdict(found)
        return {**line, "decode": {**line["decode"], "own": own}}

    def _decode(self, asked: Asked) -> Decoded:
        generator = torch.Generator().manual_seed(prompt_seed(self.cfg.seed, asked.name))
        prompt = asked.prompt.input_ids
        return decode(
            self.target, self.drafter, prompt, asked.limit, self.stop_ids, self.plan, self.narrowing, generator
        )

    def _alone(self, asked: Asked) -> Generated:
        cfg, seed = self.cfg, prompt_seed(self.cfg.seed, asked.name)
        prompts, limits = [asked.prompt.input_ids], [asked.limit]
        return generate(self.model, prompts, limits, self.stop_ids, cfg.temperature, [seed], cfg.top_p, cfg.top_k)[0]


def lacks_own(cfg: DecodeConfig, line: Line) -> bool:
    """Whether an answer that is there has yet to be held against the target alone."""
    own = line["decode"]["own"]
    return cfg.plain and (own is None or (cfg.verifies and not own["compared"]))


def read_line(line: Line, group: str) -> tuple[Answer, Deviation | None, bool]:
    """An answer's figures, what differs from the target's own, and whether that was looked for.

    Args:
        group: the conversation's id.

    Raises:
        ProblemsError: kind `decode.damaged`.
    """
    try:
        how, tokens = line["decode"], len(line["answer_ids"])
        own: Mapping[str, Any] = how["own"] or {}
        answer = Answer(group, tokens, how["accepted"], how["seconds"], own.get("tokens"), own.get("seconds"))
        if not all(type(item) is int and item >= 0 for item in answer.accepted):
            raise TypeError
        deviation = own.get("deviation")
        return answer, None if deviation is None else Deviation(**deviation), bool(own.get("compared"))
    except (KeyError, TypeError, AttributeError):
        message = f"the line of {line.get('id')!r} does not hold what was accepted"
        raise problem_error("output", "decode.damaged", message, "remove that line, or choose another output") from None
