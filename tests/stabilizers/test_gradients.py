"""Inner products of gradients are those of the concatenated vectors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_async_rl.stabilizers.gradients import DOT_CHUNK, GradSpace, GradSpaces

shapes = st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (4, 1, 2)]), min_size=1, max_size=5)


def space_of(shapes, seed, none_every=None):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for n, p in enumerate(params):
        if none_every is None or n % none_every:
            p.grad = torch.randn_like(p)
    return GradSpace(nn.Module(), params)


@given(shapes, st.integers(0, 99), st.sampled_from([None, 1, 2, 3]))
def test_dots_are_those_of_concatenated_vectors_missing_gradients_are_zero(shapes, seed, none_every):
    space = space_of(shapes, seed, none_every)
    other = [torch.randn_like(p) for p in space.params]
    dots = space.dots((space.gradients(), space.gradients()), (space.gradients(), other))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in space.params]
    flat = torch.cat([grad.reshape(-1) for grad in grads]).double()
    flat_other = torch.cat([t.reshape(-1) for t in other]).double()
    torch.testing.assert_close(dots, torch.stack([flat @ flat, flat @ flat_other]), rtol=1e-5, atol=1e-6)


def test_squares_beyond_float32_do_not_overflow():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3e34, 4e34])
    space = GradSpace(nn.Module(), [p])
    assert space.norm(space.gradients()) == pytest.approx(5e34, rel=1e-6)


def test_one_parameter_beyond_float32_spoils_not_the_norm_of_all():
    small, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    small.grad, large.grad = torch.tensor([3.0, 4.0]), torch.tensor([3e20, 4e20])
    space = GradSpace(nn.Module(), [small, large])
    assert space.norm(space.gradients()) == pytest.approx(5e20, rel=1e-6)


def test_long_vectors_keep_their_digits():
    p = nn.Parameter(torch.zeros(4 * DOT_CHUNK + 3))
    p.grad = torch.rand_like(p) + 1
    space = GradSpace(nn.Module(), [p])
    assert space.norm(space.gradients()) == pytest.approx(p.grad.double().norm().item(), rel=1e-6)


def test_nan_is_seen_and_not_hidden():
    space = space_of([(3,), (3,)], 0)
    space.params[1].grad[0] = torch.nan
    assert math.isnan(space.norm(space.gradients()))


def test_a_factor_of_one_touches_no_bit():
    space = space_of([(3,), (3,)], 0)
    before = [p.grad.clone() for p in space.params]
    for factor in (1.0, 2.0):
        space.scale_(space.gradients(), factor)
        assert all(torch.equal(p.grad, factor * grad) for p, grad in zip(space.params, before, strict=True))


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        GradSpace(nn.Module(), embedding.parameters()).gradients()


def test_parameters_added_later_join_the_space():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([first], lr=0.1)
    spaces = GradSpaces()
    space = spaces.of(nn.Module(), optimizer)
    assert spaces.of(nn.Module(), optimizer) is space
    optimizer.add_param_group({"params": [second]})
    assert len(spaces.of(nn.Module(), optimizer).params) == 2


def test_a_parameter_in_anothers_place_joins_the_space_and_one_that_is_gone_leaves_it():
    """Heads are replaced and layers frozen within the life of an optimizer; its groups may keep their lengths."""
    first, second, third = (nn.Parameter(torch.full((2,), float(n))) for n in range(3))
    for parameter in (first, second, third):
        parameter.grad = torch.ones_like(parameter) * (parameter.detach() + 1)
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    spaces = GradSpaces()
    before = spaces.of(nn.Module(), optimizer)
    assert before.norm(before.gradients()) == pytest.approx((2 * 1 + 2 * 4) ** 0.5)
    (group,) = optimizer.param_groups
    group["params"] = [first, third]
    space = spaces.of(nn.Module(), optimizer)
    assert [id(parameter) for parameter in space.params] == [id(first), id(third)]
    assert space.norm(space.gradients()) == pytest.approx((2 * 1 + 2 * 9) ** 0.5)
    assert spaces.of(nn.Module(), optimizer) is space, "nothing has changed since"
    group["params"] = [first]
    space = spaces.of(nn.Module(), optimizer)
    assert space.norm(space.gradients()) == pytest.approx(2**0.5)


def test_each_optimizer_has_its_own_space():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    other = torch.optim.SGD([third], lr=0.1)
    spaces = GradSpaces()
    assert spaces.of(nn.Module(), other).params[0] is third
    assert len(spaces.of(nn.Module(), one).params) == 2
