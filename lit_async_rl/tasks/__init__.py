"""Prompt sources with verifiable answers."""

from lit_async_rl.tasks.arithmetic import Addition, MentalArithmetic
from lit_async_rl.tasks.calculator import Calculator
from lit_async_rl.tasks.calculator_agent import CalculatorAgent, CalculatorParser
from lit_async_rl.tasks.reasoning import ReasoningGym, ReasoningGymReward
from lit_async_rl.tasks.selection import PickNumber
from lit_async_rl.tasks.sorting import SortDigits

__all__ = [
    "Addition",
    "Calculator",
    "CalculatorAgent",
    "CalculatorParser",
    "MentalArithmetic",
    "PickNumber",
    "ReasoningGym",
    "ReasoningGymReward",
    "SortDigits",
]
