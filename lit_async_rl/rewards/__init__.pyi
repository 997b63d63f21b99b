from .functions import IsolatedReward as IsolatedReward
from .functions import MathVerify as MathVerify
from .functions import exact_match as exact_match
from .functions import last_number as last_number
from .functions import share_correct as share_correct
from .references import grades as grades
