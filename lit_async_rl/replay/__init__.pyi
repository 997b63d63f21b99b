from .buffer import ReplayBuffer as ReplayBuffer
from .tape import Tape as Tape
from .weighting import RecencyReplay as RecencyReplay
from .weighting import ReplayWeighting as ReplayWeighting
from .weighting import RewardReplay as RewardReplay
from .weighting import UniformReplay as UniformReplay
