"""Conversations of every family are continued token by token; what a template does to earlier turns does not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_runs import CODEC, TEMPLATE, user
from chat_families import ANSWER, FAMILIES, QUESTION, SECOND, write

from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.parsing import TaggedParser, TextParser
from lit_async_rl.agents.rendering import ChatRenderer, checked_call_messages, checked_tools, kind_of, message_key
from lit_async_rl.models.end_tokens import stored_eos_token_ids
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt

TEMPLATES = Path(__file__).parent / "templates"
DEEP = json.loads("[" * 200 + "]" * 200)
CHATS = [name for name, family in FAMILIES.items() if family.template]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    made: dict[str, TextCodec] = {}

    def codec_of(name: str) -> TextCodec:
        if name not in made:
            made[name] = TextCodec(write(FAMILIES[name], tmp_path_factory.mktemp(name)))
        return made[name]

    return codec_of


def turn_of(codec: TextCodec, text: str) -> tuple[int, ...]:
    end = next(iter(stored_eos_token_ids(codec.model)))
    return (*codec.encode_continuation(text), end)


def talk_of() -> list[dict]:
    return [user(QUESTION), {"role": "assistant", "content": ANSWER}, user(SECOND)]


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_is_continued_whatever_the_template_does(codecs, name):
    codec = codecs(name)
    renderer = ChatRenderer(codec)
    assert renderer.problem is None, name
    asked = renderer.segments([user(QUESTION)])
    assert renderer.encode(asked[0]) == codec.encode(Prompt(messages=[user(QUESTION)]))
    segments = renderer.segments(talk_of(), sampled=(1,))
    assert renderer.is_continued(asked, segments[:-1], roles=["user"])
    turn = turn_of(codec, ANSWER)
    assert SECOND in codec.tokenizer.decode(renderer.encode_after(turn, segments[-1]))


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_read_whatever_their_role_is_called(name, role):
    """OpenAI's clients name it `developer` today, which few templates write."""
    renderer = ChatRenderer(CODEC, (TEMPLATES / f"{name}.jinja").read_text())
    (text,) = renderer.segments([{"role": role, "content": "SECRET RULE"}, user(QUESTION)])
    assert "SECRET RULE" in text


def test_instructions_that_a_template_leaves_out_are_refused():
    template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    renderer = ChatRenderer(CODEC, template)
    assert renderer.segments([user(QUESTION)]) == [QUESTION]
    for role in ("system", "developer"):
        empty = {"role": role, "content": " \n"}
        assert renderer.segments([user(QUESTION), empty, user(SECOND)]) == [QUESTION + SECOND]
        with pytest.raises(AgentCallError, match=rf"leaves out messages\[1\], of the role {role}"):
            renderer.segments([user(QUESTION), {"role": role, "content": "rule"}, user(SECOND)])


@pytest.mark.parametrize("name", [name for name in CHATS if FAMILIES[name].stable and FAMILIES[name].ends_in_turns])
def test_the_tokens_of_a_conversation_are_those_of_its_rendering(codecs, name):
    """With templates that only append, and a policy that has written what they would write."""
    codec = codecs(name)
    renderer = ChatRenderer(codec)
    text = codec.tokenizer.apply_chat_template(talk_of(), tokenize=False, add_generation_prompt=True)
    whole = renderer.encode(str(text))
    prompt_ids = renderer.encode(renderer.segments([user(QUESTION)])[0])
    assert whole[: len(prompt_ids)] == prompt_ids
    ends = set(stored_eos_token_ids(codec.model))
    end = next(n for n in range(len(prompt_ids), len(whole)) if whole[n] in ends)
    turn = whole[len(prompt_ids) : end + 1]
    segments = renderer.segments(talk_of(), sampled=(1,))
    assert (*prompt_ids, *turn, *renderer.encode_after(turn, segments[-1])) == whole


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_reasoning_that_the_template_strips_later_stays(codecs, name):
    """Its ids were read and sampled; a rendering of the whole history has them no more."""
    codec = codecs(name)
    renderer = ChatRenderer(codec)
    (asked,) = renderer.segments([user(QUESTION)])
    reasoned = turn_of(codec, f"<think>two and two</think>{ANSWER}")
    talk = [user(QUESTION), {"role": "assistant", "content": f"<think>two and two</think>{ANSWER}"}, user(SECOND)]
    segments = renderer.segments(talk, sampled=(1,))
    assert renderer.is_continued([asked], segments[:-1], roles=["user"])
    whole = (*renderer.encode(asked), *reasoned, *renderer.encode_after(reasoned, segments[-1]))
    assert "two and two" in codec.tokenizer.decode(whole)
    again = codec.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert "two and two" not in str(again)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}", "differently when a conversation"),
        ("{{ messages[-1].content }}", "leaves out an earlier turn"),
        (
            "{% for m in messages %}{% if m.role == 'user' and not loop.last %}-{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            "differently when a conversation",
        ),
        ("{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}", "one only"),
    ],
)
def test_templates_that_rewrite_earlier_messages_are_found(template, problem):
    assert problem in (ChatRenderer(CODEC, template).problem or "")


