"""A chat template compiled to run faster, with the same text as Transformers' own.

Its sandbox does not look into a loop's counters each time. Its `{% generation %}` blocks are no calls: each writes a
mark before and after itself, where it is asked for them, and nothing else.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = (f"\0{kind} {secrets.token_hex(16)}\0" for kind in ("begin", "end"))
"""The marks of a generation block, which no conversation can hold."""
_OF_LOOPS = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length", "depth", "depth0"))
"""Numbers and truth values; what else a loop has may be a conversation's own, and goes through the sandbox."""

_KEEPERS = (nodes.AssignBlock, nodes.Block, nodes.CallBlock, nodes.FilterBlock, nodes.Macro)


class _QuickLoops(ImmutableSandboxedEnvironment):
    """The sandbox, which looks long into whether a loop's public attributes are safe: of these it always says so."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute in _OF_LOOPS and type(obj) is LoopContext:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _PlainBlocks(Extension):
    """Generation blocks as no more than a scope."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's)
    priority = 1000  # Jinja asks the last one that knows a tag, and Transformers' knows it too

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return self._around(nodes.Scope(body, lineno=line), line)

    def _around(self, body: nodes.Node, line: int) -> list[nodes.Node]:
        return [body]


class _MarkedBlocks(_PlainBlocks):
    """Generation blocks between marks."""

    def _around(self, body: nodes.Node, line: int) -> list[nodes.Node]:
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, body, end]


@lru_cache(maxsize=16)
def quick(compiled: jinja2.Template, template: str, marked: bool) -> jinja2.Template | None:
    """The same template; None if it was compiled for another sandbox than Transformers', or cannot be marked.

    Args:
        compiled: by Transformers.
        template: its text.
        marked: whether generation blocks write `BEGIN` and `END`.
    """
    environment = compiled.environment
    if type(environment) is not ImmutableSandboxedEnvironment:
        return None
    found = object.__new__(_QuickLoops)
    found.__dict__.update(environment.__dict__)
    blocks = (_MarkedBlocks if marked else _PlainBlocks)(found)
    found.extensions = {**environment.extensions, blocks.identifier: blocks}
    return None if marked and _keeps_a_mark(found.parse(template)) else found.from_string(template)


def _keeps_a_mark(template: nodes.Template) -> bool:
    """Whether the text of a block may be changed, measured or left out before it is written."""
    keepers: list[nodes.Node] = [
        *template.find_all(_KEEPERS),
        *(loop for loop in template.find_all(nodes.For) if loop.recursive),
    ]
    return any(data.data == BEGIN for keeper in keepers for data in keeper.find_all(nodes.TemplateData))


def without_marks(pieces: list[str]) -> tuple[str, list[tuple[int, int]]] | None:
    """The text of what a marked template wrote, and which of its characters are in blocks.

    None if a mark is within a piece, as it would be if a template kept a block's text to write it later.
    """
    written: list[str] = []
    blocks: list[tuple[int, int]] = []
    opened: list[int] = []
    length = 0
    for piece in pieces:
        if piece == BEGIN:
            opened.append(length)
        elif piece == END:
            blocks.append((opened.pop(), length))
        else:
            written.append(piece)
            length += len(piece)
    text = "".join(written)
    return None if BEGIN in text or END in text else (text, blocks)
