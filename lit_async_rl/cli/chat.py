"""Interactive prompts for a trained policy.

    lit-async-rl chat --model runs/my_policy
    lit-async-rl chat --model runs/my_policy --prompt "31424210="

`--model` is a Hugging Face folder or name (`lit-async-rl export` makes one from a checkpoint).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_async_rl.api.trainer import quiet
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.utils.checks import OneLineParser, check_range
from lit_async_rl.utils.visible import visible


def main(args: Sequence[str] | None = None) -> None:
    """Command line; reads prompts until the end of input."""
    parser = OneLineParser("chat", __doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--prompt", help="answer this one and end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--stop", nargs="+", default=[], help="texts that end an answer")
    parser.add_argument("--chat_template", action="store_true", help="wrap the prompt as a user's turn")
    given = parser.parse_args(args)
    quiet()
    try:
        check_range("", ">= 1", num_samples=given.num_samples)
        sampling = SamplingParams(temperature=given.temperature, max_tokens=given.max_tokens, stop=tuple(given.stop))
        codec = TextCodec(given.model)
        codec.check_stop(sampling.stop)
        codec.check_turn_end(given.chat_template, bool(given.stop))
        engine = EmbeddedEngine.from_module(load_policy(given.model))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

    def answer(text: str) -> None:
        as_chat = [{"role": "user", "content": text}] if given.chat_template else None
        ids = codec.encode(Prompt(messages=as_chat) if as_chat else Prompt(text=text))
        request = GenerationRequest(id=0, prompt_ids=ids, num_samples=given.num_samples, sampling=sampling)
        for completion in engine.run([request])[0]:
            print(visible(codec.decode(completion.token_ids, sampling.stop)))

    if given.prompt is not None:
        try:
            answer(given.prompt)
        except ValueError as error:
            sys.exit(f"error: {error}")
        return
    try:
        while True:
            if text := input("> ").strip():
                try:
                    answer(text)
                except ValueError as error:  # too long, say: the next may be right
                    print(error)
    except UnicodeDecodeError as error:
        sys.exit(f"error: the prompts on standard input are not {error.encoding}: {error}")
    except (EOFError, KeyboardInterrupt):
        print()
