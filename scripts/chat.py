"""Type prompts at a trained policy.

    python scripts/chat.py --model runs/my_policy
    python scripts/chat.py --model runs/my_policy --prompt "31424210="

`--model` is a Hugging Face folder or name (`scripts/export.py` makes one from a checkpoint).
"""

from __future__ import annotations

import argparse
import sys

from lit_async_rl.cli.app import quiet
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import Prompt


def main() -> None:
    """Reads prompts from the terminal until it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--prompt", help="answer this one and end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--stop", nargs="+", default=[], help="texts that end an answer")
    parser.add_argument("--chat_template", action="store_true", help="wrap the prompt as a user's turn")
    args = parser.parse_args()
    quiet()
    try:
        sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, stop=tuple(args.stop))
        codec, engine = TextCodec(args.model), EmbeddedEngine.from_module(load_policy(args.model))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))

    def answer(text: str) -> None:
        user = [{"role": "user", "content": text}]
        ids = codec.encode(Prompt(messages=user) if args.chat_template else Prompt(text=text))
        request = GenerationRequest(id=0, prompt_ids=ids, num_samples=args.num_samples, sampling=sampling)
        for completion in engine.run([request])[0]:
            print(codec.decode(completion.token_ids, sampling.stop))

    if args.prompt is not None:
        try:
            answer(args.prompt)
        except ValueError as error:
            sys.exit(str(error))
        return
    try:
        while True:
            if text := input("> ").strip():
                try:
                    answer(text)
                except ValueError as error:  # too long for the model, say
                    print(error)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
