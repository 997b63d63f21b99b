from .base import Environment as Environment
from .base import Episode as Episode
from .base import GymnasiumEnvironment as GymnasiumEnvironment
from .base import GymnasiumPrompts as GymnasiumPrompts
from .base import Observation as Observation
from .episode_engine import EpisodeEngine as EpisodeEngine
