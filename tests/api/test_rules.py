"""The table of rules: each group is named at its head, and something of a run asks it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lit_async_rl import rules

PACKAGE = Path(rules.__file__).parent
CALLBACKS = (PACKAGE / "callbacks").resolve()  # a link, which `rglob` does not follow
GROUPS = sorted(name for name, _ in inspect.getmembers(rules, inspect.isfunction) if name.startswith("of_"))


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_named_in_the_table_and_asked(group):
    assert f"`{group}`" in rules.__doc__
    files = [path for folder in (PACKAGE, CALLBACKS) for path in folder.rglob("*.py")]
    assert any(re.search(rf"(rules\.| from ){group}\(", path.read_text()) for path in files), "nothing asks it"


def test_the_table_names_nothing_else():
    assert set(re.findall(r"`(of_\w+)`", rules.__doc__)) == set(GROUPS)


def test_the_first_sentence_is_raised_and_later_rules_are_not_asked():
    def broken():
        yield "a=1 with b=2"
        pytest.fail("asked")

    rules.refuse([], [])
    with pytest.raises(ValueError, match=r"^a=1 with b=2$"):
        rules.refuse([], broken())
