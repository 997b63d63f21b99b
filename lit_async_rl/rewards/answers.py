"""Parser of final answers: numbers, mixed numbers, percentages, quantities with units, choices and words.

`read_answer` decides how an answer is compared: as a value, by `math-verify`, or as words. The same rules hold for
references and completions, so that `2 1/2` is 5/2 in both. Imports the standard library only, because grader processes
use this module, and importing torch takes seconds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
_CURRENCY = r"(?:\\?[$€£¥₹]|\b(?:USD|EUR|GBP)\b|\bRs\b\.?)"
_SCALES = {
    **{"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"k": 1000, "K": 1000, "M": 10**6, "mn": 10**6, "B": 10**9, "bn": 10**9, "T": 10**12, "tn": 10**12},
}
SCALE = r"(?i:hundred|thousand|million|billion|trillion|dozen)s?\b"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+−])?\s*(?P<currency>{_CURRENCY})?\s*(?P<sign2>[-−])?"
    r"(?:(?P<whole>\d+)(?P<gap>\s+|-)(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|(?P<top>\d+)\s*/\s*(?P<bottom>\d+)"
    rf"|(?P<decimal>{_DECIMAL}))"
    rf"(?P<scale>(?:[\s-]*{SCALE})+|\s*(?(currency)(?:[kKMBT]|[mbt]n)|k)(?![\w/*·^]))?"
    rf"(?:\s*(?P<percent>\\?%|percent(?:age)?\b|pct\b)|\s*\\?(?P<behind>[$€£¥₹¢])(?P<rate>\s*(?:/|per\b).+)?"
    rf"|\s*(?P<close>{_ATTACHED_UNIT})|\s*(?P<share>/\s*{_UNIT})|(?:\s+|-)(?P<unit>{_UNIT})\.?)?"
    r"(?:\s+\((?P<remark>[A-Za-z][A-Za-z -]{2,})\))?"
)
_NEXT_PART = re.compile(r"(?<=[A-Za-z.]) *(?:, *and|,|\band\b)? +(?=\d)")  # of 2 hours and 30 minutes
_FEET = re.compile(r"(?<![\w°'.])(\d+)\s*'\s*(\d+(?:\.\d+|\s+\d+/\d+)?)\s*(?:\"|'')(?!\w)")
_POWER_OF_TEN = re.compile(
    rf"(?<![\w.^}}])(?:(?P<times>{_DECIMAL})\s*(?:\\times|\\cdot|[×·⋅*x])\s*)?10\s*\^\s*\{{?\s*(?P<power>[-+]?\d+)\s*\}}?(?!\w)"
)
_SHORT_FRACTION = re.compile(r"(\d?)\s*\\[cdt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_VULGAR_FRACTION = re.compile(r"(?:(\d)\s*)?([¼-¾⅐-⅞])")
_REPEATING = re.compile(  # with limits, since it is looked for in the whole of a completion
    r"(?<![\w.])(\d{0,40})\.(\d{0,40}?)(?:\\(?:overline|bar|dot)\s?\{?(\d{1,40})\}?|\((\d{1,40})\)(?!\s*[=*/+^(\d])"
    r"|(\d)\5{2,40}\s?(?:\.\.\.|…|\\[dl]?dots))"
)
_SUPERSCRIPT = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")
_SYMBOLS = {
    **{"\\pounds": "£", "\\textsterling": "£", "\\euro": "€", "\\texteuro": "€", "\\yen": "¥"},
    **{"−": "-", "′": "'", "″": '"'},
}
_NUMBER_IN_TEXT = re.compile(rf"(?:{_CURRENCY}\s?)?(?<![\w.,])(?:\d+ \d+/\d+|\d+/\d+|{_DECIMAL})")
_SIGN = re.compile(r"(?:(?:^|(?<=[\s(=\[{:,$]))-|(?:(?<=\bis)|(?<=\bwas)|(?<=[=:]))\s+-\s+)$")
# A number beside an operator, a letter or a brace is a part of a formula.
_FORMULA_BEFORE = re.compile(r"(?:[\^_*+×·÷/<>≤≥{]|[\d)}]\s*-|\b[A-Za-z]\s*-|[\w)]\(|\\(?!approx)[a-z]+)\s*$")
_FORMULA_BEHIND = re.compile(r"[A-Za-z(_]|,\d|\s*(?:[{*^+×·÷/<>≤≥!\\]|-\s*\d)|\s[B-HJ-Zb-z]\b")
_ANNOUNCED = re.compile(r"(?i)\banswer(?:\s+is|\s*:)(?:\s*:)?(?:\s+(?:about|approximately|thus))?\s*|####\s*")
_TAG = re.compile(r"(?i)<answer>")
_END_OF_TAG = re.compile(r"(?i)</answer>")
_NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")  # not behind `!`, which may be a factorial
_MINUS_IN_WORDS = re.compile(
    r"(?i)(?:(?P<operand>[\d)}%]|\b[a-z])\s+minus\s+|(?<![\w\\-])(?<!or )(?:minus|negative)\s+)"
    r"(?=(?:\\?[$€£¥₹]\s?)?\.?\d)"
)
_END_OF_ANSWER = re.compile(r"\n|[;(]|[.!?](?:\s|$)|,\s|\b(?:because|since|as|for|when|if|where|which)\b")
_MATH_IN_TEXT = re.compile(r"(?<![\\\w])\$(?! )([^$\n]{1,80}?)(?<! )\$(?![\d$])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_NOT_WORDS = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\(?:mathbb|mathcal|operatorname)\s*\{\w+\}|\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    [
        *("and", "or", "sqrt", "cbrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh"),
        *("cosh", "tanh", "log", "ln", "exp", "pi", "inf", "infty", "infinity", "oo", "union", "frac", "max", "min"),
        *("gcd", "lcm", "mod", "abs", "deg", "alpha", "beta", "theta", "in", "e", "i"),
    ]
)
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_CHOICE_WITH_TEXT = re.compile(
    r"(?:\(([A-Za-z])\)|([A-Za-z])(?:[).:](?=\s)|(?=\s+[\d$\\])))(?!\s*(?:and|or|,|&|/)(?!\w))"
)
_LETTER = r"(?<![\w'’-])\(?([A-Z])\)?(?![\w'’-])"
_JOINED = rf"(?:\s*(?:,|/|&|\band\b|\bor\b|\bnor\b)\s*)+{_LETTER}"
_ANNOUNCED_CHOICE = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s+(?:is|would be|should be|must be|option|choice))*\s*:?)\s*"
    rf"(?<![\w'’-])\(?([A-Z]|[a-z](?=\)|[.,;:]?\s*(?:\n|$)))\)?(?![\w'’-])({_JOINED})?"
)
_LAST_CHOICE = re.compile(
    rf"(?<!not )(?<!n't )(?<!than ){_LETTER}(?!(?<=[AI])\s+(?!(?:is|because|since|as|and|or|nor)\b)[a-z])"
    rf"(?!\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)({_JOINED})?"
)
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
    text = normal_form(bare_formula(text.strip()))
    if (number := read_quantity(_plain(text))) is not None:
        return number
    formula, unit = _split_unit(text)
    if _is_words(formula, _plain(formula)):
        return Answer(words=normal_words(_plain(text)))
    return Answer(math=as_latex(formula), unit=unit)


def normal_form(text: str) -> str:
    r"""Text with one spelling of signs and numbers: `–7` and `minus 7` as -7, `2¾` as 2 3/4, `.\overline{3}` as 1/3."""
    for symbol, usual in _SYMBOLS.items():
        text = text.replace(symbol, usual)
    text = re.sub(r"(?:^|(?<=[\s=({\[<>,:$]))–(?=\s?\.?\d)", "-", text)
    text = _MINUS_IN_WORDS.sub(lambda match: f"{match['operand']} - " if match["operand"] else "-", text)
    text = re.sub(r"(?:^|(?<=[=({\[]))(\s*)-\s*-\s*(?=\d)", r"\1", text)  # not in a sentence, where it is a dash
    text = re.sub(r"(?<=10)[⁻⁺]?[⁰¹²³⁴-⁹]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPT)}}}", text)
    text = _VULGAR_FRACTION.sub(_vulgar_fraction, text)
    return _REPEATING.sub(_repeating_decimal, text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", match[2]).replace("⁄", "/")
    return f"{match[1]} {fraction}" if match[1] else fraction


def _repeating_decimal(match: re.Match[str]) -> str:
    repeated = match[3] or match[4] or match[5]
    value = (int(f"0{match[1]}{match[2]}") + Fraction(int(repeated), 10 ** len(repeated) - 1)) / 10 ** len(match[2])
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _plain(latex: str) -> str:
    """Text without LaTeX commands around words and in numbers, and with single spaces."""
    text = " ".join((_TEXT.sub(r" \1 ", latex) if "\\" in latex else latex).split())
    text = re.sub(r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree\b", "°", text)
    text = _SHORT_FRACTION.sub(_short_fraction, text)
    text = _POWER_OF_TEN.sub(lambda match: f"{match['times'] or 1}e{match['power']}", text)
    text = re.sub(r"(?<=[A-Za-z])\s*\\cdot\s*(?=[A-Za-z])|(?<=[A-Za-z])\s*\\,\s*(?=[A-Za-z])", "·", text)
    text = re.sub(r"\\[, ;:!]|~", " ", text).replace("\\Omega", "Ω")
    text = re.sub(r"\\mu\s*(?=[A-Za-z])", "µ", text)
    text = re.sub(r"\s+(?=\^)", "", text)
    return " ".join(_FEET.sub(r"\1 ft \2 in", text).split())


def _short_fraction(match: re.Match[str]) -> str:
    return f"{match[1]}{' ' if match[1] else ''}{match[2] or match[3]}/{match[4] or match[5]}"


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
    """Parses an answer, in which the reference's unit may follow without a space, as in `5m`."""
    answer = read_answer(text)
    if answer.number is not None or unit is None:
        return answer
    plain = _plain(normal_form(bare_formula(text.strip())))
    if not plain.endswith(unit):
        return answer
    return read_quantity(plain[: -len(unit)].strip()) or answer


