from .base import Completion as Completion
from .base import GenerationRequest as GenerationRequest
from .base import RolloutEngine as RolloutEngine
from .base import SamplingParams as SamplingParams
from .embedded.engine import EmbeddedEngine as EmbeddedEngine
