"""One folder for one run: whatever the logger, after a resume, beside another run, and none where nothing is logged."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
import torch
import wandb
import yaml
from flow import MODEL, fit, make_data, make_module
from lightning.pytorch.loggers import WandbLogger
from wandb_files import records_of, whole_records

import lit_async_rl as rl
from lit_async_rl.api.run_folders import drop_later_rows
from lit_async_rl.callbacks import SampleLogger
from lit_async_rl.cli.app import AsyncRLCLI, evaluate, main, run_name
from lit_async_rl.rollouts.resume import VOCABULARY
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.trackers import CSVLog
from lit_async_rl.training.wandb_runs import STEP, _sync_appends, logged_metrics, read_records

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--config", "configs/quickstart.yaml", "--trainer.enable_progress_bar", "false", "--model.scheduler", "null"),
    *("--model.model", "lit_async_rl/assets/small_sort_policy"),
    *("--data.groups_per_step", "2", "--data.group_size", "2"),
    *("--data.validation.prompts.init_args.size", "4", "--trainer.val_check_interval", "2"),
    *("--defaults.checkpoint.init_args.every_n_train_steps", "2"),
]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def flags(folder: Path, steps: int, *more: str) -> list[str]:
    return [*SMALL, *more, "--trainer.max_steps", str(steps), "--trainer.logger.init_args.save_dir", str(folder)]


def rows(table: Path, column: str) -> dict[int, str]:
    with table.open(newline="") as file:
        found = [(int(row["step"]), row[column]) for row in csv.DictReader(file) if row[column]]
    assert len(dict(found)) == len(found), f"a step is there twice: {found}"
    return dict(found)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_folder_and_an_evaluation_leaves_nothing(tmp_path, capsys):
    main(flags(tmp_path, 4))
    folder = tmp_path / "quickstart" / "version_0"
    before = rows(folder / "metrics.csv", "reward/mean")
    assert set(before) == {0, 1, 2, 3}
    saved = names(folder / "checkpoints")
    main(flags(tmp_path, 5, "--ckpt_path", str(folder / "checkpoints" / "epoch=0-step=2.ckpt")))
    evaluate(flags(tmp_path, 5, "--ckpt_path", str(folder / "checkpoints" / "last.ckpt")))
    assert names(tmp_path / "quickstart") == {"version_0"}
    after = rows(folder / "metrics.csv", "reward/mean")
    assert set(after) == {0, 1, 2, 3, 4}
    assert {step: after[step] for step in (0, 1)} == {step: before[step] for step in (0, 1)}
    assert rows(folder / "metrics.1.csv", "reward/mean") == before, "later rows are set aside"
    assert set(rows(folder / "metrics.csv", "val/pass@1")) == {0, 2, 4, 5}, "the first of the resume is at step 2"
    tokens = [float(value) for value in rows(folder / "metrics.csv", "sample/total_tokens").values()]
    assert tokens == sorted(tokens)
    assert tokens[0] > 0
    assert names(folder / "checkpoints") == saved | {"epoch=1-step=5.ckpt"}, "no last-v1.ckpt"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1] * 4
    assert all(sample["answer"] == "".join(sorted(sample["prompt"].rstrip("="))) for sample in samples)


def with_swapped_tokens(folder: Path) -> Path:
    """The small policy, whose tokenizer has the ids of two digits the other way round."""
    shutil.copytree(rl.asset("small_sort_policy"), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False])
def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(is_new, tmp_path):
    main(flags(tmp_path, 3, "--data.weight_sync_steps", "2"))
    folder = tmp_path / "quickstart" / "version_0"
    last = (folder / "checkpoints" / "last.ckpt").resolve()
    if not is_new:  # as one of an earlier version
        checkpoint = torch.load(last, weights_only=True)
        del checkpoint["RolloutDataModule"]["settings"][VOCABULARY]
        del checkpoint["RolloutDataModule"]["settings"]["data.shuffle"]
        torch.save(checkpoint, last)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = ("--model.model", str(with_swapped_tokens(tmp_path / "other")))
    tokens = "data.prompts, the tokenizer or its chat template has changed"
    same = ("--data.weight_sync_steps", "2")
    changed = {
        ("--data.weight_sync_steps", "4"): r"data\.weight_sync_steps is 8, but must be 4 to resume",
        (*same, "--data.shuffle", "false"): r"data\.shuffle is False, and was True" if is_new else tokens,
        (*same, *other): "the digest of the tokenizer's vocabulary is" if is_new else tokens,
    }
    for more, message in changed.items():
        with pytest.raises(SystemExit, match=message):
            main(flags(tmp_path, 6, *more, "--ckpt_path", str(folder / "checkpoints" / "last.ckpt")))
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert after == before
        assert names(tmp_path / "quickstart") == {"version_0"}


def test_tables_are_cut_at_the_step(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,step\n1,0\n2,1\n3,2\n4,")
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"st')
    for name in ("metrics.csv", "samples.jsonl"):
        drop_later_rows(tmp_path / name, 2)
        drop_later_rows(tmp_path / name, 2)
    assert (tmp_path / "metrics.csv").read_text() == "a,step\n1,0\n2,1\n"
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1}\n'
    assert names(tmp_path) == {"metrics.csv", "metrics.1.csv", "samples.jsonl", "samples.1.jsonl"}


def test_an_evaluation_that_ended_at_the_step_stays(tmp_path):
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,eval/pass@1,step,val/pass@1\n0,,1,\n,1,2,\n0,,2,1\n0,,2,\n0,1,2,1\n,1,3,\n")
    drop_later_rows(table, 2)
    assert table.read_text() == "epoch,eval/pass@1,step,val/pass@1\n0,,1,\n,1,2,\n"


@pytest.mark.slow
def test_a_resumed_run_has_every_evaluation_once(tmp_path):
    settings = dict(groups_per_step=2, group_size=2, accelerator="cpu", devices=1, enable_progress_bar=False)
    held_out, last = SortDigits(8, size=2, split="held_out"), tmp_path / "version_0" / "checkpoints" / "last.ckpt"
    for steps, checkpoint in ((4, None), (6, str(last))):
        settings["callbacks"] = rl.Evaluation({"held_out": held_out}, every_n_steps=1, max_block_s=20.0)
        settings["logger"] = CSVLog(tmp_path, name="")
        rl.fit(MODEL, SortDigits(8, size=1000), rl.exact_match, max_steps=steps, ckpt_path=checkpoint, **settings)
    assert sorted(rows(tmp_path / "version_0" / "metrics.csv", "eval/pass@1")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
@pytest.mark.slow
def test_with_any_logger_all_lies_in_one_folder(logger, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for version in range(2):
        main(flags(tmp_path, 2, "--config", f"configs/loggers/{logger}.yaml"))
        wandb.finish()
        folder = tmp_path / "quickstart" / f"version_{version}"
        assert {"metrics.csv", "samples.jsonl", "config.yaml", "checkpoints"} <= names(folder)
        assert len(rows(folder / "metrics.csv", "reward/mean")) == 2
        assert any(path.name.startswith(("wandb", "events.")) for path in folder.iterdir())
    assert names(tmp_path) == {"quickstart"}
    assert names(tmp_path / "quickstart") == {"version_0", "version_1"}


@pytest.mark.slow
def test_wandb_knows_all_settings_and_the_runs_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    more = ("--config", "configs/loggers/wandb.yaml", "--seed_everything", "3", "--data.validation.prompts", "null")
    cli = AsyncRLCLI(flags(tmp_path, 1, *more))
    cli.trainer.fit(cli.model, cli.datamodule)
    run = cli.trainer.loggers[1].experiment
    assert run.name == "quickstart, seed 3"
    config = yaml.safe_load((tmp_path / "quickstart" / "version_0" / "config.yaml").read_text())
    assert run.config["data"]["group_size"] == config["data"]["group_size"] == 2
    assert run.config["trainer"]["max_steps"] == 1
    run.finish()


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_wandb_run_and_logs_each_step_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "quickstart" / "version_0"
    saved = str(folder / "checkpoints" / "epoch=0-step=2.ckpt")
    commands = {}
    for steps, more in ((4, []), (5, ["--ckpt_path", saved]), (1, ["--seed_everything", "1"])):
        main(flags(tmp_path, steps, "--config", "configs/loggers/wandb.yaml", *more))
        wandb.finish()
        list(records_of(tmp_path))  # waits until they are written
        commands[steps] = re.search(r"upload with: (wandb sync .+)", capsys.readouterr().out)[1]
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    ids = [path.name.split("-")[3] for path in parts]
    assert len(ids) == 2
    assert {*ids} == {(folder / "wandb_id.txt").read_text().strip()}
    other = folder.parent / "version_1"
    assert (other / "wandb_id.txt").read_text().strip() not in ids, "a new run is another one"
    assert [Path(part).resolve() for part in shlex.split(commands[5])[-2:]] == parts, "both parts of one run"
    assert len(shlex.split(commands[4])) == len(shlex.split(commands[1])) == 3

    assert logged_metrics(other, ids[0]) == {}, "of another run"
    logged = logged_metrics(folder, ids[0])
    records = [whole_records(next(part.glob("*.wandb"))) for part in (*parts, *(other / "wandb").glob("offline*"))]
    first, second, new = (next(record.run for record in part if record.HasField("run")) for part in records)
    assert first.run_group == second.run_group == new.run_group, "they differ in the seed alone"
    assert re.fullmatch(r"quickstart-[0-9a-f]{6}", first.run_group)
    assert {(run.job_type, *run.tags) for run in (first, second, new)} == {("train", "quickstart", "asynchronous")}
    best = {record.metric.name for record in records[0] if record.HasField("metric") and record.metric.summary.max}
    assert {"reward/mean", "val/reward", "val/pass@1"} <= best
    steps = [
        (name, int(float(row[STEP])))
        for row in wandb_rows([*records[0], *records[1]])
        for name in ("reward/mean", "val/pass@1")
        if name in row
    ]
    assert sorted(steps) == [*(("reward/mean", n) for n in range(5)), *(("val/pass@1", n) for n in (0, 2, 4, 5))]
    assert {step for step, names in logged.items() if "reward/mean" in names} == set(range(5))


def wandb_rows(records):
    """Rows of the history, values as JSON."""
    for record in records:
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 40, 32768 * 2])
def test_a_wandb_log_that_ends_in_a_crash_is_read_up_to_there(cut, tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path)
    for step in range(400):
        run.log({"text": "x" * 500, STEP: step})
    run.finish()
    (file,) = tmp_path.rglob("*.wandb")
    whole = [record.SerializeToString() for record in whole_records(file)]
    assert len(list(wandb_rows(read_records(file)))) == 400
    file.write_bytes(file.read_bytes()[:-cut])
    found = [record.SerializeToString() for record in read_records(file)]
    assert len(whole) / 2 < len(found) < len(whole)
    assert found == whole[: len(found)]


def test_the_sync_command_appends_where_wandb_has_to_be_told(monkeypatch):
    from wandb.cli.cli import cli

    known = {option.name for option in cli.commands["sync"].params}
    assert _sync_appends() == ("append" in known)
    monkeypatch.setattr(cli.commands["sync"], "params", [click.Option(["--append/--no-append"])])
    assert _sync_appends()


def test_a_name_of_the_configuration_files():
    given = ["--config", "configs/quickstart.yaml", "--x", "1", "--config=configs/stabilizers/vcpo.yaml"]
    assert run_name([*given, "--config", "configs/loggers/wandb.yaml"]) == "quickstart-vcpo"
    assert run_name(["-c=configs/quickstart.yaml", "-cconfigs/stabilizers/vcpo.yaml"]) == "quickstart-vcpo"
    assert run_name([]) == "run"


WANDB = "configs/loggers/wandb.yaml"
CHOSEN = "{class_path: WandbLogger, init_args: {name: chosen}}"
OTHER = "{class_path: CSVLog, init_args: {name: other}}"
NAMED = {  # files behind quickstart.yaml, whose CSV log has a name, too
    "settings of its own overlay": ([WANDB, "{init_args: {name: chosen}}"], True),
    "settings without init_args": ([WANDB, "{name: chosen}"], True),
    "class": ([CHOSEN], True),
    "class by its name alone": (["WandbLogger", "{init_args: {name: chosen}}"], True),
    "list": ([f"[{OTHER}, {CHOSEN}]"], True),
    "none": ([WANDB], False),
    "that of another logger": ([OTHER, WANDB], False),
    "settings of another logger": (["{init_args: {name: other}}", WANDB], False),
    "that of another logger in a list": ([f"[{OTHER}, WandbLogger]"], False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMED)
def test_a_name_that_a_file_chooses_for_wandb_stays(case, tmp_path, monkeypatch):
    for link in ("configs", "lit_async_rl"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    loggers, is_chosen = NAMED[case]
    args = ["--config", "configs/quickstart.yaml"]
    for number, logger in enumerate(loggers):
        path = Path(f"{number}.yaml")
        path.write_text(f"trainer: {{logger: {logger}}}\n")
        args += ["--config", logger if logger == WANDB else str(path)]
    (found,) = (logger for logger in AsyncRLCLI(args).trainer.loggers if isinstance(logger, WandbLogger))
    name = "chosen" if is_chosen else f"{run_name(args)}, seed 0"
    assert found._name == found._wandb_init["name"] == name


AS_JSON = '{"class_path": "WandbLogger", "init_args": {"name": "chosen"}}'


@pytest.mark.slow
@pytest.mark.parametrize("flag", [["--trainer.logger", AS_JSON], [f"--trainer.logger=[{OTHER}, {AS_JSON}]"]])
def test_a_name_that_a_flag_chooses_for_wandb_stays(flag, tmp_path, monkeypatch):
    for link in ("configs", "lit_async_rl"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    cli = AsyncRLCLI(["--config", "configs/quickstart.yaml", *flag])
    (found,) = (logger for logger in cli.trainer.loggers if isinstance(logger, WandbLogger))
    assert found._name == found._wandb_init["name"] == "chosen"


@pytest.mark.slow
@pytest.mark.parametrize("off", [["--trainer.logger", "false"], ["--trainer.fast_dev_run", "true"]])
def test_nothing_is_left_where_nothing_is_logged(off, tmp_path, monkeypatch):
    for link in ("configs", "lit_async_rl"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    main(
        [
            *SMALL[:-2],
            "--trainer.max_steps",
            "1",
            "--trainer.callbacks",
            "null",
            "--defaults.checkpoint",
            "null",
            "--defaults.samples",
            "null",
            *off,
        ]
    )
    assert names(tmp_path) == {"configs", "lit_async_rl"}


def test_runs_that_begin_together_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: CSVLog(tmp_path, "claimed").version, range(100)))
    assert sorted(claimed) == list(range(100))


@pytest.mark.slow
def test_a_run_through_the_api_keeps_others_out_of_its_folder(tmp_path):
    holder = """
import sys, time
from lit_async_rl.rollouts.resume import VOCABULARY
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.trackers import CSVLog
from lit_async_rl.training.wandb_runs import STEP, _sync_appends, logged_metrics, read_records
log = CSVLog(sys.argv[1], "x", version="fixed")
log.experiment
print("held", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            log = CSVLog(tmp_path, "x", version="fixed")
            with pytest.raises(OSError, match=f"in use by process {process.pid}"):
                fit(make_module(), make_data(), 1, logger=log)
        finally:
            process.kill()
    loggers = [SampleLogger(every_n_steps=1, num_groups=1) for _ in range(2)]
    for _ in range(2):  # one after the other in one process: nobody else
        fit(make_module(), make_data(group_size=2), 1, loggers, logger=CSVLog(tmp_path, "x", version="fixed"))
    lines = (tmp_path / "x" / "fixed" / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2, "two rollouts of each run, once"
