"""Values that engines, rewards and the trainer share between threads cannot be changed."""

import dataclasses
import inspect

import pytest

from lit_async_rl import types

VALUES = {name: kind for name, kind in inspect.getmembers(types, dataclasses.is_dataclass) if inspect.isclass(kind)}


@pytest.mark.parametrize("kind", VALUES.values(), ids=VALUES)
def test_a_field_cannot_be_set(kind):
    made = object.__new__(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(kind)[0].name, None)
