"""What a checkpoint must have to be rolled back to."""

import torch
from torch import nn

from lit_async_rl.stabilizers.rollback import _has_same_groups


def optimizer(*sizes):
    groups = [{"params": [nn.Parameter(torch.zeros(1)) for _ in range(size)]} for size in sizes]
    return torch.optim.SGD(groups, lr=0.1)


def saved(*optimizers):
    return {"optimizer_states": [one.state_dict() for one in optimizers]}


def test_a_checkpoint_fits_only_if_each_optimizer_has_its_groups_of_parameters():
    first, second = (2, 1), (3,)
    assert _has_same_groups(saved(optimizer(*first), optimizer(*second)), [optimizer(*first), optimizer(*second)])
    for other in ((2,), (4,), (3, 1)):
        for groups in ((first, other), (other, second)):
            now = [optimizer(*sizes) for sizes in groups]
            assert not _has_same_groups(saved(optimizer(*first), optimizer(*second)), now)
