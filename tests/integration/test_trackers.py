"""Trackers beside the CSV log, offline, through the command line; and the list of metrics."""

import csv
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
import wandb
from flow import fit, make_data, make_module
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from metric_page import METRICS, find
from test_configs import BASE, ROOT, TINY
from wandb_files import records_of

import lit_async_rl as rl
from lit_async_rl.cli.app import main
from lit_async_rl.training.trackers import CSVLog

pytestmark = pytest.mark.slow

METRIC = "importance/ess_ratio"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.finish()  # one that an earlier test of this process has left, which Lightning's logger would go on with
    yield
    wandb.finish()


def flags(name):
    given = [str(ROOT / word) if word.startswith("configs/") else word for word in BASE]
    given += ["--config", str(ROOT / f"configs/loggers/{name}.yaml"), *TINY]
    given += ["--model.model", rl.asset("sort_policy"), "--trainer.enable_progress_bar", "false"]
    return [*given, "--defaults.samples.init_args.every_n_steps", "1"]


def rows(database, query):
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def test_tensorboard(tmp_path):
    main(flags("tensorboard"))
    content = b"".join(file.read_bytes() for file in tmp_path.rglob("events.out*"))
    assert METRIC.encode() in content
    assert b"samples" in content


def test_wandb_gets_tables_of_samples_and_the_report(tmp_path):
    main(flags("wandb"))
    assert list(tmp_path.rglob("*.wandb"))
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("media/table/samples_*.table.json")]
    assert len(tables) == 2  # steps
    assert tables[0]["columns"][:4] == ["step", "group", "prompt", "completion"]
    assert len(tables[0]["data"]) == 8  # two groups of four
    (report,) = tmp_path.rglob("report.html")
    assert report.parent == next(tmp_path.rglob("metrics.csv")).parent
    assert "<!doctype html>" in report.read_text().lower()


@pytest.mark.parametrize("folder", ["first", "second"])
def test_wandb_writes_into_the_folder_of_each_run(folder, tmp_path, monkeypatch):
    """Its service is started once in a process, and stays where it was."""
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    main(flags("wandb"))
    assert len(list((tmp_path / folder).rglob("*.wandb"))) == 1


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    database = f"sqlite:///{tmp_path}/mlflow.db"  # absolute: mlflow keeps connections by name, over changes of folder
    main([*flags("mlflow"), "--trainer.logger.init_args.tracking_uri", database])
    names = {name for (name,) in rows(tmp_path / "mlflow.db", "select distinct key from metrics")}
    assert {METRIC, "val/pass1"} <= names
    assert rows(tmp_path / "mlflow.db", "select count(*) from params where key like 'data/max_staleness'") == [(1,)]
    assert len(list(tmp_path.rglob("samples/step_*.json"))) == 2
    assert len(list(tmp_path.rglob("artifacts/report.html"))) == 1
    assert list(tmp_path.rglob("metrics.csv"))


def few(**changes):
    """Arguments of `rl.fit` for a run of five small steps that saves every second one."""
    keep = rl.LinkedCheckpoint(every_n_train_steps=2, save_top_k=1, save_last="link", filename="{step}")
    small = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), max_steps=5)
    small |= dict(accelerator="cpu", devices=1, enable_progress_bar=False, callbacks=[keep], learning_rate=1e-4)
    small["defaults"] = {"samples": rl.SampleLogger(every_n_steps=1)}
    return dict(prompts=rl.SortDigits(4, size=20), reward=rl.exact_match, **small) | changes


def wandb_history(records):
    for record in records:
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


@pytest.mark.parametrize("log_model", ["all", True])
def test_wandb_gets_every_checkpoint_and_the_settings_of_a_python_run(log_model, tmp_path):
    wandb.finish()  # of another test, which would go on
    rl.fit(rl.asset("small_sort_policy"), logger=WandbLogger(log_model=log_model, save_dir=tmp_path), **few())
    wandb.finish()
    records = list(records_of(tmp_path))
    saved = [record.request.log_artifact.artifact for record in records if record.request.HasField("log_artifact")]
    saved += [record.artifact for record in records if record.HasField("artifact")]
    names = [json.loads(artifact.metadata)["original_filename"] for artifact in saved if artifact.type == "model"]
    assert names == (["step=2.ckpt", "step=4.ckpt", "step=5.ckpt"] if log_model == "all" else ["step=5.ckpt"])
    assert "latest" in saved[0].aliases
    config = {}
    for record in records:
        if record.WhichOneof("record_type") in ("config", "run"):
            for item in (record.run.config if record.HasField("run") else record.config).update:
                config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert config["data"]["group_size"] == 2
    assert config["data"]["reward"] == "lit_async_rl.rewards.functions.exact_match"
    steps = [row["trainer/global_step"] for row in wandb_history(records) if "samples/path" in row]
    rows = [row for row in wandb_history(records) if "reward/mean" in row]
    assert steps == [row["trainer/global_step"] for row in rows] == [0, 1, 2, 3, 4]
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("media/table/samples_*.table.json")]
    assert sorted({row[0] for table in tables for row in table["data"]}) == [0, 1, 2, 3, 4]