def test_the_template_of_the_calculator_appends():
    with open(TEMPLATE) as file:
        renderer = ChatRenderer(CODEC, file.read())
    assert renderer.problem is None
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
    messages = checked_call_messages(
        [user("17+25="), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    )
    assert renderer.segments(messages) == ["17+25=[17+25]<eos>42:"]
    assert renderer.segments(messages, sampled=(1,)) == ["17+25=", "<eos>42:"]


STRICT = (  # as Mistral's: an answer of a tool must follow a call, and a call has no content
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}({{ m.content }})"
    "{% elif m.tool_calls %}!{{ m.tool_calls|tojson }}{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_a_template_that_wants_calls_before_answers_of_tools():
    renderer = ChatRenderer(CODEC, STRICT)
    assert renderer.problem is None
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
    turn = {"role": "assistant", "tool_calls": [call]}
    answer = {"role": "tool", "content": "42", "tool_call_id": "1"}
    talk = checked_call_messages([user("17+25="), turn, answer, turn, answer, {"role": "assistant", "content": "42"}])
    talk = (*talk, *checked_call_messages([user("1")]))
    grown = []
    for length, sampled in ((1, ()), (3, (1,)), (5, (1, 3)), (7, (1, 3, 5))):
        segments = renderer.segments(talk[:length], sampled=sampled)
        assert renderer.is_continued(grown, segments[:-1], roles=["user"] * len(grown))
        grown = segments
    assert grown == ["[17+25=]", "<eos>(42)", "<eos>(42)", "<eos>[1]"]


def test_without_a_template_messages_are_refused_and_not_texts():
    renderer = ChatRenderer(CODEC)
    assert not renderer.has_template
    with pytest.raises(AgentCallError, match="has no chat template") as raised:
        renderer.segments([user("1")])
    assert raised.value.code == "no_template"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (None, "at least one message"),
        ([{"role": "robot", "content": ""}], r"messages\[0\] must have a role"),
        ([user("a"), "b"], r"messages\[1\] must have a role"),
        ([user(5)], "must be text"),
        ([{"role": ["user"], "content": ""}], "must have a role"),
        ([user([{"type": "image_url"}])], "only text is supported"),
        ([user([{"type": "image_url", "text": "a"}])], "only text is supported"),
        ([user([{"type": "text"}])], "only text is supported"),
        ([user(["text"])], "only text is supported"),
        ([{"role": "assistant", "tool_calls": "x"}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "without a function name"),
        ([user("a") | {"name": ["b"]}], r"messages\[0\]\.name must be text"),
        ([{"role": "tool", "content": "3", "tool_call_id": {}}], "tool_call_id must be text"),
        ([{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "f"}}]}], "whose id is not text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}], "more than 100 deep"),
    ],
)
def test_malformed_messages_are_refused(messages, problem):
    with pytest.raises(AgentCallError, match=problem) as raised:
        checked_call_messages(messages)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ({}, "must be a list"),
        (["add"], r"tools\[0\] must be a function with a name"),
        ([{"type": "retrieval"}], "a function with a name"),
        ([{"type": "function", "function": {"name": "add", "parameters": []}}], "JSON schema of an object"),
    ],
)
def test_malformed_tools_are_refused(tools, problem):
    with pytest.raises(AgentCallError, match=problem) as raised:
        checked_tools(tools)
    assert raised.value.param == "tools"


