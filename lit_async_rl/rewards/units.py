"""Units of answers: whether `18 cents` may be `18 dollars`, and `1.8 m` is `180 cm`.

A unit is read as a factor and powers of base units. Units that are not in the table, such as counted objects
(`apples`), are not compared. Imports the standard library only, see `answers`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

TOLERANCE = Fraction(1, 10**6)  # of values after a conversion

# Units by base unit (or product of powers), as `factor: names`. A name may have several meanings: a pound is a mass or
# a currency, a degree an angle or a temperature.
_TABLE: dict[str, dict[str, str]] = {
    "dollar": {"1": "$ dollar dollars usd buck bucks", "1/100": "¢ cent cents"},
    "euro": {"1": "€ euro euros eur", "1/100": "cent cents"},
    "sterling": {"1": "£ pound pounds gbp sterling", "1/100": "penny pence"},
    "rupee": {"1": "₹ rupee rupees rs inr"},
    "yen": {"1": "¥ yen jpy"},
    "yuan": {"1": "yuan cny rmb"},
    "m": {
        "1": "m meter meters metre metres",
        "1000": "km kms kilometer kilometers kilometre kilometres",
        "1/10": "dm decimeter decimeters",
        "1/100": "cm cms centimeter centimeters centimetre centimetres",
        "1/1000": "mm millimeter millimeters millimetre millimetres",
        "1/1000000": "µm μm micrometer micrometers micron microns",
        "1/1000000000": "nm nanometer nanometers",
        "254/10000": "in inch inches",
        "3048/10000": "ft foot feet",
        "9144/10000": "yd yds yard yards",
        "1609344/1000": "mi mile miles",
    },
    "m^2": {"10000": "ha hectare hectares", "316160658/78125": "acre acres"},
    "m^3": {
        "1/1000": "L l liter liters litre litres",
        "1/10000": "dL dl deciliter deciliters",
        "1/100000": "cL cl centiliter centiliters",
        "1/1000000": "mL ml milliliter milliliters millilitre millilitres cc",
        "1": "kL kl kiloliter kiloliters",
        "473176473/125000000000": "gal gallon gallons",
        "473176473/500000000000": "qt quart quarts",
        "473176473/1000000000000": "pt pint pints",
        "473176473/2000000000000": "cup cups",
        "473176473/32000000000000": "tablespoon tablespoons tbsp",
        "473176473/96000000000000": "teaspoon teaspoons tsp",
    },
    "g": {
        "1": "g gram grams gramme grammes",
        "1000": "kg kgs kilo kilos kilogram kilograms",
        "1/1000": "mg milligram milligrams",
        "1/1000000": "µg μg microgram micrograms",
        "1000000": "tonne tonnes",
        "45359237/100000": "lb lbs pound pounds",
        "45359237/1600000": "oz ounce ounces",
    },
    "s": {
        "1": "s sec secs second seconds",
        "1/1000": "ms millisecond milliseconds",
        "1/1000000000": "ns nanosecond nanoseconds",
        "60": "min mins minute minutes",
        "3600": "h hr hrs hour hours",
        "86400": "day days",
        "604800": "wk wks week weeks",
    },
    "month": {"1": "month months", "12": "yr yrs year years", "120": "decade decades", "1200": "century centuries"},
    "m s^-1": {"1609344/3600000": "mph", "1000/3600": "kph kmh", "3048/10000": "fps"},
    "degree": {"1": "° deg degree degrees", "5729577951308232/100000000000000": "rad rads radian radians"},
    "celsius": {"1": "C °C celsius centigrade ° deg degree degrees"},
    "fahrenheit": {"1": "F °F fahrenheit ° deg degree degrees"},
    "kelvin": {"1": "K kelvin kelvins"},
    "s^-1": {"1": "Hz hertz", "1000": "kHz", "1000000": "MHz", "1000000000": "GHz", "1/60": "rpm"},
    "byte": {
        "1": "B byte bytes",
        "1000": "kB KB kilobyte kilobytes",
        "1000000": "MB megabyte megabytes",
        "1000000000": "GB gigabyte gigabytes",
        "1000000000000": "TB terabyte terabytes",
        "1/8": "bit bits",
    },
    "g m s^-2": {"1000": "N newton newtons", "1000000": "kN"},
    "g m^2 s^-2": {"1000": "J joule joules", "1000000": "kJ kilojoule kilojoules", "3600000000": "kWh"},
    "calorie": {"1": "cal calorie calories", "1000": "kcal kilocalorie kilocalories"},
    "g m^2 s^-3": {"1000": "W watt watts", "1000000": "kW kilowatt kilowatts", "1000000000": "MW megawatt megawatts"},
    "g m^-1 s^-2": {"1000": "Pa pascal pascals", "1000000": "kPa"},
    "g m^2 s^-3 ampere^-1": {"1000": "V volt volts", "1000000": "kV", "1": "mV"},
    "ampere": {"1": "A amp amps ampere amperes", "1/1000": "mA"},
    "ampere s": {"1": "C coulomb coulombs", "1/1000": "mC", "1/1000000": "µC μC"},
    "g m^2 s^-3 ampere^-2": {"1000": "Ω ohm ohms"},
    "mol": {"1": "mol mole moles"},
}
_LETTERS = frozenset("mshgCFKJLNVWAB")  # single letters are units in this case only
_FILLERS = frozenset(
    [
        *("a", "an", "the", "of", "in", "total", "altogether", "each", "long", "tall", "wide", "high", "deep", "old"),
        *("away", "left", "more", "apart", "thick", "all"),
    ]
)
_CURRENCIES = frozenset(["dollar", "euro", "sterling", "rupee", "yen", "yuan"])
_RATE = re.compile(r"\s*(?:/|\b(?:per|an?|each|every)\b).*")  # behind a price
_DEGREES = re.compile(r"(?i)(?:°|\bdeg(?:ree)?s?\.?)\s*(C|F|celsius|centigrade|fahrenheit)\b")
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TOKEN = re.compile(
    r"(?P<over>/|\bper\b|(?<=\w )(?<!of )an?(?= ))"
    r"|(?P<name>°?[A-Za-zµμΩ]+|[°$€£¥₹¢])\.?(?:\^?\{?(?P<power>-?[1-9])\}?|(?P<super>[²³]))?"
)


@dataclass(frozen=True)
class Unit:
    """One meaning of a unit.

    Attributes:
        factor: in base units.
        powers: pairs of base unit and power, sorted.
    """

    factor: Fraction
    powers: tuple[tuple[str, int], ...]


def meanings(text: str | None) -> tuple[Unit, ...]:
    """Possible meanings of a unit; empty without a unit or with an unknown part."""
    return _meanings(text.strip()) if text else ()


def compare(value: Fraction, unit: str | None, *, other: Fraction, other_unit: str | None) -> bool | None:
    """Whether two quantities are equal; None if a unit is missing or unknown, so that values alone count."""
    found = ratios(other_unit, unit)
    return None if found is None else any(_is_close(value, other * ratio) for ratio in found)


def ratios(unit: str | None, other: str | None) -> list[Fraction] | None:
    """Possible conversion factors to another unit: 1/60 for minutes to hours, empty for units of different kinds.

    None if a unit is unknown. A price may lack its rate: `$` is `$ a day`, but `$ per hour` is not `$ per minute`.
    """
    known = meanings(unit)
    others = meanings(other)
    if _is_price(known) != _is_price(others):
        prices = [meanings(_RATE.sub("", text or "")) for text in (unit, other)]
        if all(map(_is_price, prices)):
            known = prices[0]
            others = prices[1]
    if not known or not others:
        return None
    pairs = itertools.product(known, others)
    return [one.factor / another.factor for one, another in pairs if one.powers == another.powers]


def _is_price(found: tuple[Unit, ...]) -> bool:
    return any(len(one.powers) == 1 and one.powers[0][0] in _CURRENCIES for one in found)


def are_compatible(unit: str | None, other: str | None) -> bool:
    """Whether the units are the same, or one of them is missing or not known."""
    return compare(Fraction(1), unit, other=Fraction(1), other_unit=other) is not False


def is_inch(rest: str) -> bool:
    """Whether `in` is a length, given what follows it: `18 in total` and `18 in profit` are none."""
    return re.match(r"\.?\s*(?:$|[^\s\w]|(?:long|tall|wide|high|deep|thick|apart)\b)", rest) is not None


def _is_close(one: Fraction, other: Fraction) -> bool:
    return one == other or abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


@functools.lru_cache(maxsize=4096)
def _meanings(text: str) -> tuple[Unit, ...]:
    text = _DEGREES.sub(lambda match: match[1][0].upper(), text)
    rest = _TOKEN.sub(" ", text)
    if re.search(r"[^\s*·.-]", rest):
        return ()
    factors: list[list[tuple[Unit, int]]] = []  # the meanings of each name, with its power
    sign = 1
    ahead = 0  # power of the name that follows `square` or `cubic`
    for match in _TOKEN.finditer(text):
        if match["over"]:
            sign = -1
            continue
        name = match["name"]
        if name.lower() in _POWER_WORDS:
            power = _POWER_WORDS[name.lower()]
            if name.lower() in ("squared", "cubed") and factors:
                factors[-1] = [(unit, given * power) for unit, given in factors[-1]]
            else:
                ahead = power
            continue
        if name != "A" and name.lower() in _FILLERS and not (name == "in" and is_inch(text[match.end() :])):
            continue
        found = _names().get(name) or (_names().get(name.lower()) if len(name) > 1 else None)
        if found is None or (len(name) == 1 and name.isalpha() and name not in _LETTERS | set("lΩ")):
            return ()
        power = {"²": 2, "³": 3}.get(match["super"] or "", int(match["power"] or 1)) * (ahead or 1) * sign
        factors.append([(unit, power) for unit in found])
        ahead = 0
    if not factors:
        return ()
    return tuple(dict.fromkeys(_product(chosen) for chosen in itertools.product(*factors)))


def _product(chosen: tuple[tuple[Unit, int], ...]) -> Unit:
    factor = Fraction(1)
    powers: Counter[str] = Counter()
    for unit, power in chosen:
        factor *= unit.factor**power
        for base, own in unit.powers:
            powers[base] += own * power
    return Unit(factor, tuple(sorted((base, power) for base, power in powers.items() if power)))


@functools.cache
def _names() -> dict[str, tuple[Unit, ...]]:
    found: dict[str, tuple[Unit, ...]] = {}
    for base, by_factor in _TABLE.items():
        parts = [part.partition("^") for part in base.split()]
        powers = tuple(sorted((name, int(power or 1)) for name, _, power in parts))
        for factor, names in by_factor.items():
            for name in names.split():
                found[name] = (*found.get(name, ()), Unit(Fraction(factor), powers))
    return found
