"""What every part of a run config is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0, lt=2**63, strict=True)]
PathText = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, field docstrings are the help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)
