"""Objects of a command are made in one place: by the command itself, or by the ranks that a cluster starts."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.cli import LightningCLI

from lit_async_rl.cli.app import AsyncRLCLI


@pytest.mark.parametrize(
    ("places_ranks", "dry_run", "is_made"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_command_makes_objects_only_where_no_rank_will(places_ranks, dry_run, is_made, monkeypatch):
    made = []
    monkeypatch.setattr(LightningCLI, "instantiate_classes", lambda self: made.append("objects"))
    cli = object.__new__(AsyncRLCLI)
    cli._starts_ranks = True
    cli.trainer = cli.datamodule = None
    cli.cluster = SimpleNamespace(
        places_ranks=places_ranks, dry_run=dry_run, place_actors=lambda trainer, data: made.append("actors")
    )
    cli.instantiate_classes()
    assert made == (["objects", "actors"] if is_made else [])
