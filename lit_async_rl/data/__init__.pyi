from .module import RolloutDataModule as RolloutDataModule
from .settings import Limits as Limits
from .settings import Scoring as Scoring
from .settings import Validation as Validation
