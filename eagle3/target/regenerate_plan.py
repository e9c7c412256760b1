"""What a regeneration will ask and what it may cost at most, before anything is asked."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.errors import ProblemsError
from eagle3.target.regenerate_session import Session, Spent


@dataclass(frozen=True)
class RegeneratePlan:
    """What is still to be done.

    Attributes:
        prompts: answers that are asked for.
        done: answers that are there.
        first_tokens: of the prompts that are known now, exactly.
        later_tokens: of the prompts of later turns, reckoned with the answers that the input has.
        most_answer_tokens: if no answer ends by itself.
        cost: at most, but for what new answers in a history change; None without prices.
    """

    prompts: int
    done: int
    first_tokens: int
    later_tokens: int
    most_answer_tokens: int
    cost: float | None

    def render(self) -> str:
        later = f", and about {self.later_tokens:,} of later turns" if self.later_tokens else ""
        cost = "" if self.cost is None else f"; costs at most {'about ' if later else ''}{self.cost:,.2f}"
        return (
            f"{self.prompts:,} answers to make, {self.done:,} are there; {self.first_tokens:,} prompt tokens{later}; "
            f"at most {self.most_answer_tokens:,} answer tokens{cost}"
        )


def make_plan(session: Session) -> RegeneratePlan:
    """Counts what waits."""
    first = later = answers = 0
    for index, number in session.waiting.items():
        tokens = session.dialogues.prompt_tokens(number)
        first += tokens
        answers += session.limit(tokens)
        turns = session.left(index)
        if turns == 1:
            continue
        dialogue = session.dialogues[index]
        for ahead in range(1, turns):
            try:
                following = dialogue.prompt(session.renderer, ahead)
            except ProblemsError:  # an old answer that cannot be rendered; its place will have a new one
                answers += session.cfg.max_new_tokens
                continue
            if len(following.input_ids) > session.longest:
                break
            later += len(following.input_ids)
            answers += session.limit(len(following.input_ids))
    cost = session.cost(Spent(0, first + later, answers))
    return RegeneratePlan(session.missing, sum(map(bool, session.chosen)), first, later, answers, cost)
