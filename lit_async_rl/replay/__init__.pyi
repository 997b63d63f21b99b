from .buffer import RecencyReplay as RecencyReplay
from .buffer import ReplayBuffer as ReplayBuffer
from .buffer import ReplayWeighting as ReplayWeighting
from .buffer import RewardReplay as RewardReplay
from .buffer import UniformReplay as UniformReplay
from .tape import Tape as Tape
