"""Keys of configurations that have another name now."""

import re
from pathlib import Path

import pytest
import yaml

import lit_async_rl as rl
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.cli.config_checks import files_first
from lit_async_rl.utils import renamed_keys
from lit_async_rl.utils.config_files import load_config, own_settings
from lit_async_rl.utils.renamed_keys import MOVED, RENAMED, new_name

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "migration.md").read_text()
OLD = """
base: other.yaml
data:
  scoring: null
  intake:
    class_path: lit_async_rl.Intake
    init_args: {filters+: [DynamicSampling], seed: 3, success_reward: 0.8, curriculum: {class_path: Learnability}}
  max_staleness: 2
"""
NEW = {
    "max_staleness": 2,
    "filters+": ["DynamicSampling"],
    "seed": 3,
    "curriculum": {"class_path": "Learnability"},
    "scoring": {"success_reward": 0.8},
}


def test_every_key_is_in_the_migration_table():
    rows = [row.replace("`", "").split(" | ") for row in TABLE.splitlines() if row.startswith("| `")]
    for old, new in (MOVED | RENAMED).items():
        named = [row[1] for row in rows if old in re.findall(r"[\w.]+", row[0].replace(".init_args", ""))]
        assert any(re.split("[:,]", new)[0] in text for text in named) or old == "data.intake", old


def test_settings_of_a_file_are_read_under_their_old_keys(tmp_path, caplog):
    renamed_keys._warn.cache_clear()
    assert yaml.safe_load(own_settings(OLD)) == {"data": NEW}
    assert "data.intake.seed is now data.seed" in caplog.text
    for text in ("{data: {intake: {seed: 3}}}", "{data: {intake: {seed: 3}, scoring: {tries: 2}}}"):
        assert yaml.safe_load(own_settings(text))["data"]["seed"] == 3
    assert yaml.safe_load(own_settings("{data: {intake: null, group_size: 2}}")) == {"data": {"group_size": 2}}
    (tmp_path / "other.yaml").write_text("data: {intake: {stream_groups: true}}")
    (tmp_path / "run.yaml").write_text("base: other.yaml\ndata: {group_size: 2}")
    assert load_config(tmp_path / "run.yaml") == {"data": {"stream_groups": True, "group_size": 2}}


def test_flags_are_read_under_their_old_names():
    given = [
        "--data.intake.seed=3",
        "--data.intake.init_args.filters+=DynamicSampling",
        "--data.intake.curriculum",
        "X",
    ]
    given += ["--data.intake.curriculum.low", "0.1", "--data.group_size", "2"]
    assert files_first(given) == [
        *("--data.seed=3", "--data.filters+=DynamicSampling", "--data.curriculum", "X"),
        *("--data.curriculum.low", "0.1", "--data.group_size", "2"),
    ]
    with pytest.raises(ValueError, match=r"data\.intake\.at_bound is now data\.admission: Drop or Retry"):
        files_first(["--data.intake.at_bound", "Drop"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data.schedule", "free"], "data.schedule is now data.admission"),
        (["--data.ring.capacity", "3"], "data.ring is now data.admission: {class_path: Ring"),
        (["--data.val_prompts", "null"], "data.val_prompts is now data.validation.prompts"),
        (["--model.warmup_steps", "3"], "model.warmup_steps is now model.scheduler"),
        (["--data.engine", "VLLMServerEngine"], "data.engine=VLLMServerEngine is now RayEngine with replicas"),
        (["--data.engine=VLLMReplicas", "--data.engine.replicas=4"], "data.engine=VLLMReplicas is now RayEngine"),
        (
            ["--data.engine", "{class_path: lit_async_rl.VLLMReplicas}"],
            "data.engine=VLLMReplicas is now RayEngine with",
        ),
    ],
)
def test_older_keys_are_refused_by_one_line_that_names_the_new_one(flags, says, capfd):
    with pytest.raises(SystemExit):
        AsyncRLCLI(["--config", str(ROOT / "configs/quickstart.yaml"), *flags])
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {says}")
    assert new_name("data.group_size") is None


def test_fit_names_the_new_argument():
    with pytest.raises(TypeError, match=r"data\.reward_tries is now scoring\.tries"):
        rl.fit("model", ["1"], len, max_steps=1, reward_tries=2)
    with pytest.raises(AttributeError, match=r"lit_async_rl\.Intake is now arguments of RolloutDataModule"):
        _ = rl.Intake