def wandb_run(folder, monkeypatch, seed=0, labels=None, **changes):
    """A run of `few` that W&B follows offline; (its run record, the names of metrics whose largest value it keeps)."""
    wandb.finish()
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    rl.fit(rl.asset("small_sort_policy"), logger=WandbLogger(save_dir=folder, **(labels or {})), **few(**changes))
    wandb.finish()
    records = list(records_of(folder))
    best = {record.metric.name for record in records if record.HasField("metric") and record.metric.summary.max}
    return next(record.run for record in records if record.HasField("run")), best


def test_wandb_groups_seeds_and_keeps_the_best_reward(tmp_path, monkeypatch):
    first, best = wandb_run(tmp_path / "a", monkeypatch, max_steps=2)
    second, _ = wandb_run(tmp_path / "b", monkeypatch, seed=1, max_steps=2)
    other, _ = wandb_run(tmp_path / "c", monkeypatch, max_steps=2, max_staleness=0)
    assert first.run_group == second.run_group
    assert re.fullmatch(r"small_sort_policy-[0-9a-f]{6}", first.run_group)
    assert other.run_group != first.run_group
    assert first.job_type == "train"
    assert (list(first.tags), list(other.tags)) == (["asynchronous"], ["synchronous"])
    assert best == {"reward/mean"}
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")  # whose search reads the last value
    mine, best = wandb_run(tmp_path / "d", monkeypatch, labels={"group": "mine", "tags": ["a"]}, max_steps=1)
    assert (mine.run_group, list(mine.tags)) == ("mine", ["a"])
    assert best == set()


def test_wandb_gets_each_step_of_a_resumed_run_once(tmp_path, monkeypatch, capsys):
    validation = rl.Validation(prompts=rl.SortDigits(4, size=4, split="held_out"))
    keep = rl.LinkedCheckpoint(every_n_train_steps=2, save_top_k=-1, filename="{step}")
    held_out = dict(validation=validation, val_check_interval=2, callbacks=[keep])
    held_out["reward"] = {"answer": rl.exact_match, "digits": rl.share_correct}
    wandb_run(tmp_path, monkeypatch, **held_out)
    said = capsys.readouterr().out
    assert re.search(r"upload with: wandb sync wandb/offline-run-\S+\n", said)
    (saved,) = tmp_path.rglob("step=4.ckpt")
    wandb_run(tmp_path, monkeypatch, ckpt_path=str(saved), max_steps=7, **held_out)
    said = capsys.readouterr().out
    assert len(re.search(r"upload with: wandb sync (.+)", said)[1].split()) == 2, "both parts of one run"
    values = [(row["trainer/global_step"], name) for row in wandb_history(records_of(tmp_path)) for name in row]
    expected = dict.fromkeys(["reward/mean", "reward/part/answer", "reward/part/digits", "samples/path"], range(7))
    for name, steps in (expected | {"val/pass@1": (0, 2, 4, 5, 6, 7)}).items():
        assert sorted(step for step, found in values if found == name) == list(steps), name


