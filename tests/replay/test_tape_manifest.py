"""A tape that lacks a file, or whose writer was killed: noticed, or read as it was."""

from pathlib import Path

import pytest
from tapes import groups_of_step

from lit_async_rl.replay.tape import MANIFEST, Tape, TapeWriter


@pytest.fixture
def tape(tmp_path):
    writer = TapeWriter(tmp_path / "tape")
    for step in range(6):
        writer.append(step, step, groups_of_step(step))
        writer.flush()
    writer.release()
    return tmp_path / "tape"


def test_a_missing_doubled_or_foreign_file_of_a_tape_is_noticed(tape, tmp_path, caplog):
    files = sorted(tape.glob("*.arrow"))
    content = {file: file.read_bytes() for file in files}
    for file in (files[0], files[3], files[-1]):
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name}, listed in manifest.jsonl, is missing"):
            Tape(tape)
        file.write_bytes(content[file])
    lines = (tape / MANIFEST).read_text().splitlines(keepends=True)
    (tape / MANIFEST).write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it was appended
    assert [step.step for step in Tape(tape).steps()] == list(range(6))
    (tape / MANIFEST).write_text("".join([*lines[:2], "{}\n"]))
    with pytest.raises(ValueError, match=r"manifest.jsonl, line 3 is damaged"):
        Tape(tape)
    (tape / MANIFEST).unlink()
    double = tape / files[2].name.replace("000000002-", "000000001-", 1)
    double.write_bytes(content[files[2]])
    with pytest.raises(ValueError, match=r"but .* also holds some of these steps"):
        Tape(tape)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"holds steps|of which"):
        list(Tape(tape).steps())


def test_a_tape_whose_writer_was_killed_at_any_moment_of_a_resume_is_readable(tape, monkeypatch):
    """Kills the second writer before each of its renames in turn; the third one repairs what is left."""
    writer = TapeWriter(tape, 2)
    for step in (2, 3, 4):
        writer.append(step, step, groups_of_step(step))
    writer.flush()  # one file with steps 2 to 4
    writer.release()
    for allowed in range(4):
        left = [allowed]

        def replace(self, target, left=left, rename=Path.rename):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            try:
                TapeWriter(tape, 4).release()
            except KeyboardInterrupt:
                assert [step.step for step in Tape(tape).steps()][:4] == [0, 1, 2, 3]
    TapeWriter(tape, 4).release()
    assert [step.step for step in Tape(tape).steps()] == [0, 1, 2, 3]
