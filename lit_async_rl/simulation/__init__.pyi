from .environment import Delayed as Delayed
from .environment import Sleeping as Sleeping
from .latency import Constant as Constant
from .latency import Latency as Latency
from .latency import LogNormal as LogNormal
from .latency import Pareto as Pareto
from .latency import Stragglers as Stragglers
from .run import SimulatedEngine as SimulatedEngine
