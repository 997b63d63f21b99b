from .engine import Constant as Constant
from .engine import Latency as Latency
from .engine import LogNormal as LogNormal
from .engine import Pareto as Pareto
from .engine import SimulatedEngine as SimulatedEngine
from .engine import Stragglers as Stragglers
from .environment import Sleeping as Sleeping
