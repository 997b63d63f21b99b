"""Freezes what the checked-out commit ships and writes, in `tests/compat/<commit>/`.

    PYTHONPATH=. python tests/compat/make.py

* `configurations.yaml`: the text of all files of `configs/` and of the YAML blocks of the documentation (with the
  Python modules that their pages show), and the command line that uses each of them.
* `run/`: a short asynchronous run of a tiny policy by the command line: `run.yaml` (given behind the quick start), the
  policy, and what the run wrote: `config.yaml`, a checkpoint with groups under way, and a rollout tape.
* `frozen.json`: commit, versions of libraries, and the SHA-256 of every other file.

`test_compat.py` reads the folders of all commits. They are never written again, because they stand for files that users
have; a change of format or of names is tested with a folder of its commit, beside the others. Needs a clean checkout.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from markdown_blocks import blocks, blocks_of  # noqa: E402

QUICKSTART = "configs/quickstart.yaml"
GSM8K = "configs/gsm8k_grpo.yaml"
CALCULATOR = "configs/calculator.yaml"
BENCH = "configs/bench/base.yaml"
TOOLS = "configs/time_to_accuracy/tools.yaml"
ALONE = (QUICKSTART, GSM8K, CALCULATOR, BENCH, "configs/smollm2.yaml", "configs/time_to_accuracy/lengths.yaml")
BEHIND_OTHERS = {
    "configs/gsm8k_grpo_vllm.yaml": GSM8K,
    "configs/multi_node_vllm.yaml": GSM8K,
    "configs/systems/sampo.yaml": CALCULATOR,
    TOOLS: CALCULATOR,
}
NEED_DOWNLOADS = (
    GSM8K,
    "configs/gsm8k_grpo_vllm.yaml",
    "configs/multi_node_vllm.yaml",
    "configs/smollm2.yaml",
    "configs/time_to_accuracy/lengths.yaml",
)
OF_BENCHMARKS = ("workloads.yaml", "systems.yaml")  # read by a benchmark, as the suites are
RUN = """\
# Behind configs/quickstart.yaml: a tiny policy, and much that keeps state. Two slots of the engine, so that a
# checkpoint finds groups in every state: finished, being sampled, waiting.
model: {model: policy, learning_rate: 1.0e-3}
data:
  prompts: {class_path: SortDigits, init_args: {num_digits: 6, size: 1000}}
  reward: lit_async_rl.rewards.share_correct
  engine: {class_path: EmbeddedEngine, init_args: {num_slots: 2}}
  max_staleness: 2
  groups_per_step: 4
  group_size: 4
  sampling: {max_tokens: 10, head: 2}
  curriculum: Learnability
  validation: {prompts: {class_path: SortDigits, init_args: {num_digits: 6, size: 16, split: held_out}}, batch_size: 16}
trainer:
  max_steps: 5
  val_check_interval: 100
  enable_progress_bar: false
  logger: {init_args: {save_dir: logs}}
  callbacks+:
    - {class_path: RolloutTape, init_args: {folder: tape}}
    - {class_path: CollapseAlarm}
    - {class_path: AdaptiveStaleness}
    - {class_path: GradientClipping}
defaults:
  checkpoint: {init_args: {every_n_train_steps: 3}}
