from .base import Environment as Environment
from .base import Episode as Episode
from .base import Observation as Observation
from .episode_engine import EpisodeEngine as EpisodeEngine
from .gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
from .gymnasium import GymnasiumPrompts as GymnasiumPrompts
from .openenv import OpenEnvEnvironment as OpenEnvEnvironment
from .openenv import OpenEnvPrompts as OpenEnvPrompts
