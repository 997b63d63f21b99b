from .base import Environment as Environment
from .base import Episode as Episode
from .base import Observation as Observation
from .episode_engine import EpisodeEngine as EpisodeEngine
from .gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
from .gymnasium import GymnasiumPrompts as GymnasiumPrompts
from .python_tool import PythonTool as PythonTool
