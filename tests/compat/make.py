"""Freezes what the checked-out commit ships and writes, in `tests/compat/<commit>/`.

    PYTHONPATH=. python tests/compat/make.py

* `configurations.yaml`: the text of all files of `configs/` and of the YAML blocks of the documentation (with the
  Python modules that their pages show), and the command line that uses each of them.
* `run/`: short asynchronous runs of a tiny policy, with a code reward and a judge among its rewards. One by the command
  line (`run.yaml`, given behind the quick start of the commit), one by `rl.fit` (`fit.py`), and what they wrote:
  `config.yaml`, checkpoints with groups under way, and rollout tapes.
* `frozen.json`: commit, versions of libraries, and the SHA-256 of every other file.

`test_compat.py` reads the folders of all commits. They are never written again, because they stand for files that users
have; a change of format or of names is tested with a folder of its commit, beside the others. Needs a clean checkout.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
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

from lit_async_rl.utils.config_files import with_bases  # noqa: E402

QUICKSTART = "configs/quickstart.yaml"
GSM8K = "configs/gsm8k_grpo.yaml"
CALCULATOR = "configs/calculator.yaml"
BENCH = "configs/bench/base.yaml"
TOOLS = "configs/time_to_accuracy/tools.yaml"
AGENT = "configs/time_to_accuracy/agent.yaml"
ALONE = (QUICKSTART, GSM8K, CALCULATOR, BENCH, "configs/smollm2.yaml", "configs/time_to_accuracy/lengths.yaml")
BEHIND_OTHERS = {
    "configs/gsm8k_grpo_vllm.yaml": GSM8K,
    "configs/multi_node_vllm.yaml": GSM8K,
    "configs/systems/sampo.yaml": CALCULATOR,
    TOOLS: CALCULATOR,
    "configs/time_to_accuracy/agent_process.yaml": AGENT,
}
NEED_DOWNLOADS = (
    GSM8K,
    "configs/gsm8k_grpo_vllm.yaml",
    "configs/multi_node_vllm.yaml",
    "configs/smollm2.yaml",
    "configs/time_to_accuracy/lengths.yaml",
)
OF_BENCHMARKS = ("workloads.yaml", "systems.yaml")  # read by a benchmark, as the suites are
OF_CLUSTERS = ("clusters", "sweeps", "ray.yaml")  # read by other programs, or started on Ray before they are parsed
RUN = """\
# Behind configs/quickstart.yaml: a tiny policy, and much that keeps state. Two slots of the engine, so that a
# checkpoint finds groups in every state: finished, being sampled, waiting.
model: {model: policy, learning_rate: 1.0e-3}
data:
  prompts: {class_path: JsonlPrompts, init_args: {path: prompts.jsonl}}
  reward:
    class_path: lit_async_rl.CombinedReward
    init_args:
      rewards:
        digits: lit_async_rl.rewards.share_correct
        code: {class_path: lit_async_rl.CodeReward, init_args: CODE}
        judge: {class_path: lit_async_rl.JudgeReward, init_args: JUDGE}
      weights: {judge: 0.1}
  scoring: {timeout_s: 300}
  engine: {class_path: EmbeddedEngine, init_args: {num_slots: 2}}
  max_staleness: 4
  groups_per_step: 2
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
# a program is a row of digits, and prints itself
CODE = "{languages: {digits: cat main.digits}, language: digits, extract: whole, allow_unsandboxed: true}"
JUDGE = (
    "{model: judge, engine: {class_path: EmbeddedEngine, init_args: {num_slots: 2}}, max_tokens: 4, on_unreadable: 0.0}"
)
FIT = '''\
"""`rl.fit` with rewards of this file; `python fit.py STEPS [CHECKPOINT]`."""

import json
import sys

import lit_async_rl as rl


def no_zeros(prompt, completion, penalty=0.25):
    return -penalty * completion.count("0")


def scaled(reward, scale):
    return lambda prompt, completion: scale * reward(prompt, completion)


def main(max_steps, ckpt_path=None):
    parts = {
        "digits": rl.share_correct,
        "zeros": scaled(no_zeros, 0.5),
        "code": rl.CodeReward(
            languages={"digits": "cat main.digits"}, language="digits", extract="whole", allow_unsandboxed=True
        ),
        "judge": rl.JudgeReward(
            model="judge", engine=rl.EmbeddedEngine(num_slots=2), max_tokens=4, on_unreadable=0.0
        ),
    }
    return rl.fit(
        "policy",
        [json.loads(line) for line in open("prompts.jsonl")],
        rl.CombinedReward(parts, weights={"judge": 0.1}),
        max_steps=max_steps,
        ckpt_path=ckpt_path,
        max_staleness=4,
        groups_per_step=2,
        group_size=4,
        engine=rl.EmbeddedEngine(num_slots=2),
        sampling={"max_tokens": 10},
        scoring={"timeout_s": 300},
        callbacks=[
            rl.RolloutTape("tape"),
            rl.GradientClipping(),
            rl.LinkedCheckpoint(every_n_train_steps=3, save_top_k=-1),
        ],
        accelerator="cpu",
        default_root_dir="runs",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
'''


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
    (folder / "run").mkdir(parents=True)
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
        name: command(name) for name in shipped if not {"suites", *OF_BENCHMARKS, *OF_CLUSTERS} & set(Path(name).parts)
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


