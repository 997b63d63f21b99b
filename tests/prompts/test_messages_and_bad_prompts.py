"""Prompts that are messages, in every format; bad prompts end a run with file and line, or are left out and counted."""

import dataclasses
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from flow import make_data, make_module

import lit_async_rl as rl
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import HuggingFacePrompts, JsonlPrompts, ParquetPrompts, PromptSource
from lit_async_rl.prompts.stream import PromptStream, UsablePrompts, UsableSubset

KINDS = ["jsonl", "parquet", "dataset"]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def make(tmp_path):
    def open_rows(kind, rows, **settings):
        file = tmp_path / f"rows.{kind}"
        if kind == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return JsonlPrompts(str(file), **settings)
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            return ParquetPrompts(str(file), **settings)
        datasets.Dataset.from_list(rows).save_to_disk(file)
        return HuggingFacePrompts(str(file), **settings)

    return open_rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_messages_is_a_prompt_in_every_format(kind, make):
    source = make(kind, [{"prompt": CHAT, "answer": "4", "level": 1}])
    assert source[0] == Prompt(messages=CHAT, answer="4", metadata={"level": 1})
    assert source[0].text == "system: be brief\nuser: 2 + 2?"


MISTAKES = {
    "no role": ([{"content": "hi"}], "message 0 must have a role"),
    "unknown role": ([{"role": "robot", "content": "hi"}], "one of system, developer, user, assistant, tool"),
    "no text": ([*CHAT, {"role": "user", "content": None}], "message 2 must have text as its content"),
    "system last": ([CHAT[1], CHAT[0]], "the last message must be from the user, a tool or the assistant, not system"),
    "nothing": ([], "at least one message"),
    "no messages": (["hi"], "message 0 must have a role"),
}


@pytest.mark.parametrize(("messages", "words"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_messages_are_named_with_file_and_line(messages, words, make):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2, prompt_field='prompt'") as error:
        make("jsonl", [{"prompt": CHAT, "answer": 1}, {"prompt": messages, "answer": 1}])
    assert words in str(error.value)


def test_a_template_is_for_text_only(make):
    with pytest.raises(ValueError, match=r"line 1.*holds messages, but template='Q: {prompt}' is for text prompts"):
        make("jsonl", [{"prompt": CHAT, "answer": 1}], template="Q: {prompt}")


def test_a_prompt_is_text_or_messages():
    for wrong in ({}, {"text": "a", "messages": CHAT}):
        with pytest.raises(ValueError, match="a prompt"):
            Prompt(**wrong)
    prompt = Prompt(messages=CHAT)
    assert dataclasses.replace(prompt, answer="4").messages == prompt.messages
    assert Prompt(messages=[{**CHAT[1], "tool_calls": None}]).messages == (CHAT[1],)


# -- bad prompts ------------------------------------------------------------------------------------------------------


def letters(prompt):
    return prompt.text


BAD = [{"prompt": "q" * n if n % 3 else None, "answer": n} for n in range(12)]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_prompts_are_left_out_of_the_order_and_counted(kind, make, caplog):
    source = make(kind, BAD, max_prompt_tokens=8, on_bad_prompt="skip")
    good = {n for n in range(12) if n % 3 and n <= 8}
    for at_start in (True, False):
        stream = PromptStream(source, seed=1)
        stream.usable = UsablePrompts(source, letters)
        stream.usable.check(100 if at_start else 0)
        epochs = [[len(stream.next().text) for _ in good] for _ in range(3)]
        assert all(set(epoch) == good for epoch in epochs)
        resumed = PromptStream(source, seed=1)
        resumed.usable = UsablePrompts(source, letters)
        resumed.load_state_dict(stream.state_dict())
        assert [stream.next() for _ in range(9)] == [resumed.next() for _ in range(9)]
        assert len(stream.usable.left_out) == 12 - len(good)
    assert "prompts left out so far (on_bad_prompt=skip): 1 of 12; the latest problem: " in caplog.text
    assert len(UsableSubset(source, letters)) == len(good)


@pytest.mark.parametrize(("own", "engine", "words"), [(8, 9, "max_prompt_tokens=8"), (9, 8, "because of the engine")])
def test_a_prompt_that_is_too_long_ends_the_run_with_file_and_line(own, engine, words, make):
    source = make("jsonl", [{"prompt": "q" * n, "answer": n} for n in (3, 9)], max_prompt_tokens=own)
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: the prompt has 9 tokens, more than {words}"):
        UsablePrompts(source, letters, engine, why="because of the engine").check()


def test_when_no_prompt_is_left_the_run_ends(make):
    source = make("jsonl", BAD[:4], max_prompt_tokens=1, on_bad_prompt="skip", prompt_field="wrong")
    stream = PromptStream(source)
    stream.usable = UsablePrompts(source, letters)
    with pytest.raises(ValueError, match=r"on_bad_prompt=skip left out all 4 prompts.*prompt_field='wrong'"):
        stream.next()


@pytest.mark.parametrize("settings", [{"max_prompt_tokens": 0}, {"on_bad_prompt": "ignore"}])
def test_wrong_settings_for_bad_prompts_are_refused(settings, make):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        make("jsonl", [{"prompt": "q", "answer": 1}], **settings)


def test_a_source_of_ones_own_is_named_with_the_number_of_the_prompt():
    class Numbers(PromptSource):
        max_prompt_tokens = 1

        def __len__(self):
            return 20

        def __getitem__(self, index):
            return Prompt(text=str(index))

    with pytest.raises(ValueError, match="Numbers, prompt 10: the prompt has 2 tokens, more than max_prompt_tokens=1"):
        UsablePrompts(Numbers(), letters).check()


def sampled(where, source):
    """Held-out prompts that a run samples, in validation or in `Evaluation`; its model has 256 positions."""
    data, module = make_data(val_prompts=source if where == "validation" else None), make_module()
    evaluation = rl.Evaluation({"mine": source}, max_block_s=30.0)
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    callbacks = [evaluation] if where == "Evaluation" else []
    rl.Trainer(accelerator="cpu", max_steps=1, callbacks=callbacks, **off).fit(module, datamodule=data)
    if where == "validation":
        return [sample.prompt for sample in module.validator.samples]
    assert len(evaluation.results) == 1
    return [question.prompt for question in evaluation._questions]


TOO_LONG = {
    "validation": "the model's context of 256 tokens leaves besides validation's sampling.max_tokens=10",
    "Evaluation": "the engine's max_model_len=256 leaves besides Evaluation's sampling.max_tokens=10",
}


@pytest.mark.parametrize("where", TOO_LONG)
def test_a_held_out_prompt_that_is_too_long_is_left_out_or_named(where, make):
    rows = [{"prompt": "2" * (n - 1) + "=", "answer": "2"} for n in (3, 3001, 246, 247)]
    source = make("jsonl", rows, on_bad_prompt="skip")
    assert sampled(where, source) == [source[0], source[2]]
    with pytest.raises(
        ValueError, match="rows.jsonl, line 2: the prompt has 3001 tokens, more than " + TOO_LONG[where]
    ):
        sampled(where, make("jsonl", rows))
