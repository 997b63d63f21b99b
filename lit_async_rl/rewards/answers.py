"""Parser of final answers: numbers, mixed numbers, percentages, quantities with units, choices and words.

`read_answer` decides how an answer is compared: as a value, by `math-verify`, or as words. References and completions
are parsed by the same rules, so that `2 1/2` is 5/2 in both. Only the standard library is imported: grader processes
use this module, and importing torch takes seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from lit_async_rl.rewards import units

MAX_NUMBER_CHARS = 200  # longer numbers are left to `math-verify`
MAX_TEXT_CHARS = 2000  # of a completion's end, in which its last number is looked for
MAX_EXPONENT = 400  # 1e999999999 as an integer would fill the memory
SMALL_NUMBER = Fraction(1, 1000)  # below it, the six decimals compared by `math-verify` are too few

_DECIMAL = r"(?:\d{1,3}(?:(?:,|\{,\}| |_)\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_EXPONENT = r"\^?\{?-?[1-9]\}?|[²³]"
_WORD = rf"[A-Za-zµμΩ°]+(?:{_EXPONENT})?"
_UNIT = rf"{_WORD}(?:(?:\s*[/*·]\s*|\s+|-){_WORD})*"
# Units that may follow a number without a space; `5m` and `3s/t` are algebra.
_ATTACHED_UNIT = rf"(?:°[CF]?|km/h|cm/s|m/s|ft/s|kWh|mph|kHz|MHz|GHz|Hz|GB|MB|kB|km|cm|mm|kg|mg|mL|ml)(?:{_EXPONENT})?"
_QUANTITY = re.compile(
    r"(?P<sign>[-+−])?\s*(?:\\?(?P<currency>[$€£¥₹]))?\s*(?P<sign2>[-−])?"
    r"(?:(?P<whole>\d+)(?P<gap>\s+|-)(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|(?P<top>\d+)\s*/\s*(?P<bottom>\d+)"
    rf"|(?P<decimal>{_DECIMAL}))"
    rf"(?:\s*(?P<percent>\\?%|percent(?:age)?\b|pct\b)|\s*\\?(?P<behind>[$€£¥₹¢])|\s*(?P<close>{_ATTACHED_UNIT})|(?:\s+|-)(?P<unit>{_UNIT})\.?)?"
    r"(?:\s+\((?P<remark>[A-Za-z][A-Za-z -]{2,})\))?"
)
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w.,/$€£¥₹])(?:\\?(?P<currency>[$€£¥₹])\s?)?(?P<number>(?<!\d)[-−]?(?:\d+ \d+/\d+|\d+/\d+|{_DECIMAL}))"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
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
# Units that are not recognized as words: short, without a vowel, or named like a function. Single letters only if they
# are rare in algebra: `5 m` and `3 s` are quantities, `5 x` and `4 n` are not.
_ABBREVIATIONS = frozenset(
    [
        *("m", "s", "g", "h", "A", "C", "F", "J", "K", "L", "N", "V", "W", "Ω", "°", "°C", "°F"),
        *("km", "cm", "mm", "dm", "nm", "µm", "μm", "kg", "mg", "µg", "μg", "mL", "ml", "dL", "cL", "kL", "cc"),
        *("in", "ft", "yd", "yds", "mi", "lb", "lbs", "oz", "pt", "qt", "gal", "sq", "cu", "mph", "km/h", "fps"),
        *("sec", "secs", "min", "mins", "ms", "ns", "hr", "hrs", "wk", "yr", "yrs", "deg", "rad", "rpm"),
        *("Hz", "kHz", "MHz", "GHz", "Pa", "kPa", "kJ", "kW", "MW", "kWh", "mA", "mV", "kV", "kN", "eV", "cal", "mol"),
        *("B", "kB", "MB", "GB", "TB", "KB", "USD", "EUR", "GBP", "per", "of", "a", "an", "the"),
    ]
)
_VARIABLES_WITH_POWERS = frozenset("sghACFJKLNVWaB")  # `5 s^2` is algebra, `5 m^2` an area


@dataclass(frozen=True)
class Answer:
    """A parsed final answer.

    Attributes:
        math: LaTeX without the unit, to be compared as a value; None for words.
        number: value of a number, quantity or percentage, without unit and percent sign; None for anything else.
        unit: unit or currency as written, also of a formula; None without one.
        is_percentage: whether it has a percent sign: 50% equals both 50 and 1/2.
        words: normalised text, to be compared as a string; None for mathematics.
    """

    math: str | None = None
    number: Fraction | None = None
    unit: str | None = None
    is_percentage: bool = False
    words: str | None = None


def read_answer(text: str) -> Answer:
    r"""Parses a final answer, with or without `\boxed{}`."""
    text = bare_formula(text.strip())
    if (number := read_quantity(_plain(text))) is not None:
        return number
    formula, unit = _split_unit(text)
    if _is_words(formula, _plain(formula)):
        return Answer(words=normal_words(_plain(text)))
    return Answer(math=as_latex(formula), unit=unit)


def _plain(latex: str) -> str:
    """Text without LaTeX commands around words, and with single spaces."""
    text = _TEXT.sub(r" \1 ", latex) if "\\" in latex else latex
    return " ".join(text.replace("\\,", " ").replace("\\ ", " ").replace("~", " ").split())


def as_latex(text: str) -> str:
    r"""Replaces `sqrt(x)` and `pi` by LaTeX commands: `math-verify` parses `5 sqrt(x)` as 5."""
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)


def has_variables(latex: str) -> bool:
    """Whether a formula has letters outside of commands."""
    return re.search(r"[A-Za-z]", _NOT_WORDS.sub(" ", latex)) is not None


def _split_unit(text: str) -> tuple[str, str | None]:
    r"""A formula, and the unit at its end: `2 pi cm`, `3\sqrt{2} \text{ feet}`."""
    match = re.fullmatch(
        rf"(?s)(.*(?:\d|[)}}]|pi))\s*"
        rf"(?:\s({_UNIT})\.?|\\(?:text|textnormal|mathrm|mbox)\s*\{{\s*({_UNIT})\.?\s*\}}(?P<power>{_EXPONENT})?)",
        text,
    )
    if match is None or _is_words(match[1], match[1]):
        return text, None
    unit = match[2] or match[3]
    if not _is_unit(unit) or (match[2] is not None and len(unit) == 1):
        return text, None
    return match[1].strip(), unit + (match["power"] or "")


def read_as_quantity(text: str, unit: str | None) -> Answer:
    """Parses an answer given the reference's unit: the same unit may follow without a space, as in `5m`."""
    answer = read_answer(text)
    if answer.number is not None or unit is None:
        return answer
    plain = _plain(bare_formula(text.strip()))
    if not plain.endswith(unit):
        return answer
    return read_quantity(plain[: -len(unit)].strip()) or answer


