"""Pages of `lit-async-rl train --help`: commonly changed settings, all settings, or one with its choices.

The first page needs no class: defaults come from `settings.json`. The others make the parser, which takes seconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from lit_async_rl.cli.settings import all_settings
from lit_async_rl.utils.checks import meant

WIDEST = 100  # columns; longer lines are hard to read
OFTEN_CHANGED = {
    "model.model": "name or folder of a Hugging Face model",
    "model.learning_rate": "peak of the schedule; unset: 1e-6",
    "model.lora": "LoRA trains adapters, not all weights",
    "data.prompts": "JsonlPrompts, HuggingFacePrompts ...",
    "data.reward": "dotted path of reward(prompt, completion)",
    "data.validation.prompts": "held-out prompts, for val/pass@1",
    "data.engine": "what samples; unset: EmbeddedEngine",
    "data.sampling.max_tokens": "longest completion",
    "data.groups_per_step": "prompts of an optimizer step",
    "data.group_size": "completions of a prompt",
    "data.max_staleness": "oldest data, in versions; 0: synchronous",
    "trainer.max_steps": "optimizer steps; -1: no limit",
    "trainer.devices": "how many GPUs or CPU processes",
    "seed_everything": "of all random numbers",
    "ckpt_path": "checkpoint to resume from",
}
MORE = {
    "--help all": "all settings",
    "--help data.engine": "one setting, and the classes that it can be",
    "--data.engine.help VLLMEngine": "arguments of a class",
    "--print_config": "all settings with their values, as a file",
}
USAGE = "usage: lit-async-rl train --config FILE ... [--SETTING VALUE ...]"
EXAMPLE = "lit-async-rl train --config configs/smollm2.yaml --data.group_size 4"


def asked_for(words: Sequence[str]) -> str | None:
    """The page that a command line asks for: a setting, `all`, or empty for the first; None for no page."""
    for word, following in pairwise([*words, ""]):
        if word in ("-h", "--help"):
            return following.removeprefix("--") if following != "-h" else ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def show(topic: str, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Prints the page of a topic.

    Args:
        topic: a setting, a group of settings, `all`, or empty for the first page.
        make_parser: called for all but the first page.

    Raises:
        SystemExit: there is no such setting.
    """
    width = min(WIDEST, shutil.get_terminal_size().columns)
    known = ["all", *all_settings()]
    groups = {name.rpartition(".")[0] for name in all_settings()} - {""}
    if not topic:
        print("\n".join(first_page()))
    elif topic in known or topic in groups:
        print("\n".join(pages(make_parser(), topic, width)))
    else:
        sys.exit(f"error: there is no setting {topic}{meant(topic, [*known, *groups])}")


def first_page() -> Iterator[str]:
    """The settings that are changed most often, with defaults, within 80 columns."""
    yield USAGE
    yield ""
    yield "What is changed most often, with defaults; a file can hold all of it, too:"
    yield ""
    for name, text in OFTEN_CHANGED.items():
        default = all_settings()[name]["default"]
        yield f"  --{name:26} {'' if default is None else _shown(default):5} {text}"
    yield ""
    for name, text in MORE.items():
        yield f"  {name:34} {text}"
    yield ""
    yield f"example: {EXAMPLE}"


def pages(parser: argparse.ArgumentParser, topic: str, width: int) -> Iterator[str]:
    """Settings of a parser: name, default and meaning; for a single one, also its choices.

    Args:
        parser: of the command.
        topic: a setting, the beginning of several, or `all`.
        width: columns.
    """
    from lit_async_rl.cli.settings import setting_actions

    section = ""
    for action in setting_actions(parser):
        if topic != "all" and action.dest != topic and not action.dest.startswith(f"{topic}."):
            continue
        if section != (section := action.dest.partition(".")[0]) and topic == "all":
            yield ""
        default = all_settings().get(action.dest, {}).get("default")
        head = f"--{action.dest}" + ("" if default is None else f"  (default: {_shown(default)})")
        yield from textwrap.wrap(head, width, subsequent_indent="    ", break_on_hyphens=False)
        yield from _wrapped(plain_text(action.help or ""), width)
        if action.dest == topic:
            yield from _classes(action, width)


def _classes(action: argparse.Action, width: int) -> Iterator[str]:
    """Choices of a setting: values, or classes with the first sentence of their docstrings."""
    import lit_async_rl

    names = all_settings()[action.dest].get("choices", [])
    if not names:
        return
    public = [name for name in names if name in lit_async_rl.NAMES]
    others = [name for name in names if name not in public]
    yield ""
    if others:
        yield from _wrapped(f"one of {', '.join(others)}", width)
    for name in public:
        yield f"  {name}"
        yield from _wrapped(first_sentence(getattr(lit_async_rl, name)), width, indent=6)
    if public:
        yield ""
        yield f"arguments of one: --{action.dest}.help {public[0]}"


def first_sentence(found: Any) -> str:
    """The first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.;:])\s(?=[A-Z])", text)[0]


def plain_text(text: str) -> str:
    """Help of an argument without Lightning's markup and the default, which stands beside the name."""
    text = re.sub(r"\s*Default: ``?[^`]*``?\.?", "", " ".join(text.split()))
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "`")
    return "" if text == "null: without it" else text


def _shown(default: Any) -> str:
    return default if isinstance(default, str) else json.dumps(default)


def _wrapped(text: str, width: int, indent: int = 4) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    )
