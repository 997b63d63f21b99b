from .run import fit as fit
from .trainer import Trainer as Trainer
