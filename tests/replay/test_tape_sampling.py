"""A replay with other sampling settings than the tape's would compare log-probabilities of different distributions."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from test_replay_run import metrics, replay, train

from lit_async_rl.lab.tape import main as filter_tape
from lit_async_rl.replay.tape import MANIFEST, Tape, TapeWriter, checksum

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
HOT = ("--data.sampling.temperature", "0.7")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        flags = ("--trainer.callbacks+", "RolloutTape", "--trainer.callbacks.folder", str(folder / "tape"))
        train(folder, 1, *flags, *HOT, steps=3)
    return folder / "tape"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["temperature", "top_p"])
def test_it_is_refused_before_training(tape, tmp_path, capsys, setting):
    flags = {"temperature": (), "top_p": (*HOT, "--data.sampling.top_p", "0.9")}[setting]
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path, 1, *replay(tape), *flags)
    said = str(stopped.value.code) + capsys.readouterr().err
    recorded, asked = {"temperature": (0.7, 1.0), "top_p": (1.0, 0.9)}[setting]
    assert f"data.sampling.{setting}={asked} does not match tape" in said
    assert f"Use data.sampling.{setting}={recorded}" in said
    assert not list(tmp_path.glob("**/*.ckpt"))


@pytest.mark.slow
def test_the_same_settings_go_on_from_a_filtered_copy_too(tape, tmp_path):
    filter_tape(["filter", str(tape), "--out", str(tmp_path / "part"), "--first_step", "1"])
    assert [step.sampling for step in Tape(tmp_path / "part").steps()] == 2 * [
        {"temperature": 0.7, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    ]
    train(tmp_path, 1, *replay(tmp_path / "part"), *HOT, steps=2)
    ratios = [row["importance/ratio_max"] for row in metrics(tmp_path) if "importance/ratio_max" in row]
    assert abs(ratios[0] - 1) < 1e-3, "the first weights sampled these tokens, at this temperature"


@pytest.mark.slow
def test_a_later_step_with_other_settings_is_refused_where_it_is_read(tape, tmp_path):
    steps = list(Tape(tape).steps())
    writer = TapeWriter(tmp_path)
    for step, temperature in zip(steps, (0.7, 0.7, 1.0), strict=True):
        writer.append(step.step, step.version, step.groups, dict(step.sampling, temperature=temperature))
        writer.flush()
    writer.release()
    reader = Tape(tmp_path, steps[0].sampling).steps()
    assert [next(reader).step, next(reader).step] == [0, 1]
    with pytest.raises(
        ValueError, match=r"data.sampling.temperature=0.7 does not match tape .*step 2 was sampled with .*=1.0"
    ):
        next(reader)


@pytest.mark.parametrize("column", [None, "null"])
def test_tapes_that_do_not_say_are_read_as_before(tape, tmp_path, column):
    for path in tape.glob("steps-*.arrow"):
        table = pa.ipc.open_file(path).read_all()
        number = table.schema.get_field_index("sampling")
        table = table.remove_column(number)
        if column:
            table = table.append_column("sampling", pa.nulls(table.num_rows, pa.string()))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        first, last = path.name.split("-")[1:3]
        (tmp_path / f"steps-{first}-{last}-{checksum(data)}.arrow").write_bytes(data)
    assert not (tmp_path / MANIFEST).exists()
    assert [step.sampling for step in Tape(tmp_path, {"temperature": 1.0}).steps()] == 3 * [None]


def test_settings_that_are_no_settings_are_an_invalid_rollout(tape, tmp_path):
    (step, *_) = Tape(tape).steps()
    for wrong in ([1], "x", {"temperature": "hot"}):
        folder = tmp_path / json.dumps(wrong)[1:3].strip('"{')
        writer = TapeWriter(folder)
        writer.append(step.step, step.version, step.groups, step.sampling)
        for row in writer._rows:
            row["sampling"] = json.dumps(wrong)
        writer.flush()
        writer.release()
        with pytest.raises(ValueError, match="holds an invalid rollout"):
            list(Tape(folder).steps())
