from .module import RolloutDataModule as RolloutDataModule
