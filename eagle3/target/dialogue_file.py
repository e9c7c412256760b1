"""Dialogues and their prompts on disk in place of memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eagle3.data.conversations import Conversation
from eagle3.data.scratch import Scratch
from eagle3.errors import Problem
from eagle3.target.dialogue import Dialogue, Prompt


class DialogueFile:
    """Dialogues by number, each as it was put last, and prompts. A name is in it if its answer is asked for.

    In memory stay a digest of each answer's name and a few numbers.

    Attributes:
        too_long: answers that are not asked for, as the first prompt has more than `longest` tokens.
    """

    def __init__(self, folder: Path, longest: int, share: Callable[[], float | None] = lambda: None) -> None:
        """Args:
        folder: whose disk holds them, see `Scratch`.
        longest: most tokens of a prompt that is asked.
        share: about which share of all dialogues was added, see `Scratch`.
        """
        self._records, self._longest = Scratch(folder, share), longest
        self._states, self._firsts, self._fits = array("Q"), array("Q"), bytearray()
        self._answers = array("Q", [0])
        self._prompts, self._tokens = array("Q"), array("Q")
        self.too_long = 0
        self._owners: dict[bytes, int] = {}

    def add(self, dialogue: Dialogue, prompt: Prompt) -> list[Problem]:
        """Takes another conversation; or says which of its answers' names are those of earlier ones.

        Args:
            prompt: of its first turn.
        """
        number, name_of = len(self), dialogue.conversation.id
        owners = {name: self._owners.setdefault(_digest(name), number) for name in dialogue.names}
        met = {name: owner for name, owner in owners.items() if owner != number}
        short = len(prompt.input_ids) <= self._longest
        self._fits.append(short and not met)
        self.too_long += 0 if short or met else len(owners)
        self._states.append(self._put(dialogue.to_json()))
        self._firsts.append(self.put_prompt(prompt))
        self._answers.append(self._answers[-1] + len(owners))
        found = []
        for name, owner in met.items():
            message = f"an answer of conversation {self[owner].conversation.id!r} would have its id, {name!r}, too"
            found.append(Problem(name_of, "chat.duplicate_id", message, "rename one of them"))
        return found

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: object) -> bool:
        owner = self._owners.get(_digest(str(name)))
        return owner is not None and bool(self._fits[owner])

    def asked(self) -> Iterator[int]:
        """Numbers of the dialogues that are asked, in order."""
        return (number for number, fits in enumerate(self._fits) if fits)

    def __getitem__(self, number: int) -> Dialogue:
        return Dialogue.from_json(json.loads(self._records.read(self._states[number])))

    def __setitem__(self, number: int, dialogue: Dialogue) -> None:
        self._states[number] = self._put(dialogue.to_json())

    def first_prompt(self, number: int) -> int:
        """Number of the prompt of a dialogue's first turn."""
        return self._firsts[number]

    def answers(self, number: int) -> range:
        """A dialogue's answers, numbered through over all dialogues."""
        return range(self._answers[number], self._answers[number + 1])

    @property
    def answer_count(self) -> int:
        """Answers of all dialogues, those that are not asked among them."""
        return self._answers[-1]

    def put_prompt(self, prompt: Prompt) -> int:
        """Keeps a prompt; returns its number."""
        self._prompts.append(self._put([vars(prompt.conversation), prompt.input_ids]))
        self._tokens.append(len(prompt.input_ids))
        return len(self._prompts) - 1

    def prompt(self, number: int) -> Prompt:
        """A prompt by its number."""
        conversation, input_ids = json.loads(self._records.read(self._prompts[number]))
        return Prompt(Conversation(**conversation), input_ids)

    def prompt_tokens(self, number: int) -> int:
        """Length of that prompt."""
        return self._tokens[number]

    def _put(self, values: Any) -> int:
        return self._records.add(json.dumps(values).encode())


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()
