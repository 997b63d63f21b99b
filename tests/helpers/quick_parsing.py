"""Makes jsonargparse remember what it finds in source code: a quarter of the processor time of a command line.

For each value whose type is a protocol it parses the source of whole modules, several times in each command. Neither
changes while tests run. A real process forgets nothing before its end, either: what a command says is the same.
"""

from __future__ import annotations

import ast
import functools
import logging

from jsonargparse import _postponed_annotations, _typehints

VISITOR = _postponed_annotations.TypeCheckingVisitor


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _update_aliases(
    visitor: VISITOR, module_source: str, module: str, aliases: dict, logger: logging.Logger | None = None
) -> None:
    """As jsonargparse has it, with a tree that is parsed once."""
    visitor.module = module
    visitor.aliases = aliases
    visitor.logger = logger
    visitor.visit(_tree(module_source))


def remember() -> None:
    """Changes jsonargparse in this process."""
    VISITOR.update_aliases = _update_aliases
    _typehints.implements_protocol = functools.cache(_typehints.implements_protocol)
