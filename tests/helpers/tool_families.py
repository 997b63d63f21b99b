"""Chat templates of the large families for conversations with tools, and models that have them."""
# ruff: noqa: E501  templates are written as they are published

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from chat_families import FAMILIES, write

from lit_async_rl.models.tokenizer import TextCodec

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}


# -- templates ---------------------------------------------------------------------------------------------------------
# Of families whose licence allows it the text is in `templates/`. The others are written anew, with the structure by
# which they differ: where an answer of a tool stands, what opens a turn, what is refused.

LLAMA31 = (  # one call at a time; calls and answers have headers of their own
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls|length != 1 %}{{ raise_exception('only one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments|tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content|tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content|trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # tools before the last question, roles alternate beside calls, ids have nine characters
    "{% set ns = namespace(n=0, last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools|tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function|tojson }}"
    "{% if c.id|length != 9 %}{{ raise_exception('nine letters and digits') }}{% endif %}{{ c.id }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA4 = (  # answers of tools stand inside the turn that called, which goes on behind them
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|turn>model\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{% set ns = namespace(open=true) %}"
    "{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ c.function.arguments|tojson }}<tool_call|>"
    "{% endfor %}{% for later in messages[loop.index0 + 1:] %}{% if later.role != 'tool' %}{% set ns.open = false %}"
    "{% elif ns.open %}<|tool_response>response:{{ later.content }}<tool_response|>{% endif %}{% endfor %}"
    "{% else %}<turn|>\n{% endif %}"
    "{% elif m.role != 'tool' %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
COMMAND_A = (  # calls are numbered, and an answer has a beginning and an end within its turn
    "{% set turn = '<|START_OF_TURN_TOKEN|>' %}{% set end = '<|END_OF_TURN_TOKEN|>' %}{% set ns = namespace(n=0, id='') %}"
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{{ turn }}<|CHATBOT_TOKEN|><|START_ACTION|>{% for c in m.tool_calls %}{{ ns.n }}{{ c.function|tojson }}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}<|END_ACTION|>{{ end }}"
    "{% elif m.role == 'assistant' %}{{ turn }}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{{ end }}"
    "{% elif m.role == 'tool' %}{% set at = namespace(n=0, id='none') %}{% for k in messages %}{% for c in k.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{% set at.id = at.n %}{% endif %}{% set at.n = at.n + 1 %}{% endfor %}{% endfor %}"
    "{{ turn }}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ at.id }}: {{ m.content }}<|END_TOOL_RESULT|>{{ end }}"
    "{% else %}{{ turn }}<|USER_TOKEN|>{{ m.content }}{{ end }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ turn }}<|CHATBOT_TOKEN|>{% endif %}"
)
KIMI_K2 = (  # reasoning is written behind the last answer without a call, empty before
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% if tools %}<|im_system|>{{ tools|tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "<think>{% if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}{{ c.function.arguments|tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{{ tools|tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """A template; tokens that end a call and an answer; whether it takes two calls at once, and goes on with them."""

    template: str
    call: str
    answer: str
    several: bool = True
    goes_on: bool = True


def published(name: str) -> str:
    return (Path(__file__).parents[1] / "agents" / "templates" / f"{name}.jinja").read_text()


CASES = {
    "qwen3": Case(published("qwen3"), "<|im_end|>", "<|im_end|>"),
    "qwen3.5": Case(published("qwen3_5_think"), "<|im_end|>", "<|im_end|>"),
    "qwen3.6": Case(published("qwen3_6"), "<|im_end|>", "<|im_end|>"),
    "gpt-oss": Case(published("gptoss"), "<|call|>", "<|return|>"),
    "deepseek-v3": Case(published("deepseekv3"), "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "glm-4.5": Case(published("glm4moe"), "<|observation|>", "<|user|>"),
    "llama-3.1": Case(LLAMA31, "<|eot_id|>", "<|eot_id|>", several=False),
    "mistral": Case(MISTRAL, "</s>", "</s>", goes_on=False),
    "gemma-4": Case(GEMMA4, "<|tool_response>", "<turn|>"),
    "command-a": Case(COMMAND_A, "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "kimi-k2": Case(KIMI_K2, "<|im_end|>", "<|im_end|>"),
    "hermes": Case(HERMES, "<|im_end|>", "<|im_end|>"),
}


def codec_with_tools(name: str, folder: Path) -> TextCodec:
    """Tokenizer of a small model with the template and the end tokens of a family."""
    case = CASES[name]
    ends = tuple(dict.fromkeys((case.call, case.answer)))
    family = replace(FAMILIES["hunyuan"], special=("<bos>", *ends), bos="<bos>", eos=ends[-1], config=ends)
    return TextCodec(write(replace(family, template=case.template), folder))
