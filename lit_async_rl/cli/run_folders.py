"""The folders that a run writes to: checked, locked and tidied before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.utils.files import check_writable
from lit_async_rl.utils.folder_lock import locked, remove_stale_parts

CHECKPOINTS = "ModelCheckpoint.dirpath"  # Lightning warns where it is not empty
TABLES = ("metrics.csv", "samples.jsonl")


@contextmanager
def run_folders(trainer: Trainer, is_resumed: bool) -> Iterator[None]:
    """Keeps other runs out of this one's folders.

    Args:
        trainer: of the run; only its leading process does anything.
        is_resumed: the run goes on with the tables in its folder; a new run sets an earlier one's aside.

    Raises:
        OSError: a folder cannot be written to, or is in use; names the setting and the folder.
    """
    folders = _folders(trainer)
    if not trainer.is_global_zero:
        yield
        return
    for what, folder in folders:
        check_writable(folder, what)
    with locked(folders, beside=[CHECKPOINTS]):
        if trainer.log_dir is not None:
            log_dir = Path(trainer.log_dir)
            for earlier in {path.parent for path in log_dir.parent.glob("*/checkpoints/.*.part")}:
                remove_stale_parts(earlier)
            if not is_resumed:
                for name in TABLES:
                    set_aside(log_dir / name)
        yield


def set_aside(path: Path) -> None:
    """Renames a file that there is, to `name.1.suffix` or the next number that is free."""
    if not path.exists():
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)


def _folders(trainer: Trainer) -> list[tuple[str, Path]]:
    folders: list[tuple[str, str | Path | None]] = [("trainer.logger's folder", trainer.log_dir)]  # a collective
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            folders.append((CHECKPOINTS, callback.dirpath))
        if isinstance(callback, RolloutTape):
            folders.append(("RolloutTape.folder", callback.folder))
    return [(what, Path(folder)) for what, folder in folders if folder is not None]