def read_quantity(text: str) -> Answer | None:
    """A number with or without a unit, currency or percent sign; None if the text is anything else."""
    if len(text) > MAX_NUMBER_CHARS or (match := _QUANTITY.fullmatch(text.strip().rstrip("."))) is None:
        return None
    unit = match["unit"]
    if unit is not None and not _is_unit(unit):
        return None
    if match["remark"] is not None and not _is_unit(match["remark"]):
        return None
    if match["gap"] == "-" and unit is None and match["close"] is None:  # `2-1/2` is a difference, `2-1/2 cups` is not
        return None
    sign = -1 if (match["sign"] or match["sign2"] or "+") in "-−" else 1
    if match["decimal"] is not None:
        digits = re.sub(r",|\{,\}| |_", "", match["decimal"])
        exponent = re.split("[eE]", digits)[1:]
        if exponent and abs(int(exponent[0])) > MAX_EXPONENT:
            return None
        value = sign * Fraction(digits)
        latex = ("-" if sign < 0 else "") + format(Decimal(digits), "f")
    else:
        denominator = int(match["under"] or match["bottom"])
        if denominator == 0:
            return None
        numerator = int(match["over"] or match["top"]) + int(match["whole"] or 0) * denominator
        value = sign * Fraction(numerator, denominator)
        latex = rf"{'-' if sign < 0 else ''}\frac{{{numerator}}}{{{denominator}}}"
    if match["percent"] is not None:
        return Answer(math=latex + r"\%", number=value, is_percentage=True)
    return Answer(math=latex, number=value, unit=_priced(match["currency"] or match["behind"], unit or match["close"]))


def _priced(currency: str | None, unit: str | None) -> str | None:
    """The unit of a price: `$`, `$ per hour`; None if it is not clear what it is, as of `$5 m`."""
    if currency is None or unit is None:
        return currency or unit
    if unit.startswith(("per ", "/")):
        return f"{currency} {unit}"
    return unit if units.are_compatible(currency, unit) else None


def last_quantity(text: str, unit: str) -> Answer | None:
    """The last number of a running text, if a unit of the table stands at it, such as that of a reference does.

    Args:
        text: without a box.
        unit: of the reference.
    """
    if not units.meanings(unit):
        return None
    numbers = list(_NUMBER_IN_TEXT.finditer(text[-MAX_TEXT_CHARS:]))
    if not numbers:
        return None
    last = numbers[-1]
    following = re.match(r"[ -]?((?:[^\s,;:!?()$]+ ?){1,4})", last.string[last.end() :])
    words = following[1].split() if following else []
    for number in range(len(words), 0, -1):
        candidate = " ".join(words[:number]).rstrip(".*_")
        if units.meanings(candidate):
            return read_quantity(f"{last['number']} {candidate}")
    return read_quantity(last[0].replace(" ", "")) if last["currency"] else None