def read_quantity(text: str) -> Answer | None:
    """A number with or without a unit, currency or percent sign; None if the text is anything else."""
    text = text.strip().rstrip(".")
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if (match := _QUANTITY.fullmatch(text)) is None:
        return _read_sum(text)
    unit = match["unit"] or match["share"]
    if unit is not None and not _is_unit(unit.lstrip("/ ")):
        return None
    if match["share"] is not None and match["currency"] is None:  # `5/x` is algebra
        return None
    if match["remark"] is not None and not _is_unit(match["remark"]):
        return None
    if match["gap"] == "-" and unit is None and match["close"] is None:  # `2-1/2` is a difference, `2-1/2 cups` is not
        return None
    currency = match["currency"] or match["behind"]
    behind = unit or match["rate"] or match["close"]
    if currency is not None and (behind := _priced(currency.lstrip("\\"), behind)) is None:
        return None
    scales = re.findall(r"[A-Za-z]+", match["scale"] or "")
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
    for scale in scales:
        value *= _SCALES[scale if len(scale) < 3 else scale.lower().rstrip("s")]
    if scales:
        latex = f"{latex} k" if scales == ["k"] else as_fraction(value)  # `5k` may be algebra
    if match["percent"] is not None:
        return Answer(math=latex + r"\%", number=value, is_percentage=True)
    return Answer(math=latex, number=value, unit=behind)


