from .engine import SimulatedEngine as SimulatedEngine
from .environment import Delayed as Delayed
from .latency import Constant as Constant
from .latency import Latency as Latency
from .latency import LogNormal as LogNormal
from .latency import Pareto as Pareto
from .latency import Stragglers as Stragglers
