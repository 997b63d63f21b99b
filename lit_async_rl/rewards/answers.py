"""Final answers as people and data sets write them: numbers, mixed numbers, percentages, units, choices and words.

`read_answer` decides which of two comparisons an answer needs: of values, by `math-verify`, or of words. Both sides are
read by the same rules, so that `2 1/2` is 5/2 in a reference and in a completion. Imports only the standard library,
because graders' processes need it and not the seconds of torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_LENGTH = 200  # characters of a number; longer ones are left to the library
MAX_EXPONENT = 400
SMALL = Fraction(1, 1000)  # the library compares six digits after the point, which are few below this

_DECIMAL = r"(?:\d{1,3}(?:(?:,|\{,\}| |_)\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_WORD = r"(?:[A-Za-zµμΩ°€£²³]+\.?(?:\^?\{?-?[1-9]\}?)?)"
_UNIT = rf"{_WORD}(?:\s*[\s/*·-]\s*{_WORD})*"
_QUANTITY = re.compile(
    r"(?P<sign>[-+−])?\s*(?:\\?[$€£])?\s*(?P<sign2>[-−])?"
    rf"(?:(?P<whole>\d+)(?:\s+|-)(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<top>\d+)\s*/\s*(?P<bottom>\d+)"
    rf"|(?P<decimal>{_DECIMAL}))"
    rf"(?:\s*(?P<percent>\\?%|percent\b)|\s*\\?[$€£]|\s+(?P<unit>{_UNIT})|(?P<close>°[CF]?|[a-zµμΩ]{{1,3}}/[a-z]{{1,3}}|"
    rf"(?:[kcmµμ]?m|[kmµμ]?g|ml|mL|kWh|km/h|mph|Hz|kHz|MHz|GHz|GB|MB|kB)(?:\^?[23²³])?))?"
    r"\s*(?:\([^()\d]*\))?"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_NOT_WORDS = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\(?:mathbb|mathcal|operatorname)\s*\{\w+\}|\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    [
        "and",
        "or",
        "sqrt",
        "cbrt",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
        "pi",
        "inf",
        "infty",
        "infinity",
        "oo",
        "union",
        "frac",
        "max",
        "min",
        "gcd",
        "lcm",
        "mod",
        "abs",
        "deg",
        "alpha",
        "beta",
        "theta",
        "in",
        "e",
        "i",
    ]
)
_CHOICE = re.compile(r"\(?([A-Za-z])\)?(?=[.):,\s]|$)")
_ALGEBRA = frozenset("xyzabcnkptrqijuvw")  # letters that multiply a number, where `5 m` and `3 s` are quantities


@dataclass(frozen=True)
class Answer:
    """A final answer, read.

    Attributes:
        math: its LaTeX, to be compared as a value; None for words.
        number: of a number, quantity or percentage, whose unit or percent sign is left out; None for anything else.
        is_percentage: it has a percent sign: 50% is 50 and 1/2.
        words: normalised text, to be compared as it is; None for mathematics.
    """

    math: str | None = None
    number: Fraction | None = None
    is_percentage: bool = False
    words: str | None = None


def read_answer(text: str) -> Answer:
    r"""Reads the text of a final answer, without `\boxed{}`."""
    text = bare_formula(text.strip())
    plain = _TEXT.sub(r" \1 ", text) if "\\" in text else text
    plain = " ".join(plain.replace("\\,", " ").replace("\\ ", " ").replace("~", " ").split())
    if (number := read_quantity(plain)) is not None:
        return number
    if _is_words(text, plain):
        return Answer(words=normal_words(plain))
    return Answer(math=text)


def read_quantity(text: str) -> Answer | None:
    """A number with or without a unit, currency or percent sign; None if the text is anything else."""
    if len(text) > MAX_LENGTH or (found := _QUANTITY.fullmatch(text.strip().rstrip("."))) is None:
        return None
    unit = found["unit"]
    if unit is not None and len(unit) == 1 and unit in _ALGEBRA:
        return None
    if unit is not None and set(unit.lower().split()) & {"and", "or", "to", "x"}:
        return None
    sign = -1 if (found["sign"] or found["sign2"] or "+") in "-−" else 1
    if found["decimal"] is not None:
        digits = re.sub(r",|\{,\}| |_", "", found["decimal"])
        exponent = re.split("[eE]", digits)[1:]
        if exponent and abs(int(exponent[0])) > MAX_EXPONENT:
            return None
        value = sign * Fraction(digits)
        latex = ("-" if sign < 0 else "") + format(Decimal(digits), "f")
    else:
        under = int(found["under"] or found["bottom"])
        if under == 0:
            return None
        over = int(found["over"] or found["top"]) + int(found["whole"] or 0) * under
        value = sign * Fraction(over, under)
        latex = rf"{'-' if sign < 0 else ''}\frac{{{over}}}{{{under}}}"
    if found["percent"] is not None:
        return Answer(math=latex + r"\%", number=value, is_percentage=True)
    return Answer(math=latex, number=value)


def final_answer(completion: str) -> str | None:
    r"""Content of the last `\boxed{}` of a completion; None without one."""
    begin = completion.rfind("\\boxed{")
    if begin < 0:
        return None
    depth = 0
    for n in range(begin + len("\\boxed"), len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[n], 0)
        if depth == 0:
            return completion[begin + len("\\boxed{") : n]
    return None


def final_words(completion: str) -> str:
    """Normalised words of a completion's answer: of the last box, after `answer is` or `answer:`, or its last line."""
    boxed = final_answer(completion)
    if boxed is None:
        lines = [line for line in completion.splitlines() if line.strip()] or [""]
        announced = re.findall(r"(?i)\banswer(?: is|:)[:\s]*([^\n]+)", completion)
        boxed = announced[-1] if announced else lines[-1]
    return normal_words(_TEXT.sub(r" \1 ", bare_formula(boxed.strip())))