def test_texts_of_parts_and_refusals_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "text": None, "refusal": "b"}, {"text": "c"}]
    said, refused, empty = checked_call_messages(
        [user(parts), {"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant"}]
    )
    assert (said["content"], refused["content"], empty["content"]) == ("abc", "no", "")


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ' * 960 + "1" + "}" * 960, r'{"a": "\ud800"}', '{"a": 1e999}', "no JSON"],
    ids=lambda one: one[:12],
)
def test_arguments_that_cannot_be_written_again_stay_text(arguments):
    call = {"id": "1", "function": {"name": "add", "arguments": arguments}}
    (checked,) = checked_call_messages([{"role": "assistant", "tool_calls": [call]}])
    assert checked["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_call_without_arguments_has_none_and_one_that_holds_itself_is_refused():
    (checked,) = checked_call_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}]
    )
    assert checked["tool_calls"][0]["function"]["arguments"] == {}
    endless = {}
    endless["self"] = endless
    with pytest.raises(AgentCallError, match="more than 100 deep"):
        checked_call_messages(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": endless}}]}]
        )


def test_tools_and_arguments_of_the_template_that_are_nested_deeply_are_refused():
    for tools, options, param in (
        ([{"name": "f", "parameters": {"a": DEEP}}], {}, "tools"),
        ([], {"a": DEEP}, "chat_"),
    ):
        with pytest.raises(AgentCallError, match="more than 100 levels") as raised:
            kind_of(tools, options)
        assert raised.value.param.startswith(param)


def test_messages_that_say_the_same_are_equal():
    def key(**message):
        (checked,) = checked_call_messages([{"role": "assistant", **message}])
        return message_key(checked)

    def calls(identity, arguments):
        return [{"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}]

    assert key(content="a  b\n") == key(content=" a b", reasoning_content="because")
    assert key(content=None, tool_calls=calls("1", '{"x": 1, "y": 2}')) == key(
        content="", tool_calls=calls("2", json.dumps({"y": 2, "x": 1}, indent=1))
    )
    assert key(content="", tool_calls=calls("1", '{"x": 1}')) != key(content="", tool_calls=calls("1", '{"x": 2}'))
    assert key(content="a") != key(content="b")
    one, other = checked_call_messages([user("a b"), user("a  b")])
    assert message_key(one) != message_key(other)  # what the agent writes, it means


def parsed(text, tools=({"function": {"name": "f"}},), parser=None):
    return (parser or TaggedParser()).parse(text, tools, lambda: "id")


def test_replies_are_split_into_reasoning_calls_and_content():
    whole = parsed('<think>hm</think>\nSure.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    assert (whole.reasoning, whole.content) == ("hm", "Sure.")
    assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == [("f", {"x": 1})]
    assert parsed("opened by the template</think>done").reasoning == "opened by the template"
    two = parsed('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "parameters": {}}</tool_call>')
    assert [call.name for call in two.tool_calls] == ["f", "g"]
    assert parsed("plain  text ").content == "plain  text "
    for broken in ("<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>'):
        assert parsed(broken).content == broken  # the agent sees what the policy wrote
        assert parsed(broken).tool_calls == ()
    assert parsed("<tool_call>" + "[" * 100_000).tool_calls == ()
    assert parsed('<tool_call>{"name": "f"}</tool_call>', tools=()).tool_calls == ()
    assert parsed("<think>a</think>b", parser=TextParser()).content == "<think>a</think>b"
