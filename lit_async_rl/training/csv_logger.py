"""CSV logger for runs that must not end because the disk is full."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lit_async_rl.errors import InvariantError
from lit_async_rl.utils.files import append, check_writable, replacing, tolerate_full_disk
from lit_async_rl.utils.folder_lock import FolderLock


class CSVLog(CSVLogger):
    """Lightning's `CSVLogger`, with the same arguments and file format.

    When the disk is full one line says so, the file stays whole, and the rows are written as soon as there is room.
    With a `version` that there is already, as after a resume, its rows stay, and those of this run come behind them.
    Without one the next folder that is free is made at once, so that two runs that begin together get one each. While a
    Trainer runs no other process can write there.

    Attributes:
        made_folders: those that were made for this run, the run's own first.

    Raises:
        OSError: another process writes there.
    """

    made_folders: Sequence[Path] = ()
    _lock: FolderLock | None = None

    @property
    def version(self) -> int | str:
        """The version that was given, or the next that is free."""
        leads = getattr(rank_zero_only, "rank", 0) == 0
        if self._version is None and leads and "://" not in self.root_dir:
            self._version = self._claim_version()
        return super().version

    def _claim_version(self) -> int:
        version = int(self._get_next_version())
        while True:
            folder = Path(self.root_dir, f"version_{version}")
            missing = [one for one in (folder, *folder.parents) if not one.exists()]
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # made by another run meanwhile
                version += 1
            except OSError:  # said by what writes there
                return version
            else:
                self.made_folders = missing
                return version

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """Writer of the rows; locks the folder."""
        if self._lock is None and "://" not in self.log_dir:
            check_writable(Path(self.log_dir), "CSVLog.save_dir")
            self._lock = FolderLock(self.log_dir, "CSVLog.save_dir")
        if self._experiment is None:
            self._experiment = _Writer(log_dir=self.log_dir)
        if not isinstance(self._experiment, _Writer):
            raise InvariantError("a logger without its writer")
        return self._experiment


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Goes on with the table that is there, where Lightning would delete it."""
        path = Path(self.metrics_file_path)
        if "://" in self.log_dir or not path.is_file():
            return
        with path.open(newline="") as file:
            self.metrics_keys = next(csv.reader(file), [])
        with path.open("rb+") as table:
            if table.seek(0, os.SEEK_END) and (table.seek(-1, os.SEEK_END), table.read())[1] != b"\n":
                table.write(b"\n")  # the last row was cut off by a crash

    def save(self) -> None:
        """Appends the rows that wait; all or none of them."""
        if "://" in self.log_dir:
            super().save()
            return
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        with tolerate_full_disk(str(path)):
            keys = sorted({*self.metrics_keys}.union(*self.metrics))
            if keys != self.metrics_keys:
                self._write_anew(path, keys)
            text = io.StringIO(newline="")
            csv.DictWriter(text, keys).writerows(self.metrics)
            append(path, text.getvalue())
            self.metrics = []

    def _write_anew(self, path: Path, keys: list[str]) -> None:
        """Another header, above the rows that there are."""
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, keys)
        writer.writeheader()
        writer.writerows(rows)
        with replacing(path) as file:
            file.write(text.getvalue().encode())
        self.metrics_keys = keys