def is_right_in_words(reference: str, answer: str) -> bool:
    """Whether normalised words are the reference; a choice may be followed by its text, `(B) Paris`."""
    if len(reference) == 1 and reference.isalpha():
        return (found := _CHOICE.match(answer)) is not None and found[1] == reference
    return reference == answer


def normal_words(text: str) -> str:
    """Lower case, single spaces, without markup, quotes and punctuation around it; of a choice its letter alone."""
    text = " ".join(text.replace("\\", " ").replace("**", " ").replace("$", " ").split()).casefold()
    text = text.strip(" .,;:!?\"'`*_")
    choice = re.fullmatch(r"\(?([a-z])\)?[.:]?", text)
    return choice[1] if choice else text


def improper(text: str) -> str:
    """Text in which mixed numbers (`2 1/2`) are fractions; with formulas in `$`, as it is."""
    if "$" in text:
        return text

    def fraction(found: re.Match[str]) -> str:
        whole, over, under = (int(part) for part in found.groups())
        return rf"$\frac{{{whole * under + over}}}{{{under}}}$"

    return re.sub(r"(?<![\w.,/^])(\d{1,9}) (\d{1,4})/([1-9]\d{0,3})(?![\w/])", fraction, text)


def bare_formula(text: str) -> str:
    """Text without a box, and without the delimiters of a formula that is the whole text."""
    if (boxed := final_answer(text)) is not None:
        text = boxed.strip()
    for begin, end in (("\\[", "\\]"), ("\\(", "\\)"), ("$$", "$$"), ("$", "$")):
        inner = text[len(begin) : -len(end)]
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin + end) and begin not in inner:
            return inner.strip()
    return text


def _is_words(text: str, plain: str) -> bool:
    """Whether an answer is to be compared as text: a choice, a word, a sentence, a time in hours and minutes."""
    if re.fullmatch(r"\(?[A-Z]\)?[.:]?|[A-Z]\)", plain):
        return True
    if len(_TEXT.findall(text)) == 1 and re.search(r"\d", _TEXT.sub("", text)):
        plain = _TEXT.sub(" ", text)  # the unit of a formula
    words = re.findall(r"[^\W\d_]+", _NOT_WORDS.sub(" ", plain))
    return any(
        len(word) > 1 and word.lower() not in _FUNCTIONS and re.search("(?i)[aeiou]|[^a-z]", word) for word in words
    )