@pytest.mark.parametrize("log_model", ["all", True])
def test_mlflow_gets_every_checkpoint(log_model, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", log_model=log_model)
    rl.fit(rl.asset("small_sort_policy"), logger=logger, **few())
    kept = {
        path.name: torch.load(path, weights_only=True)["global_step"] for path in tmp_path.rglob("artifacts/**/*.ckpt")
    }
    assert kept == {f"step={n}.ckpt": n for n in ((2, 4, 5) if log_model == "all" else (5,))}
    assert rows(tmp_path / "mlflow.db", "select value from params where key = 'data/group_size'") == [("2",)]
    at = {int(path.stem.removeprefix("step_")) for path in tmp_path.rglob("samples/step_*.json")}
    found = rows(tmp_path / "mlflow.db", "select step from metrics where key = 'reward/mean'")
    assert at == {step for (step,) in found} == {0, 1, 2, 3, 4}


def test_trackio(process, tmp_path):
    """In a process of its own: Trackio reads its folder when it is imported."""
    pytest.importorskip("trackio")
    folders = [str(ROOT / "tests/integration"), str(ROOT / "tests/helpers")]
    code = f"import sys; sys.path[:0] = {folders!r}; from lit_async_rl.cli.app import main; main(sys.argv[1:])"
    environment = {"TRACKIO_DIR": str(tmp_path / "db")}
    done = process.run(flags("trackio"), tmp_path, environment=environment, code=code, limit_s=150)
    assert done.status == 0, done.said[-3000:]
    database = tmp_path / "db/lit-async-rl.db"
    logged = [json.loads(text) for (text,) in rows(database, "select metrics from metrics")]
    assert {METRIC, "val/pass@1"} <= set().union(*logged)
    assert len([row for row in logged if "samples" in row]) == 2
    assert len(rows(database, "select distinct run_name from metrics")) == 1  # of fit and both validations
    assert list(tmp_path.rglob("metrics.csv"))


def test_trackio_has_one_folder_in_a_process(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", "/elsewhere")
    with pytest.raises(ValueError, match=r"TrackioLogger.save_dir='here' cannot be used: .* writes to /else"):
        rl.TrackioLogger(save_dir="here").experiment  # noqa: B018


# -- the list of metrics ----------------------------------------------------------------------------------------------


def logged_names(tmp_path, callbacks, data=None, **settings):
    """Names in the table of a run."""
    log = CSVLog(tmp_path, name="run")
    fit(make_module(), data or make_data(), 4, callbacks, logger=log, log_every_n_steps=1, **settings)
    with Path(log.log_dir, "metrics.csv").open() as file:
        return set(next(csv.reader(file))) - {"step", "epoch"}


def test_the_list_has_exactly_the_metrics_of_a_run_with_all_monitors(tmp_path):
    monitors = [rl.RolloutMonitor(), rl.StalenessMonitor(), rl.ImportanceMonitor(), rl.ThroughputMonitor()]
    monitors += [rl.GradientMonitor(), rl.LengthBiasMonitor(), rl.BottleneckVerdict(every_n_steps=2)]
    stabilizers = [rl.ESSLearningRate(), rl.GradientAlignmentControl(low=0.0, high=1.0), rl.GradientClipping(1.0)]
    stabilizers += [rl.CollapseAlarm(max_cosine=1.0), rl.AdaptiveStaleness(target_ess_ratio=0.0)]
    held_out = rl.SortDigits(8, size=4, split="held_out")
    few = rl.SortDigits(8, size=4)  # that come again, and have a pass rate then
    data = make_data(prompts=few, val_prompts=held_out, num_val_samples=2)
    names = logged_names(tmp_path, [*monitors, *stabilizers], data, val_check_interval=2, check_val_every_n_epoch=None)
    names |= logged_names(tmp_path, [rl.ReplayMonitor()], make_data(replay=rl.ReplayBuffer(fresh_fraction=0.5)))
    assert not {name for name in names if not find(name)}
    used = {metric.name for name in names for metric in find(name)}
    rare = {"SkipNonFinite", "Evaluation", "EngineCheck", "FreshDataMonitor"}
    rare |= {"JudgeReward", "RewardModel", "LMEvalValidation", "ReplicaScaling", "SFTModule"}  # log in other runs
    rare |= {
        "AgentEngine",
        "CodeReward",
        "EstimatorBlend",
        "RewardHackingMonitor",
        "StalenessController",
        "WeightDriftMonitor",
    }  # likewise
    listed = {metric.name for source, metrics in METRICS.items() if source not in rare for metric in metrics}
    missing = {"staleness/smoothed_kl", "policy/reference_kl", "policy/teacher_divergence"}
    missing |= {"perf/computed_share"}  # with packing
    missing |= {"reward/part/<name>", "perf/steady_staleness"}
    assert listed - used == missing, "with max_kl, with a reference, with several rewards, after eight steps"


def test_each_source_is_a_public_class_and_each_name_is_listed_by_it_once():
    for source, metrics in METRICS.items():
        assert source in rl.NAMES
        assert len({metric.name for metric in metrics}) == len(metrics)
        for metric in metrics:
            assert metric.unit
            assert metric.meaning
