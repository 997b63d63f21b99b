"""README: what it is, for whom, and the first command on the first screen; a measurement for every number."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from markdown_blocks import ADDRESS, FENCE, ROOT, with_inline_links

sys.path.insert(0, str(ROOT / "docs"))
import word_counts

SOURCE_TEXT = (ROOT / "README.md").read_text()
TEXT = with_inline_links(SOURCE_TEXT)
MAX_WORDS = 1300
MAX_COLUMNS = 80
FIRST_LINES = 40
WORDS = r"twice|half|two|three|four|five|six|seven|eight|nine|ten|twenty"
NUMBER = re.compile(rf"(?<![\w.:/-])\d|\b(?:{WORDS})\b (?:times|minutes|seconds|per cent|optimizer steps)", re.I)
NO_RESULTS = (  # of this project: names, settings and requirements
    *(
        r"Python 3\.\d+",
        r"Apache License 2\.0",
        r"\d{4}-\d\d-\d\d",
        r"\[[0-9a-f]{7}\]",
        r"arXiv:[\d.]+",
        r"success_reward",
        r"WSL 2",
        r"version 0\.1\.0",
        r"more than 7 billion parameters",
    ),
    *(r"every 50 steps", r"half a minute", r"`[^`]*`", r"\]\([^)]*\)", r"temperature 1\b", r"95 % intervals"),
)
SOURCE = re.compile(r"\]\(docs/(?:measurements/\w+\.json|results\.md)\)")
CITED = re.compile(r"\]\((docs/(?:measurements/\w+\.json|results\.md))\)")
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
EXPLAINED = {  # a word of the field, and what has to stand before it or beside it
    "recipe": "the quick start and `rl.fit` do by default",
    "redundant": "the slowest are aborted",
    "admission": "only if training can use it in time",
}


def sentences() -> list[str]:
    """Sentences of the text, captions and list items; without code, tables, headings and comments."""
    prose = re.sub(r"<!--.*?-->", "", FENCE.sub("\n\n", TEXT), flags=re.S)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "!["))]
    paragraphs = re.split(r"\n\s*\n|\n(?=\* )", "\n".join(lines))
    found = []
    for paragraph in paragraphs:
        found += re.split(r"(?<=[.!?])\*{0,2}\s+(?=[A-Z`\[*])", " ".join(paragraph.split()))
    return [sentence for sentence in found if sentence]


def without_names(sentence: str) -> str:
    """A sentence without its numbers that are no results."""
    for pattern in NO_RESULTS:
        sentence = re.sub(pattern, " ", sentence)
    return sentence


def test_every_sentence_with_a_number_names_its_measurement():
    numbered = [sentence for sentence in sentences() if NUMBER.search(without_names(sentence))]
    assert len(numbered) >= 8
    assert not [sentence for sentence in numbered if not SOURCE.search(sentence)]


def test_the_decimals_of_a_sentence_are_in_the_measurement_that_it_names():
    num_found = 0
    for sentence in sentences():
        told = DECIMAL.findall(without_names(sentence))
        sources = CITED.findall(sentence)
        known = [float(value) for source in sources for value in DECIMAL.findall((ROOT / source).read_text())]
        for value in told if sources else ():
            num_found += 1
            half_a_digit = 0.501 * 10.0 ** -len(value.partition(".")[2])
            assert any(abs(float(value) - one) <= half_a_digit for one in known), (value, sentence)
    assert num_found >= 15


def items() -> list[str]:
    """List items, paragraphs and captions of the text, each in one line: what a reader sees at once."""
    prose = FENCE.sub("\n\n", TEXT)
    blocks = re.split(r"\n\s*\n|\n(?=\* )", prose)
    return [" ".join(block.split()) for block in blocks]


def partners(name: str) -> list[dict[str, Any]]:
    """The comparisons of a measurement: what was compared with what, and how it came out."""
    found: list[dict[str, Any]] = json.loads((ROOT / name).read_text()).get("comparisons", [])
    return found


def is_told(one: dict[str, Any], value: str, item: str) -> bool:
    """Whether a number is that of a comparison, and the text around it names what trains on both of its sides."""
    half_a_digit = 0.501 * 10.0 ** -len(value.partition(".")[2])
    if abs(float(value) - one["value"]) > half_a_digit:
        return False
    sides = (one["system"], one["against"])
    trained = [side["trains"].partition(",")[0] for side in sides]
    spared = ["redundant" in side["name"] for side in sides]
    on_both = {algorithm for algorithm in trained if trained == [algorithm] * 2}
    return (
        all(algorithm in item for algorithm in trained)
        and all(f"{algorithm} in both runs" in item for algorithm in on_both)
        and ("both the synchronous and the asynchronous runs sample spare prompts" in " ".join(item.split())) == all(spared)
        and ("spare prompts" in item or not any(spared))
        and (
            sides[1]["name"].startswith("recipe, sync") or sides[1]["name"].startswith(("synchronous", "plain GRPO, s"))
        )
    )


def test_every_speed_up_is_that_of_two_systems_which_the_text_around_it_names():
    """It said "the same loop run synchronously" of another algorithm, at another rate, with half of the steps."""
    num_found = 0
    for item in items():
        compared = [one for source in set(CITED.findall(item)) if source.endswith("json") for one in partners(source)]
        if not compared:
            continue
        delays = {word for one in compared for word in DECIMAL.findall(one["workload"])}
        delays |= set(re.findall(r"\d\.\d(?= million parameters)", item))
        for value in DECIMAL.findall(without_names(item)):
            if value not in delays:
                num_found += 1
                assert any(is_told(one, value, item) for one in compared), (value, item)
    assert num_found >= 12


def test_the_decimals_of_the_quick_starts_table_are_those_of_its_measurement():
    (block,) = [one["code"] for one in FENCE.finditer(TEXT) if "run summary" in one["code"]]
    told = DECIMAL.findall(block)
    known = (ROOT / "docs/measurements/first_hour.json").read_text()
    assert len(told) >= 4
    assert not [value for value in told if value not in DECIMAL.findall(known)]


def test_a_share_of_the_gain_names_its_policy():
    shares = [item for item in items() if re.search(r"\bkeeps 0\.\d", item)]
    assert shares
    assert not [item for item in shares if not re.search(r"\d (?:thousand|million) parameters|SmolLM2", item)]


@pytest.mark.parametrize(
    "said",
    [
        "asynchronous VCPO is 3.0 times as fast",
        "3.0 times as fast as the same loop run synchronously, PPO-clip GRPO",
        "VCPO is 3.1 times as fast as PPO-clip GRPO",
        "both the synchronous and the asynchronous runs sample spare prompts: VCPO is 3.0 times as fast as PPO-clip GRPO",
    ],
    ids=["no partner", "no algorithm", "another value", "other conditions"],
)
def test_a_speed_up_without_its_partner_is_found(said):
    (one,) = [
        one
        for one in partners("docs/measurements/time_to_accuracy_smollm2.json")
        if one["share"] == 0.95 and one["system"]["name"] == "recipe, `max_staleness` 8"
    ]
    assert is_told(one, "3.0", "asynchronous VCPO is 3.0 times as fast as synchronous PPO-clip GRPO")
    (value,) = DECIMAL.findall(said)
    assert not is_told(one, value, said)


def test_the_first_screen_says_what_it_is_for_whom_and_the_first_command():
    first = "\n".join(TEXT.splitlines()[:FIRST_LINES])
    sentence = re.findall(r"^\*\*lit-async-rl .+?\*\*", first, re.M | re.S)[0]
    assert re.search(r"\bGRPO\b", sentence)
    assert re.search(r"\bPyTorch Lightning\b", sentence)
    assert "**lit-async-rl is for people who**" in first
    assert "**Use another trainer**" in first
    assert "*version*" in first and "*staleness*" in first, "the two words that everything else rests on"
    commands = [line for block in FENCE.finditer(first + "\n") for line in block["code"].splitlines()]
    assert commands[0].startswith("git clone https://github.com/")
    assert commands[1].startswith("make quickstart")
    assert any("gsm8k" in command for command in commands), "a command for a GPU"
    assert "pip install" in first


def test_the_text_is_short_and_fits_a_terminal():
    """Tables, pictures, addresses and code that is quoted may be wider."""
    assert word_counts.num_words(SOURCE_TEXT) <= MAX_WORDS
    prose = ADDRESS.sub("", FENCE.sub("", SOURCE_TEXT)).splitlines()
    assert not [line for line in prose if len(line) > MAX_COLUMNS and not line.startswith(("|", "!["))]


def test_words_are_counted_without_code_addresses_and_bars():
    page = "# One\n\n| two | `three` |\n|---|---|\n\n```python\nno = 1\n```\n\n[four][a] <!-- no -->[five](b.md).\n\n[a]: c.md\n"
    assert word_counts.num_words(page) == 5


def test_lines_of_code_are_counted_without_blank_lines_comments_and_docstrings():
    code = '"""One.\n\nMore."""\n\n# no\ndef f():  # yes\n    """One."""\n    return """\n# text\n\n"""\n\nf(\n    # no\n)\n'
    assert word_counts.lines_of_code(code) == 6


@pytest.mark.slow
def test_the_size_of_the_package_has_the_names_of_its_longest_parts():
    size = word_counts.size_of_package()
    files, lines, of_file, of_function = size.values()
    assert of_function < of_file < lines
    assert files < lines
    assert sum("lit_async_rl/" in name for name in size) == 2


def test_words_of_the_field_are_explained_before_they_are_used():
    prose = " ".join(FENCE.sub("", TEXT).split())
    for word, explanation in EXPLAINED.items():
        used = re.search(rf"(?<![\w#/])\b{word}", re.sub(r"\]\([^)]*\)|`[^`]*`", lambda m: "_" * len(m[0]), prose))
        assert used is None or prose.index(explanation) <= used.start() + len(explanation) + 20, word