def _read_sum(text: str) -> Answer | None:
    """A quantity in several units, such as 2 hours and 30 minutes; None if the text is anything else."""
    if (joint := _NEXT_PART.search(text)) is None:
        return None
    first = read_quantity(text[: joint.start()])
    rest = read_quantity(text[joint.end() :])
    if first is None or rest is None or first.number is None or rest.number is None or not (first.unit and rest.unit):
        return None
    share = next((ratio for ratio in units.ratios(rest.unit, first.unit) or () if ratio < 1), None)
    if share is None:
        return None
    added = rest.number * share
    value = first.number + (added if first.number >= 0 else -added)
    return replace(first, math=as_fraction(value), number=value)


def as_fraction(value: Fraction) -> str:
    """A number as LaTeX."""
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _priced(currency: str, unit: str | None) -> str | None:
    """The unit of a price: `$`, `$ per hour`; None if it is ambiguous, as in `$5 m`."""
    if unit is None:
        return currency
    if rate := re.match(r"\s*(?:/|(?:per|an?|each|every)\b)\s*(?=\w)", unit):
        return f"{currency} per {unit[rate.end() :]}"
    if not units.meanings(unit):  # `$18 in total`
        return currency
    return unit if units.are_compatible(currency, unit) else None


def last_quantity(completion: str, unit: str | None) -> Answer | None:
    """The number in the answer of a text without a box: behind `answer is`, else the last one of the last sentence.

    None if there is none, or it is part of a formula. Numbers with a unit of the same kind as the reference's `unit`
    count before others: `300 km` in `it travels 300 km in 3 hours`.
    """
    text = _MATH_IN_TEXT.sub(_without_dollars, completion[-MAX_TEXT_CHARS:].replace("**", ""))
    announced = _ANNOUNCED.split(text)[-1]
    parts = list(reversed(re.split(r"(?<=[.!?])\s+|\n", text)))
    if announced != text and re.match(rf"[-–−\d.]|{_CURRENCY}", announced):
        parts.insert(0, _END_OF_ANSWER.split(announced, maxsplit=1)[0])
    for part in parts:
        if not (found := list(_quantities(_plain(part)))):
            continue
        if found[-1] is None:
            return None
        known = [one for one in found if one is not None]
        alike = [one for one in known if one.unit and unit and _are_alike(one.unit, unit)]
        bare = [one for one in known if not units.meanings(one.unit)]
        return (alike or (bare if unit else known) or known)[-1]
    return None


