from .arithmetic import Addition as Addition
from .arithmetic import MentalArithmetic as MentalArithmetic
from .calculator import Calculator as Calculator
from .flawed import FlawedAnswers as FlawedAnswers
from .reasoning import ReasoningGym as ReasoningGym
from .reasoning import ReasoningGymReward as ReasoningGymReward
from .selection import PickNumber as PickNumber
from .sorting import SortDigits as SortDigits