def make_policy(folder: Path, is_judge: bool = False) -> None:
    """A randomly initialized policy of 11,000 parameters, with a token for each digit."""
    symbols = {token: number for number, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(symbols, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    settings = {"chat_template": chat_template} if is_judge else {}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **settings
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096 if is_judge else 64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_prompts(path: Path) -> None:
    """Writes prompts whose answers are graded, and are what a program has to print."""
    chance = random.Random(0)
    rows = ["".join(chance.choices("0123456789", k=6)) for _ in range(200)]
    records = [
        {"prompt": f"{row}=", "answer": "".join(sorted(row)), "inputs": [""], "outputs": ["".join(sorted(row))]}
        for row in rows
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(folder: Path) -> None:
    """Trains by the command line and by `rl.fit`; keeps the checkpoint of the third step, and the tape, of each."""
    with tempfile.TemporaryDirectory() as place:
        at = Path(place)
        (at / "configs").symlink_to(ROOT / "configs")
        make_policy(at / "policy")
        make_policy(at / "judge", is_judge=True)
        make_prompts(at / "prompts.jsonl")
        (at / "run.yaml").write_text(RUN.replace("CODE", CODE).replace("JUDGE", JUDGE))
        (at / "fit.py").write_text(FIT)
        words = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", QUICKSTART, "--config", "run.yaml"]
        subprocess.run(words, cwd=at, check=True, timeout=300)
        (logs,) = (at / "logs" / "quickstart").iterdir()
        (checkpoint,) = logs.glob("checkpoints/*step=3*.ckpt")
        check_contents(torch.load(checkpoint, weights_only=True))
        for name in ("policy", "judge", "tape"):
            shutil.copytree(at / name, folder / name)
        for file in ("run.yaml", "prompts.jsonl", "fit.py"):
            shutil.copy(at / file, folder)
        for file in with_bases(ROOT / QUICKSTART):
            copy = folder / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        shutil.copy(logs / "config.yaml", folder)
        shutil.copy(checkpoint, folder / "step=3.ckpt")

        shutil.rmtree(at / "tape")
        subprocess.run(
            [sys.executable, "fit.py", "5"], cwd=at, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        (checkpoint,) = (at / "runs").glob("**/checkpoints/*step=3*.ckpt")
        check_contents(torch.load(checkpoint, weights_only=True))
        shutil.copytree(at / "tape", folder / "fit_tape")
        shutil.copy(checkpoint, folder / "fit_step=3.ckpt")


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
    if not all(found.values()) or found["finished groups"] < 4:  # the test resumes for two steps of two groups
        sys.exit(
            "error: the checkpoint must hold all of these, and 4 finished groups: remove the folder, run this again"
        )


if __name__ == "__main__":
    main()
