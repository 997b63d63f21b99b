"""Tokenizers and chat templates of model families, small and faithful: special tokens, BOS, ends, templates, switches.

The templates are written from the published format of each family, reduced to text messages, tools and switches; the
formats beside them (`system`, `user`, ...) state the same rendering a second time without jinja, for the tests to
compare. Vocabularies have single characters or bytes, and the special tokens of the family.
"""
# ruff: noqa: E501  templates are written as they are published

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

SYSTEM = "Be brief."
QUESTION = "What is 2+2?"
ANSWER = "It is 4."
SECOND = "And 3+3?"
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {}}}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the matrix.

    Attributes:
        kind: of the tokenizer: bytes, llama (a space before each text), first (before the first), gemma (none), unigram,
            wordpiece.
        special: special tokens; `plain`: added tokens that are not special.
        adds: what the tokenizer puts around a text: bos, eos, both or nothing.
        generation, config: ends that generation_config.json and config.json name; None is no entry.
        ends: all tokens that must end a completion.
        template: None for a family without one.
        bos_text: what the rendering begins with.
        system: format of a system message; empty if it is refused, or joined with the question in `first`.
        first: format of system and question together.
        user, assistant, generate: formats of question, answer and the beginning of an answer.
        end: what follows the last answer; `between`: what follows an earlier one.
        history: what stands before an answer in the history, where that is not `generate`; `last`: what the template adds
            to the last answer.
        joins_last: whether the system message is joined with the last question.
        ends_in_turns: whether the rendering has the token that ends an answer.
        stable: whether a rendering of n+1 messages begins with that of n.
        tools, switch: whether the template reads tools; name of its switch for thinking.
        switched: beginning of an answer with the switch at `switch_value`.
        tags: thinking tags.
    """

    kind: str = "bytes"
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str
    pad: str | None = None
    adds: str = ""
    generation: tuple[str, ...] | None = None
    config: tuple[str, ...] | None = None
    ends: tuple[str, ...]
    template: str | None
    bos_text: str = ""
    system: str = ""
    first: str = ""
    refuses_system: bool = False
    user: str = ""
    assistant: str = "{}"
    generate: str = ""
    end: str = ""
    between: str | None = None
    stable: bool = True
    joins_last: bool = False
    ends_in_turns: bool = True
    history: str = ""
    last: str = ""
    tools: bool = False
    switch: str = ""
    switch_value: bool | str = False
    switched: str = ""
    tags: tuple[str, str] | None = None

    def expected(self, *texts: str, system: str | None = None, generate: bool = True, switched: bool = False) -> str:
        """Rendering of question, answer, question, ... from the formats."""
        out = self.bos_text
        last_user = (len(texts) - 1) // 2 * 2
        if system is not None and self.system:
            out += self.system.format(system)
        for number, text in enumerate(texts):
            if number % 2 == 0:
                joined = number == (last_user if self.joins_last else 0) and system is not None and self.first
                out += self.first.format(system, text) if joined else self.user.format(text)
            else:
                is_last = number == len(texts) - 1
                out += self.generated() + self.assistant.format(text)
                out += self.end if is_last or self.between is None else self.between
        return out + ((self.switched if switched else self.generate) if generate else "")

    def generated(self) -> str:
        """Text before an answer in the history."""
        return self.history or self.generate


def build(family: Family) -> PreTrainedTokenizerFast:
    """The tokenizer of a family."""
    added = [*family.special, *family.plain]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    if family.kind == "bytes":
        vocab = {token: n for n, token in enumerate(added + sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif family.kind == "wordpiece":
        pieces = [*added, "[UNK]", *characters, *(f"##{character}" for character in characters)]
        tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        pieces = [*added, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters[1:]]
        if family.kind == "unigram":
            tokenizer = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], len(added)))
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
        else:
            vocab = {piece: n for n, piece in enumerate(pieces)}
            tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
            space = normalizers.Replace(" ", "▁")
            if family.kind == "llama":
                tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
            elif family.kind == "first":
                tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            else:
                tokenizer.normalizer = space
            strip = [] if family.kind == "gemma" else [decoders.Strip(content=" ", left=1, right=0)]
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
            tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    begin = family.bos or family.eos
    end = family.eos
    around = {"": "$A", "bos": f"{begin} $A", "eos": f"$A {end}", "both": f"{begin} $A {end}"}[family.adds]
    if family.adds:
        named = [(token, tokenizer.token_to_id(token)) for token in {begin, end}]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=named)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, pad_token=family.pad
    )
    made.chat_template = family.template
    return made


def write(family: Family, folder: Path) -> str:
    """A folder with tokenizer, config.json and generation_config.json, without weights."""
    tokenizer = build(family)

    def ids(names: tuple[str, ...] | None) -> list[int] | None:
        return None if names is None else [tokenizer.convert_tokens_to_ids(name) for name in names]

    LlamaConfig(vocab_size=len(tokenizer), eos_token_id=ids(family.config), bos_token_id=None).save_pretrained(folder)
    if family.generation is not None:
        GenerationConfig(eos_token_id=ids(family.generation)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"


def roles(system: str, user: str, assistant: str, generate: str, begin: str = "", tools: str = "") -> str:
    """A template of one format per role; `%s` is the content."""

    def piece(text: str) -> str:
        before, _, after = text.partition("%s")
        return f"{before}{{{{ message.content }}}}{after}"

    return (
        f"{begin}{tools}{{% for message in messages %}}"
        f"{{% if message.role == 'system' %}}{piece(system)}"
        f"{{% elif message.role == 'user' %}}{piece(user)}"
        f"{{% elif message.role == 'assistant' %}}{piece(assistant)}"
        "{% else %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{generate}{{% endif %}}"
    )


IM = "<|im_start|>{}\n%s<|im_end|>\n"
CHATML = roles(IM.format("system"), IM.format("user"), IM.format("assistant"), generate="<|im_start|>assistant\n")
CHATML_FORMATS = dict(
    system="<|im_start|>system\n{}<|im_end|>\n",
    user="<|im_start|>user\n{}<|im_end|>\n",
    generate="<|im_start|>assistant\n",
    end="<|im_end|>\n",
)
IM_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
LLAMA3_FORMATS = dict(
    bos_text="<|begin_of_text|>",
    system=HEADER.format("system") + "{}<|eot_id|>",
    user=HEADER.format("user") + "{}<|eot_id|>",
    generate=HEADER.format("assistant"),
    end="<|eot_id|>",
)
LLAMA3 = roles(
    HEADER.format("system") + "%s<|eot_id|>",
    HEADER.format("user") + "%s<|eot_id|>",
    HEADER.format("assistant") + "%s<|eot_id|>",
    generate=HEADER.format("assistant"),
    begin="{{ bos_token }}",
)
ALTERNATE = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
QWEN_DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN25 = (
    "{% if tools %}<|im_start|>system\n# Tools\n" + TOOLS + "<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\n" + QWEN_DEFAULT + "<|im_end|>\n{% endif %}" + CHATML
)
QWEN3 = (
    LAST_USER + "{% if tools %}<|im_start|>system\n# Tools\n" + TOOLS + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role != 'assistant' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% else %}{% set content = message.content %}{% set reasoning = message.reasoning_content or '' %}"
    "{% if not reasoning and '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "<think>\n{{ reasoning.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set system = none %}{% endif %}{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.first and system is not none %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message.content %}"
    "{% else %}{% set content = message.content %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NEMO = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for message in rest %}"
    "{% if message.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
    + TOOLS
    + "[/AVAILABLE_TOOLS]{% endif %}"
    "{% if loop.last and system is not none %}[INST]{{ system }}\n\n{{ message.content }}[/INST]"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ system if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_FORMATS = dict(
    bos_text="<bos>",
    user="<start_of_turn>user\n{}<end_of_turn>\n",
    generate="<start_of_turn>model\n",
    end="<end_of_turn>\n",
)
DS = "<｜{}｜>"
DS_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>")
DS_NAMES = dict(bos=DS_TOKENS[0], eos=DS_TOKENS[1], pad=DS_TOKENS[2], adds="bos", config=DS_TOKENS[1:2])
DS_FORMATS = dict(bos_text=DS_TOKENS[0], system="{}", user="<｜User｜>{}", generate="<｜Assistant｜>", end=DS_TOKENS[1])
DEEPSEEK_V3 = roles(
    "%s", "<｜User｜>%s", "<｜Assistant｜>%s<｜end▁of▁sentence｜>", generate="<｜Assistant｜>", begin="{{ bos_token }}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% else %}<｜Assistant｜>{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK_V31 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% else %}<｜Assistant｜></think>{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_NAMES = dict(eos="<|endoftext|>", pad="<|endoftext|>", generation=("<|endoftext|>", "<|user|>", "<|observation|>"))
GLM4 = "[gMASK]<sop>" + roles(
    "<|system|>\n%s", "<|user|>\n%s", "<|assistant|>\n%s", generate="<|assistant|>\n", tools=TOOLS
)
GLM45 = (
    "[gMASK]<sop>" + TOOLS + "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|assistant|>\n<think></think>\n{{ message.content.strip() }}{% else %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% if message.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)
SMOLLM2_DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|>"
    "{% if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}\n\n{% endif %}"
    "{% if tools %}# Tools\n\n" + TOOLS + "{% endif %}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI3 = (
    roles("<|system|>\n%s<|end|>\n", "<|user|>\n%s<|end|>\n", "<|assistant|>\n%s<|end|>\n", generate="<|assistant|>\n")
    + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>\n{{ message.content }}"
    "{{ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}<|{{ message.role }}|>\n{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EOS_TURNS = roles(
    "<|system|>\n%s{{ eos_token }}\n",
    "<|user|>\n%s{{ eos_token }}\n",
    "<|assistant|>\n%s{{ eos_token }}\n",
    generate="<|assistant|>\n",
)
VICUNA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }} "
    "{% elif message.role == 'user' %}USER: {{ message.content }} {% else %}ASSISTANT: {{ message.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
SMOLLM3 = (
    TOOLS + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
TURN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
GRANITE = "<|start_of_role|>{}<|end_of_role|>"
KIMI = "<|im_{0}|>{0}<|im_middle|>"
LLAMA_TOKENS = ("<s>", "</s>")
LLAMA_NAMES = dict(kind="llama", bos="<s>", eos="</s>", adds="bos", config=("</s>",))
THINK = ("<think>", "</think>")

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        special=IM_TOKENS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        generation=("<|im_end|>", "<|endoftext|>"),
        config=("<|im_end|>",),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=QWEN25,
        tools=True,
        **CHATML_FORMATS,
    ),
    "qwen2.5-base": Family(
        special=IM_TOKENS,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        generation=("<|endoftext|>",),
        config=("<|endoftext|>",),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=QWEN25,
        tools=True,
        **CHATML_FORMATS,
    ),
    "qwen3": Family(
        special=IM_TOKENS,
        plain=THINK,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        generation=("<|im_end|>", "<|endoftext|>"),
        config=("<|im_end|>",),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=QWEN3,
        tools=True,
        switch="enable_thinking",
        switched="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        tags=THINK,
        stable=False,
        **CHATML_FORMATS,
        last="<think>\n\n</think>\n\n",
    ),
    "llama2": Family(
        special=LLAMA_TOKENS,
        **LLAMA_NAMES,
        ends=("</s>",),
        template=LLAMA2,
        first="<s>[INST] <<SYS>>\n{}\n<</SYS>>\n\n{} [/INST]",
        user="<s>[INST] {} [/INST]",
        assistant=" {}",
        end=" </s>",
    ),
    "llama3": Family(
        special=LLAMA3_TOKENS,
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        adds="bos",
        generation=("<|end_of_text|>",),
        config=("<|end_of_text|>",),
        ends=("<|end_of_text|>", "<|eot_id|>"),
        template=LLAMA3,
        **LLAMA3_FORMATS,
    ),
    "llama3.1": Family(
        special=LLAMA3_TOKENS,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        adds="bos",
        generation=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        config=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        template=LLAMA3.replace("{% for", TOOLS + "{% for", 1),
        tools=True,
        **LLAMA3_FORMATS,
    ),
    "mistral": Family(
        special=LLAMA_TOKENS,
        **LLAMA_NAMES,
        ends=("</s>",),
        refuses_system=True,
        template=ALTERNATE + roles("", "[INST] %s [/INST]", "%s{{ eos_token }}", generate="", begin="{{ bos_token }}"),
        bos_text="<s>",
        user="[INST] {} [/INST]",
        end="</s>",
    ),
    "mistral-nemo": Family(
        special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        bos="<s>",
        eos="</s>",
        adds="bos",
        config=("</s>",),
        ends=("</s>",),
        template=NEMO,
        tools=True,
        stable=False,
        bos_text="<s>",
        first="[INST]{}\n\n{}[/INST]",
        user="[INST]{}[/INST]",
        end="</s>",
        joins_last=True,
    ),
    "gemma2": Family(
        kind="gemma",
        special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        adds="bos",
        generation=("<eos>", "<end_of_turn>"),
        config=("<eos>",),
        ends=("<eos>", "<end_of_turn>"),
        template=GEMMA2,
        refuses_system=True,
        **GEMMA_FORMATS,
    ),
    "gemma3": Family(
        kind="gemma",
        special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        adds="bos",
        config=("<eos>",),
        ends=("<eos>", "<end_of_turn>"),
        template=GEMMA3,
        first="<start_of_turn>user\n{}\n\n{}<end_of_turn>\n",
        **GEMMA_FORMATS,
    ),
    "phi3": Family(
        kind="llama",
        special=(*LLAMA_TOKENS, "<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"),
        bos="<s>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        config=("<|endoftext|>",),
        generation=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        template=PHI3,
        stable=False,
        system="<|system|>\n{}<|end|>\n",
        user="<|user|>\n{}<|end|>\n",
        generate="<|assistant|>\n",
        end="<|end|>\n<|endoftext|>",
        between="<|end|>\n",
    ),
    "phi4": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        generation=("<|endoftext|>",),
        config=("<|endoftext|>",),
        ends=("<|endoftext|>", "<|im_end|>"),
        template=roles(
            *(f"<|im_start|>{role}<|im_sep|>%s<|im_end|>" for role in ("system", "user", "assistant")),
            "<|im_start|>assistant<|im_sep|>",
        ),
        system="<|im_start|>system<|im_sep|>{}<|im_end|>",
        user="<|im_start|>user<|im_sep|>{}<|im_end|>",
        generate="<|im_start|>assistant<|im_sep|>",
        end="<|im_end|>",
    ),
    "deepseek-v3": Family(special=DS_TOKENS, **DS_NAMES, ends=DS_TOKENS[1:2], template=DEEPSEEK_V3, **DS_FORMATS),
    "deepseek-r1": Family(
        special=DS_TOKENS,
        plain=THINK,
        **DS_NAMES,
        ends=DS_TOKENS[1:2],
        template=DEEPSEEK_R1,
        stable=False,
        tags=THINK,
        **DS_FORMATS | dict(generate="<｜Assistant｜><think>\n"),
        history="<｜Assistant｜>",
    ),
    "deepseek-v3.1": Family(
        special=DS_TOKENS,
        plain=THINK,
        **DS_NAMES,
        ends=DS_TOKENS[1:2],
        template=DEEPSEEK_V31,
        tags=THINK,
        switch="thinking",
        switch_value=True,
        switched="<｜Assistant｜><think>",
        **DS_FORMATS | dict(generate="<｜Assistant｜></think>"),
    ),
    "glm4": Family(
        special=GLM_TOKENS,
        **GLM_NAMES,
        config=("<|endoftext|>",),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        template=GLM4,
        tools=True,
        bos_text="[gMASK]<sop>",
        system="<|system|>\n{}",
        user="<|user|>\n{}",
        generate="<|assistant|>\n",
    ),
    "glm4-one-end": Family(
        special=GLM_TOKENS,
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>", "<|user|>"),
        template=GLM4,
        tools=True,
        bos_text="[gMASK]<sop>",
        system="<|system|>\n{}",
        user="<|user|>\n{}",
        generate="<|assistant|>\n",
    ),
    "glm4.5": Family(
        special=(*GLM_TOKENS, "/nothink"),
        plain=THINK,
        **GLM_NAMES,
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        template=GLM45,
        tools=True,
        tags=THINK,
        bos_text="[gMASK]<sop>",
        system="<|system|>\n{}",
        user="<|user|>\n{}",
        generate="<|assistant|>",
        switch="enable_thinking",
        switched="/nothink<|assistant|>\n<think></think>",
        history="<|assistant|>\n<think></think>\n",
    ),
    "smollm2": Family(
        special=IM_TOKENS,
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        config=("<|im_end|>",),
        ends=("<|im_end|>",),
        template=QWEN25.replace(QWEN_DEFAULT, SMOLLM2_DEFAULT),
        tools=True,
        **CHATML_FORMATS,
    ),
    "smollm3": Family(
        special=IM_TOKENS,
        plain=THINK,
        eos="<|im_end|>",
        config=("<|im_end|>",),
        ends=("<|im_end|>",),
        template=SMOLLM3,
        tools=True,
        tags=THINK,
        switch="enable_thinking",
        switched="<|im_start|>assistant\n<think>\n\n</think>\n",
        **CHATML_FORMATS,
    ),
    "olmo2": Family(
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>",),
        template=OLMO2,
        bos_text="<|endoftext|>",
        system="<|system|>\n{}\n",
        user="<|user|>\n{}\n",
        generate="<|assistant|>\n",
        end="<|endoftext|>",
        between="<|endoftext|>\n",
    ),
    "granite3": Family(
        special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        config=("<|end_of_text|>",),
        ends=("<|end_of_text|>",),
        tools=True,
        template=roles(
            *(GRANITE.format(role) + "%s<|end_of_text|>\n" for role in ("system", "user", "assistant")),
            GRANITE.format("assistant"),
            tools=TOOLS,
        ),
        system=GRANITE.format("system") + "{}<|end_of_text|>\n",
        user=GRANITE.format("user") + "{}<|end_of_text|>\n",
        generate=GRANITE.format("assistant"),
        end="<|end_of_text|>\n",
    ),
    "command-r": Family(
        special=(
            "<PAD>",
            "<BOS_TOKEN>",
            "<EOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
        ),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
        adds="bos",
        config=("<|END_OF_TURN_TOKEN|>",),
        ends=("<|END_OF_TURN_TOKEN|>",),
        bos_text="<BOS_TOKEN>",
        template=roles(
            *(TURN.format(role) + "%s<|END_OF_TURN_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")),
            TURN.format("CHATBOT"),
            begin="{{ bos_token }}",
        ),
        system=TURN.format("SYSTEM") + "{}<|END_OF_TURN_TOKEN|>",
        user=TURN.format("USER") + "{}<|END_OF_TURN_TOKEN|>",
        generate=TURN.format("CHATBOT"),
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "gpt-oss": Family(
        special=(
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|call|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
        pad="<|endoftext|>",
        generation=("<|return|>", "<|endoftext|>", "<|call|>"),
        config=("<|return|>",),
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        template=HARMONY,
        tools=True,
        stable=False,
        bos_text="<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium<|end|>",
        system="<|start|>developer<|message|># Instructions\n\n{}\n\n<|end|>",
        user="<|start|>user<|message|>{}<|end|>",
        generate="<|start|>assistant",
        end="<|return|>",
        between="<|end|>",
        history="<|start|>assistant<|channel|>final<|message|>",
    ),
    "yi": Family(
        kind="llama",
        special=("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|startoftext|>",
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>", "<|im_end|>"),
        template=CHATML,
        **CHATML_FORMATS,
    ),
    "falcon": Family(
        special=("<|endoftext|>",),
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>",),
        template=roles("%s\n\n", "User: %s\n\n", "Assistant: %s\n\n", generate="Assistant:"),
        ends_in_turns=False,
        system="{}\n\n",
        user="User: {}\n\n",
        generate="Assistant:",
        end="\n\n",
        history="Assistant: ",
    ),
    "falcon3": Family(
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>",),
        template=roles(
            "<|system|>\n%s\n", "<|user|>\n%s\n", "<|assistant|>\n%s<|endoftext|>\n", generate="<|assistant|>\n"
        ),
        system="<|system|>\n{}\n",
        user="<|user|>\n{}\n",
        generate="<|assistant|>\n",
        end="<|endoftext|>\n",
    ),
    "zephyr": Family(
        special=LLAMA_TOKENS,
        **LLAMA_NAMES,
        ends=("</s>",),
        template=EOS_TURNS,
        system="<|system|>\n{}</s>\n",
        user="<|user|>\n{}</s>\n",
        generate="<|assistant|>\n",
        end="</s>\n",
    ),
    "vicuna": Family(
        special=LLAMA_TOKENS,
        **LLAMA_NAMES,
        ends=("</s>",),
        template=VICUNA,
        bos_text="<s>",
        system="{} ",
        user="USER: {} ",
        generate="ASSISTANT:",
        end="</s>",
        history="ASSISTANT: ",
    ),
    "internlm2": Family(
        kind="llama",
        special=(*LLAMA_TOKENS, "<|im_start|>", "<|im_end|>"),
        bos="<s>",
        eos="</s>",
        pad="</s>",
        adds="bos",
        config=("</s>",),
        ends=("</s>", "<|im_end|>"),
        template="{{ bos_token }}" + CHATML,
        bos_text="<s>",
        **CHATML_FORMATS,
    ),
    "nemotron-nano": Family(
        special=("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        plain=THINK,
        bos="<s>",
        eos="<SPECIAL_12>",
        config=("</s>",),
        ends=("</s>", "<SPECIAL_12>"),
        tags=THINK,
        stable=False,
        template=roles(
            "<SPECIAL_10>System\n%s\n",
            "<SPECIAL_11>User\n%s\n",
            "<SPECIAL_11>Assistant\n%s\n<SPECIAL_12>\n",
            generate="<SPECIAL_11>Assistant\n<think>\n",
        ),
        system="<SPECIAL_10>System\n{}\n",
        user="<SPECIAL_11>User\n{}\n",
        generate="<SPECIAL_11>Assistant\n<think>\n",
        end="\n<SPECIAL_12>\n",
        history="<SPECIAL_11>Assistant\n",
    ),
    "kimi-k2": Family(
        special=("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        bos="[BOS]",
        eos="[EOS]",
        pad="[EOS]",
        generation=("<|im_end|>",),
        config=("[EOS]",),
        ends=("<|im_end|>", "[EOS]"),
        template=roles(
            *(KIMI.format(role) + "%s<|im_end|>" for role in ("system", "user", "assistant")),
            KIMI.format("assistant"),
            tools=TOOLS,
        ),
        tools=True,
        system=KIMI.format("system") + "{}<|im_end|>",
        user=KIMI.format("user") + "{}<|im_end|>",
        generate=KIMI.format("assistant"),
        end="<|im_end|>",
    ),
    "minimax-m2": Family(
        special=("]~!b[", "]~b]", "[e~["),
        plain=THINK,
        bos="]~!b[",
        eos="[e~[",
        generation=("[e~[",),
        ends=("[e~[",),
        template="]~!b["
        + roles("]~b]system\n%s[e~[\n", "]~b]user\n%s[e~[\n", "]~b]ai\n%s[e~[\n", generate="]~b]ai\n<think>\n"),
        tags=THINK,
        stable=False,
        bos_text="]~!b[",
        system="]~b]system\n{}[e~[\n",
        user="]~b]user\n{}[e~[\n",
        generate="]~b]ai\n<think>\n",
        end="[e~[\n",
        history="]~b]ai\n",
    ),
    "hunyuan": Family(
        special=("<|startoftext|>", "<|endoftext|>", "<|eos|>", "<|extra_0|>", "<|extra_4|>"),
        bos="<|startoftext|>",
        eos="<|eos|>",
        config=("<|eos|>",),
        ends=("<|eos|>",),
        bos_text="<|startoftext|>",
        template=roles("%s<|extra_4|>", "%s<|extra_0|>", "%s<|eos|>", generate="", begin="<|startoftext|>"),
        system="{}<|extra_4|>",
        user="{}<|extra_0|>",
        end="<|eos|>",
    ),
    "exaone3.5": Family(
        special=("[BOS]", "[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]"),
        bos="[BOS]",
        eos="[|endofturn|]",
        config=("[|endofturn|]",),
        ends=("[|endofturn|]",),
        template=roles(
            "[|system|]%s[|endofturn|]\n", "[|user|]%s\n", "[|assistant|]%s[|endofturn|]\n", generate="[|assistant|]"
        ),
        system="[|system|]{}[|endofturn|]\n",
        user="[|user|]{}\n",
        generate="[|assistant|]",
        end="[|endofturn|]\n",
    ),
    "stablelm-zephyr": Family(
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        config=("<|endoftext|>",),
        ends=("<|endoftext|>",),
        template=EOS_TURNS,
        system="<|system|>\n{}<|endoftext|>\n",
        user="<|user|>\n{}<|endoftext|>\n",
        generate="<|assistant|>\n",
        end="<|endoftext|>\n",
    ),
    "tinyllama": Family(
        special=LLAMA_TOKENS,
        **LLAMA_NAMES | dict(kind="first"),
        ends=("</s>",),
        template=EOS_TURNS,
        system="<|system|>\n{}</s>\n",
        user="<|user|>\n{}</s>\n",
        generate="<|assistant|>\n",
        end="</s>\n",
    ),
    "special-think": Family(  # as in DeepSeek's distilled models and Magistral: thinking tags are special tokens
        special=(*IM_TOKENS, *THINK),
        eos="<|im_end|>",
        config=("<|im_end|>",),
        ends=("<|im_end|>",),
        template=CHATML,
        tags=THINK,
        **CHATML_FORMATS,
    ),
    "appends-eos": Family(
        kind="llama",
        special=LLAMA_TOKENS,
        bos="<s>",
        eos="</s>",
        adds="both",
        config=("</s>",),
        ends=("</s>",),
        template=None,
    ),
    "unigram": Family(
        kind="unigram",
        special=("<s>", "</s>", "<pad>"),
        bos="<s>",
        eos="</s>",
        adds="both",
        config=("</s>",),
        ends=("</s>",),
        template=None,
    ),
    "wordpiece": Family(
        kind="wordpiece",
        special=("[PAD]", "[CLS]", "[SEP]"),
        bos="[CLS]",
        eos="[SEP]",
        adds="both",
        config=("[SEP]",),
        ends=("[SEP]",),
        template=None,
    ),
}