def shown_quantity(answer: Answer) -> str:
    """A number as it was read, with its unit."""
    if answer.number is None:
        return answer.math or answer.words or ""
    unit = "%" if answer.is_percentage else f" {answer.unit}" if answer.unit else ""
    return f"{answer.number}{unit}"


def _is_unit(text: str) -> bool:
    """Whether the words after a number are a unit or counted objects, not algebra or a function."""
    words = re.split(r"\s*[/*·-]\s*|\s+", text)
    bare = [re.sub(_EXPONENT, "", word) for word in words]
    if all(word in ("a", "an", "of", "per", "the") for word in bare):
        return False
    for word, whole in zip(bare, words, strict=True):
        if word in _ABBREVIATIONS and not (whole != word and word in _VARIABLES_WITH_POWERS):
            continue
        if len(word) < 3 or word.lower() in _FUNCTIONS or not re.search("(?i)[aeiouy]|[^a-z]", word):
            return False
        if set(word) <= set("xyz"):
            return False
    return True


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
    """Normalised words of an answer: in the last box, else after `answer is` or `answer:`, else on the last line."""
    boxed = final_answer(completion)
    if boxed is None:
        lines = [line for line in completion.splitlines() if line.strip()] or [""]
        announced = re.findall(r"(?i)\banswer(?: is|:)[:\s]*([^\n]+)", completion)
        boxed = announced[-1] if announced else lines[-1]
    return normal_words(_TEXT.sub(r" \1 ", bare_formula(boxed.strip())))


def is_right_in_words(reference: str, answer: str) -> bool:
    """Whether normalised words equal the reference; a choice may be followed by its text, `(B) Paris`."""
    if len(reference) == 1 and reference.isalpha():
        return (match := _CHOICE.match(answer)) is not None and match[1] == reference
    return reference == answer


def normal_words(text: str) -> str:
    """Lower case, single spaces, without markup, quotes and punctuation around it; a choice becomes its letter."""
    text = " ".join(text.replace("\\", " ").replace("**", " ").replace("$", " ").split()).casefold()
    text = re.sub(r"(?<=\d)(?::00)?\s*([ap])\.?\s?m\b\.?", r" \1m", text)  # 9:00 a.m. becomes 9 am
    text = text.strip(" .,;:!?\"'`*_")
    choice = re.fullmatch(r"\(?([a-z])\)?[.:]?", text)
    return choice[1] if choice else text


def mixed_numbers_as_fractions(text: str) -> str:
    """Replaces mixed numbers (`2 1/2`) by fractions; text with formulas in `$` is returned unchanged."""
    if "$" in text:
        return text

    def fraction(match: re.Match[str]) -> str:
        whole, numerator, denominator = (int(part) for part in match.groups())
        return rf"$\frac{{{whole * denominator + numerator}}}{{{denominator}}}$"

    return re.sub(r"(?<![\w.,/^])(\d{1,9}) (\d{1,4})/([1-9]\d{0,3})(?![\w/])", fraction, text)


def bare_formula(text: str) -> str:
    """Text without a box, and without the delimiters of a formula that spans the whole text."""
    if (boxed := final_answer(text)) is not None:
        text = boxed.strip()
    for begin, end in (("\\[", "\\]"), ("\\(", "\\)"), ("$$", "$$"), ("$", "$")):
        inner = text[len(begin) : -len(end)]
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin + end) and begin not in inner:
            return inner.strip()
    return text


def _is_words(text: str, plain: str) -> bool:
    """Whether an answer must be compared as text: a choice, a word, a sentence, or a time in hours and minutes."""
    if re.fullmatch(r"\(?[A-Z]\)?[.:]?|[A-Z]\)", plain):
        return True
    if len(_TEXT.findall(text)) == 1 and re.search(r"\d", _TEXT.sub("", text)):
        plain = _TEXT.sub(" ", text)  # the unit of a formula
    if re.search(r"(?i)\d\s*[ap]\.?\s?m\.?$", plain):
        return True
    words = re.findall(r"[^\W\d_]+", _NOT_WORDS.sub(" ", plain))
    has_digits = re.search(r"\d", plain) is not None
    return any(_is_word(word, has_digits) for word in words if word.lower() not in _FUNCTIONS)


def _is_word(letters: str, has_digits: bool) -> bool:
    """Whether letters are a word instead of a product of variables, such as `xy`."""
    if len(letters) == 2:  # `7 ab` is algebra; `no` and `Au` are words
        return not has_digits and (letters == "no" or letters[0].isupper())
    return len(letters) > 2 and re.search("(?i)[aeiou]|[^a-z]", letters) is not None
