"""Tokenizers and chat templates of model families: prompts, ends and loss masks are the template's own rendering.

`tests/helpers/chat_families.py` holds the families. Expected texts are put together from formats, without jinja, and
encoded with the `tokenizers` library alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from chat_families import ANSWER, FAMILIES, QUESTION, SECOND, SYSTEM, TOOL, Family, write

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.environments.episode_engine import Conversation
from lit_async_rl.models.end_tokens import stored_end_tokens, stored_eos_token_ids
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt

CHATS = [name for name, family in FAMILIES.items() if family.template]


@cache
def codec_of(name: str) -> TextCodec:
    return TextCodec(write(FAMILIES[name], Path(mkdtemp())))


def raw_ids(codec: TextCodec, text: str) -> tuple[int, ...]:
    return tuple(codec.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def conversation(name: str, *texts: str, **metadata: object) -> Prompt:
    """Question, answer, ... after a system message, if the family takes one."""
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if takes_system(name):
        messages.insert(0, {"role": "system", "content": SYSTEM})
    return Prompt(messages=messages, metadata=metadata)


def takes_system(name: str) -> bool:
    family = FAMILIES[name]
    return bool(family.system or family.first) and not family.refuses_system


def family_history(name: str) -> str:
    """What stands between the beginning of an answer and its text, such as an empty thought."""
    family = FAMILIES[name]
    return family.history.removeprefix(family.generate).lstrip()


def expected(name: str, *texts: str, **how: bool) -> str:
    return FAMILIES[name].expected(*texts, system=SYSTEM if takes_system(name) else None, **how)


def test_the_matrix_has_enough_families() -> None:
    assert len(CHATS) >= 33
    assert {family.kind for family in FAMILIES.values()} == {"bytes", "llama", "first", "gemma", "unigram", "wordpiece"}


@pytest.mark.parametrize("name", CHATS)
def test_a_prompt_of_messages_is_the_rendering(name: str) -> None:
    codec = codec_of(name)
    assert codec.encode(conversation(name, QUESTION)) == raw_ids(codec, expected(name, QUESTION))


@pytest.mark.parametrize("name", CHATS)
def test_a_rendered_text_is_the_same_prompt(name: str) -> None:
    """No second BOS, no EOS, whatever the tokenizer adds."""
    codec, text = codec_of(name), expected(name, QUESTION)
    bos = FAMILIES[name].bos
    if FAMILIES[name].adds and not text.startswith(bos):  # templates without the BOS that the tokenizer adds
        text = f"{bos}{text}"
    assert codec.encode(Prompt(text=text)) == raw_ids(codec, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_text_begins_as_the_tokenizer_says_and_has_no_end(name: str) -> None:
    codec, family = codec_of(name), FAMILIES[name]
    before = {"": (), "eos": (), "bos": (family.bos,), "both": (family.bos,)}[family.adds]
    begin = tuple(codec.tokenizer.convert_tokens_to_ids(token) for token in before)
    assert codec.encode(Prompt(text=QUESTION)) == begin + raw_ids(codec, QUESTION)


@pytest.mark.parametrize("name", FAMILIES)
def test_completions_end_at_each_end(name: str) -> None:
    codec, family = codec_of(name), FAMILIES[name]
    assert {codec.tokenizer.convert_ids_to_tokens(token) for token in stored_eos_token_ids(codec.model)} == {
        *family.ends
    }
    assert codec.ends.turn_ends_with_token


@pytest.mark.parametrize("name", CHATS)
def test_an_answer_that_has_begun_is_continued(name: str) -> None:
    codec, family = codec_of(name), FAMILIES[name]
    prompt = conversation(name, QUESTION, "It is")
    if family.joins_last:  # its template forgets the system message then
        with pytest.raises(ValueError, match=r"leaves out message 0 \(role system\)"):
            codec.encode(prompt)
        prompt = Prompt(messages=(prompt.messages or ())[1:])
    whole = expected(name, QUESTION, ANSWER, generate=False)
    if family.joins_last:
        whole = whole.replace(f"{SYSTEM}\n\n", "")
    begun = whole[: whole.index(ANSWER)] + family.last + "It is"
    assert codec.encode(prompt) == raw_ids(codec, begun)


@pytest.mark.parametrize("name", CHATS)
def test_the_prefix_column_is_right(name: str) -> None:
    """A family is stable if a rendering with n+1 messages begins with that of n, generation prompts included."""
    codec = codec_of(name)

    def render(*texts: str, generate: bool) -> str:
        messages = [dict(message) for message in conversation(name, *texts).messages or ()]
        return str(codec.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))

    asked = render(QUESTION, generate=True)
    answered = render(QUESTION, ANSWER, generate=False)
    again = render(QUESTION, ANSWER, SECOND, generate=True)
    assert FAMILIES[name].stable == (answered.startswith(asked) and again.startswith(answered))
    assert again == expected(name, QUESTION, ANSWER, SECOND)


@pytest.mark.parametrize("name", [name for name in CHATS if FAMILIES[name].stable and FAMILIES[name].ends_in_turns])
def test_turns_are_the_rendering_and_only_answers_train(name: str) -> None:
    """A conversation token by token: the policy's turn up to its end token, then the environment's text."""
    codec = codec_of(name)
    prompt = conversation(name, QUESTION)
    whole_text = expected(name, QUESTION, ANSWER, SECOND)
    whole = codec.tokenizer.backend_tokenizer.encode(whole_text, add_special_tokens=False)
    prompt_ids = codec.encode(prompt)
    assert tuple(whole.ids[: len(prompt_ids)]) == prompt_ids
    ends = set(stored_eos_token_ids(codec.model))
    end = next(n for n in range(len(prompt_ids), len(whole.ids)) if whole.ids[n] in ends)
    turn = tuple(whole.ids[len(prompt_ids) : end + 1])
    request = GenerationRequest(id=0, prompt_ids=prompt_ids, num_samples=1, sampling=SamplingParams(), prompt=prompt)
    talk = Conversation(request, 0)
    zeros = dict(logprobs=(0.0,) * len(turn), versions=(0,) * len(turn))
    talk.add_sampled(
        Completion(request_id=0, sample_index=0, token_ids=turn, finish_reason="stop", **zeros), talk.state
    )
    assert codec.decode(turn).strip() == f"{family_history(name)}{ANSWER}"
    answer_end = whole_text.index(ANSWER) + len(ANSWER)
    end_text = codec.tokenizer.convert_ids_to_tokens(whole.ids[end])
    observed = whole_text[whole_text.index(end_text, answer_end) + len(end_text) :]
    talk.add_given(codec.encode_continuation(observed))
    following = talk.next_request()
    assert following.prompt_ids == tuple(whole.ids)
    mask = [False] * len(prompt_ids) + talk.loss_mask
    assert mask == [len(prompt_ids) <= n <= end for n in range(len(whole.ids))]


@pytest.mark.parametrize("name", CHATS)
def test_tools_are_rendered_or_refused_by_name(name: str) -> None:
    codec = codec_of(name)
    prompt = conversation(name, QUESTION, tools=[TOOL])
    if not FAMILIES[name].tools:
        with pytest.raises(ValueError, match=r"a prompt's .* set tools, which the chat template of .* does not read"):
            codec.encode(prompt)
        return
    text = codec.tokenizer.decode(codec.encode(prompt))
    for part in ("look_up", QUESTION):
        assert part.replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize("name", CHATS)
def test_switches_of_thinking_are_rendered_or_refused_by_name(name: str) -> None:
    codec, family = codec_of(name), FAMILIES[name]
    switch = family.switch or "enable_thinking"
    prompt = conversation(name, QUESTION, chat_template_kwargs={switch: family.switch_value})
    if not family.switch:
        with pytest.raises(ValueError, match=r"set enable_thinking, which the chat template of .* does not read"):
            codec.encode(prompt)
        return
    assert codec.encode(prompt) == raw_ids(codec, expected(name, QUESTION, switched=True))


@pytest.mark.parametrize("name", [name for name in CHATS if FAMILIES[name].refuses_system])
def test_a_system_message_is_refused_with_the_words_of_the_template(name: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with pytest.raises(ValueError, match=r"refuses a prompt with the roles system, user: .*(not supported|alternate)"):
        codec_of(name).encode(Prompt(messages=messages))


@pytest.mark.parametrize("name", [name for name in CHATS if FAMILIES[name].tags])
@pytest.mark.parametrize("special_tokens", ["tags", "none", "all"])
def test_thinking_tags_are_in_the_text_as_chosen(name: str, special_tokens: str) -> None:
    codec, family = codec_of(name), FAMILIES[name]
    begin, end = family.tags
    stop = codec.tokenizer.convert_ids_to_tokens(stored_eos_token_ids(codec.model)[0])
    ids = raw_ids(codec, f"{begin}a{end}4{stop}")
    codec.special_tokens = special_tokens
    try:
        text = codec.decode(ids)
    finally:
        codec.special_tokens = "tags"
    are_special = begin in family.special
    assert (
        text
        == {
            "tags": f"{begin}a{end}4",
            "none": "a4" if are_special else f"{begin}a{end}4",
            "all": f"{begin}a{end}4{stop}",
        }[special_tokens]
    )


def test_parts_of_text_are_joined_and_other_parts_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": QUESTION[:4]}, {"type": "text", "text": QUESTION[4:]}]
    assert Prompt(messages=[{"role": "user", "content": parts}]).messages == ({"role": "user", "content": QUESTION},)
    with pytest.raises(ValueError, match="message 0 has a part of type image_url; only text parts can be read"):
        Prompt(messages=[{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ValueError, match="message 0 must have text as its content"):
        Prompt(messages=[{"role": "user", "content": []}])


def without_tokens(tmp_path: Path) -> TextCodec:
    chatml = FAMILIES["yi"]
    family = Family(special=("<eos>",), eos="<eos>", config=("<eos>",), ends=("<eos>",), template=chatml.template)
    return TextCodec(write(family, tmp_path))


def test_a_template_whose_turn_cannot_end_is_refused(tmp_path: Path) -> None:
    """A base model with a ChatML template whose tags are no tokens writes its end as text, and never stops at it."""
    codec = without_tokens(tmp_path)
    with pytest.raises(
        ValueError, match=r"ends a turn with '<\|im_end\|>', which is not a token .*set sampling.stop: "
    ):
        codec.check_turn_end(has_messages=True, can_stop=False)
    codec.check_turn_end(has_messages=True, can_stop=True)
    codec.check_turn_end(has_messages=False, can_stop=False)


def test_tokens_within_a_turn_are_no_ends(tmp_path: Path) -> None:
    """gpt-oss ends its reasoning with `<|end|>`, which a stale tokenizer file may name as the end of a text."""
    harmony = FAMILIES["gpt-oss"]
    stale = {**vars(harmony), "eos": "<|end|>"}
    codec = TextCodec(write(Family(**stale), tmp_path))
    named = [codec.tokenizer.convert_ids_to_tokens(token) for token in codec.ends.ids]
    assert set(named) == {*harmony.ends}
    assert [codec.tokenizer.convert_ids_to_tokens(token) for token in codec.ends.left_out] == ["<|end|>"]


def test_one_line_names_what_was_found_where() -> None:
    codec = codec_of("qwen2.5-base")
    assert stored_end_tokens(codec.model).are_disputed
    line = codec.ends.describe(codec.tokenizer)
    assert "0 '<|endoftext|>', 2 '<|im_end|>'" in line
    assert "(generation_config: 0 '<|endoftext|>'; config: 0 '<|endoftext|>'; tokenizer: 0 '<|endoftext|>'; " in line
    assert "chat template: 2 '<|im_end|>')" in line
    assert "sampling.end_token_ids: [0]" in line
    assert not codec_of("qwen2.5").ends.are_disputed


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    """As gpt-oss does with a system message that is not the first."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "system", "content": SYSTEM}] * 2
    messages = [messages[0], {"role": "assistant", "content": ANSWER}, messages[1], messages[0]]
    with pytest.raises(ValueError, match=r"leaves out message 2 \(role system\)"):
        codec_of("gpt-oss").encode(Prompt(messages=messages))