"""


def main() -> None:
    """Writes the folder of the checked-out commit."""
    if subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "lit_async_rl", "callbacks", "configs", "docs"]
    ).returncode:
        sys.exit("error: the working tree differs from its commit: what is frozen must be what a commit has")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    folder = ROOT / "tests" / "compat" / commit[:7]
    if folder.exists():
        sys.exit(f"error: {folder} is there, and stays as it is")
    folder.mkdir()
    write_configurations(folder / "configurations.yaml")
    run(folder / "run")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    made = {
        "commit": commit,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "lightning", "transformers", "jsonargparse", "pyarrow")},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
    }
    (folder / "frozen.json").write_text(json.dumps(made, indent=1) + "\n")
    print(f"{folder}: {len(files)} files, {sum(map(len, files.values())):,} bytes")


def write_configurations(path: Path) -> None:
    """One YAML file with the text of all others, and the command lines that use them."""
    shipped = {
        file.relative_to(ROOT).as_posix(): file.read_text() for file in sorted((ROOT / "configs").rglob("*.yaml"))
    }
    pages, of_the_pages = {}, {}
    for block in blocks("yaml", "python"):
        folder = f"pages/{block.page.relative_to(ROOT).with_suffix('').as_posix()}"
        if block.language == "yaml" and block.reason is None:
            pages[name := f"{folder}/line_{block.line}.yaml"] = block.code
            of_the_pages[name] = f"--config {QUICKSTART} --config {name}"
            for module in blocks_of(block.page):
                if module.language == "python" and module.module:
                    pages[f"{folder}/{module.module}.py"] = ""
    for name in pages:
        if name.endswith(".py"):
            page = ROOT / Path(name).parent.relative_to("pages").with_suffix(".md")
            pages[name] = "\n".join(block.code for block in blocks_of(page) if block.module == Path(name).stem)
    commands = {
        name: command(name) for name in shipped if "suites" not in name and Path(name).name not in OF_BENCHMARKS
    }
    frozen = {
        "commands": commands,
        "need_downloads": sorted(NEED_DOWNLOADS),
        "commands_of_the_documentation": of_the_pages,
        "files": shipped | pages,
    }
    path.write_text(yaml.dump(frozen, Dumper=Blocks, sort_keys=False, width=10**6, allow_unicode=True))


class Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Blocks.add_representer(str, _represent_text)


def command(name: str) -> str:
    """The arguments of `lit-async-rl train` with one shipped file, behind the file that it needs."""
    folder = Path(name).parent.name
    base = BENCH if folder in ("methods", "regimes") else BEHIND_OTHERS.get(name, QUICKSTART)
    files = [name] if name in ALONE else [base, name]
    flags = " --trainer.accelerator cpu --trainer.devices 8" if folder == "strategies" else ""
    return " ".join(f"--config {file}" for file in files) + flags


def make_policy(folder: Path) -> None:
    """A randomly initialized policy of 11,000 parameters, with a token for each digit."""
    symbols = {token: number for number, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(symbols, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path) -> None:
    """Trains five steps by the command line, and keeps the checkpoint of the third and the tape."""
    with tempfile.TemporaryDirectory() as place:
        at = Path(place)
        (at / "configs").symlink_to(ROOT / "configs")
        make_policy(at / "policy")
        (at / "run.yaml").write_text(RUN)
        words = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", QUICKSTART, "--config", "run.yaml"]
        subprocess.run(words, cwd=at, check=True, timeout=300)
        (logs,) = (at / "logs" / "quickstart").iterdir()
        (checkpoint,) = logs.glob("checkpoints/*step=3*.ckpt")
        check_contents(torch.load(checkpoint, weights_only=True))
        shutil.copytree(at / "policy", folder / "policy")
        shutil.copytree(at / "tape", folder / "tape")
        for file, name in (
            (at / "run.yaml", "run.yaml"),
            (logs / "config.yaml", "config.yaml"),
            (checkpoint, "step=3.ckpt"),
        ):
            shutil.copy(file, folder / name)


def check_contents(checkpoint: dict) -> None:
    """The checkpoint must hold what a resume may find: groups that are finished, begun and waiting, and callbacks."""
    groups = checkpoint["RolloutDataModule"]["groups"]
    finished = groups["groups"][:, 4].bool()
    reasons = groups["rows"][:, 2].tolist()
    found = {
        "finished groups": int(finished.sum()),
        "unfinished groups": int((~finished).sum()),
        "finished completions": len(reasons) - reasons.count(2),
        "completions begun": reasons.count(2),
        "callbacks with state": len(checkpoint["callbacks"]),
        "moments of the optimizer": len(checkpoint["optimizer_states"][0]["state"]),
    }
    print(found)
    if not all(found.values()) or found["finished groups"] < 8:  # the test resumes for two steps of four groups
        sys.exit(
            "error: the checkpoint must hold all of these, and 8 finished groups: remove the folder, run this again"
        )


if __name__ == "__main__":
    main()