def tags_as_announcements(completion: str) -> str:
    """A completion in which `<answer>5</answer>` becomes a line of its own, `answer: 5`.

    Several lines without a closing tag are no answer: they follow a mention of the tag.
    """
    *before, last = _TAG.split(completion)
    answer, *after = _END_OF_TAG.split(last, maxsplit=1)
    if not before or (not after and "\n" in answer.strip()):
        return completion
    return "\n".join([*before, f"answer: {answer}", *after])


def announced_formula(completion: str) -> str | None:
    r"""The formula on the rest of the line behind the last `answer is`, `answer:` or `####`.

    None without one: with words beside it (`x + 1, not x + 2`), in a question, or if a box or LaTeX's delimiters show
    it. Three numbers with colons are none, either: they would be read as a quotient of quotients.
    """
    _, *announced = _ANNOUNCED.split(completion[-MAX_TEXT_CHARS:].replace("**", ""))
    if not announced or "\\boxed" in completion:
        return None
    line = _NEXT_SENTENCE.split(announced[-1].partition("\n")[0], maxsplit=1)[0]
    text = bare_formula(line.strip().removesuffix(".").strip(" \t`"))
    if not text or text.count("{") != text.count("}") or re.search(r"\$|\\[(\[]|\?|\d\s*:\s*\d+\s*:", text):
        return None
    return text if read_answer(text).words is None else None


def _without_dollars(match: re.Match[str]) -> str:
    return match[0] if re.search(r"(?<!\\)\b[a-z]{3,}", match[1]) else match[1]


def _are_alike(one: str, other: str) -> bool:
    return bool(units.ratios(one, other)) or one.casefold().rstrip("s") == other.casefold().rstrip("s")


def _quantities(text: str) -> Iterator[Answer | None]:
    """The numbers of a sentence with their units; None for one that is a part of a formula."""
    end = 0
    for match in _NUMBER_IN_TEXT.finditer(text):
        if match.start() < end:  # the minutes of `2 hours 30 minutes`
            continue
        before = text[max(0, match.start() - 20) : match.start()]
        sign = _SIGN.search(before)
        if sign is None and _FORMULA_BEFORE.search(before):
            yield None
            continue
        number = f"{'-' if sign else ''}{match[0]}"
        behind = text[match.end() :]
        tail = re.match(r"[^\s,;:!?()=]*(?: [^\s,;:!?()=]+){0,5}", behind)[0]  # type: ignore[index]
        stops = [word.end() for word in re.finditer(r"\S+", tail)]
        found = None
        for stop in reversed(stops):
            if tail[:stop].endswith(" in") and not units.is_inch(behind[stop:]):
                continue
            found = read_quantity(number + tail[:stop].rstrip("*_'\"."))
            if found is not None and (stop == stops[0] or found.is_percentage or units.meanings(found.unit)):
                end = match.end() + stop
                break
            found = None
        if found is None and not _FORMULA_BEHIND.match(behind):
            found = read_quantity(number)
        yield found


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


def is_right_in_words(reference: str, completion: str) -> bool:
    """Whether the final words of a completion equal normalised words; a choice may be followed by its text."""
    if len(reference) == 1 and reference.isalpha():
        return final_choice(completion) == reference
    words = final_words(completion)
    return (
        reference == words
        or re.search(rf"\b(?:is|are|was|be|at|on)(?: the)? {re.escape(reference)}$", words) is not None
    )


def final_choice(completion: str) -> str:
    """The letter that a completion chooses, in lower case; empty without exactly one."""
    boxed = final_answer(completion)
    text = _TEXT.sub(r" \1 ", completion[-MAX_TEXT_CHARS:]).replace("*", "").replace("$", "")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    answer = _plain(bare_formula((last if boxed is None else boxed).strip())).strip(" .*$")
    found = [_CHOICE.fullmatch(answer) or _CHOICE_WITH_TEXT.match(answer)]
    if boxed is None:
        found = [None, *_LAST_CHOICE.finditer(last), *filter(None, found), *_ANNOUNCED_CHOICE.finditer(text)]
    letter = "" if found[-1] is None else found[-1][found[-1].lastindex or 0]
    return letter.casefold() if len(letter) == 1 else ""  # longer behind `A or`


def normal_words(text: str) -> str:
    """Lower case, single spaces, no surrounding markup, quotes or punctuation; a choice becomes its letter."""
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
