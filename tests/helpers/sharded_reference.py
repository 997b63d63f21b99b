"""Run by one process: an FSDP2 run of which the reference is to be reset."""

from flow import fit, make_data, make_module
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_async_rl.callbacks import ReferenceReset
from lit_async_rl.models.sharding import Sharding

if __name__ == "__main__":
    module = make_module(kl_coefficient=0.1, sharding=Sharding(compute_dtype="float32"))
    fit(module, make_data(), 1, callbacks=[ReferenceReset(1)], strategy=ModelParallelStrategy(1, 1))
