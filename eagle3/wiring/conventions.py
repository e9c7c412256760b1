"""What each serving engine means by its layer ids, as data: read in the released packages, never guessed.

A version outside every range is unknown. SGLang: `sglang_table.py`; the others: `other_tables.py`.
"""

from __future__ import annotations

from eagle3.wiring.convention import ANY_FAMILY as ANY_FAMILY
from eagle3.wiring.convention import BEGINNING as BEGINNING
from eagle3.wiring.convention import ENGINE_NAMES as ENGINE_NAMES
from eagle3.wiring.convention import LAYER_IDS as LAYER_IDS
from eagle3.wiring.convention import NESTED_KEY as NESTED_KEY
from eagle3.wiring.convention import Convention as Convention
from eagle3.wiring.convention import Rule as Rule
from eagle3.wiring.other_tables import SPECULATORS, TRANSFORMERS, VLLM
from eagle3.wiring.other_tables import UNREADABLE as UNREADABLE
from eagle3.wiring.sglang_table import SGLANG

CONVENTIONS: tuple[Convention, ...] = (*SGLANG, *VLLM, SPECULATORS, TRANSFORMERS)
