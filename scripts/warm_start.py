"""Trains the small policy of the quick start: supervised learning on flawed demonstrations.

    python scripts/warm_start.py --out lit_async_rl/assets/sort_policy

The demonstrations have two flaws: with probability `--reversed` the answer is written backwards, and each character is
replaced by a random digit with probability `--noise`. A policy that imitates them perfectly is therefore correct with
probability (1 - 0.5) * (1 - 0.9 * 0.03)^8 = 40 % (a random digit may be the correct one). Reinforcement learning then
has to find out, from a verifier alone, which of the policy's behaviours are correct, as with language models.
Deterministic for a given seed, torch version and processor.
"""

from __future__ import annotations

import argparse
import math
import random
import string
from functools import partial

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.tasks import Addition, SortDigits
from lit_async_rl.tasks.calculator import observation
from lit_async_rl.types import Prompt

PAD = "<pad>"
EOS = "<eos>"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Every printable ASCII character is a token; loads with `AutoTokenizer`, no code of ours."""
    characters = [PAD, EOS, *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate(characters)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=256)


def make_policy(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaForCausalLM:
    """A randomly initialized Llama-style model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def accuracy(lm: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, source: PromptSource, max_tokens: int) -> float:
    """Share of held-out problems that one sample at temperature 1 solves."""
    prompts = [source[n] for n in range(len(source))]
    sampling = SamplingParams(max_tokens=max_tokens)
    requests = [
        GenerationRequest(id=n, prompt_ids=tuple(tokenizer(p.text)["input_ids"]), num_samples=1, sampling=sampling)
        for n, p in enumerate(prompts)
    ]
    completions = EmbeddedEngine.from_module(lm).run(requests)
    texts = [tokenizer.decode(c[0].token_ids, skip_special_tokens=True) for c in completions]
    return sum(exact_match(p, text) for p, text in zip(prompts, texts, strict=True)) / len(prompts)


def demonstrate(problem: Prompt, args: argparse.Namespace, chance: random.Random) -> list[tuple[str, bool]]:
    """Segments of text, and whether the policy learns to write them.

    The answer, sometimes backwards, with each character replaced by a random digit with probability `--noise`. With
    `--task tool` it is a guess or, with probability `--tool_share`, a call of the calculator and what follows from it.
    """
    answer = problem.answer or ""
    if args.task == "tool":
        if chance.random() < args.tool_share:
            call = f"[{problem.text.rstrip('=')}]{EOS}"
            return [(call, True), (observation(answer), False), (f"{answer}{EOS}", True)]
        return [("".join(chance.choices(string.digits, k=len(answer))) + EOS, True)]
    answer = answer[::-1] if chance.random() < args.reversed else answer
    return [("".join(chance.choice(string.digits) if chance.random() < args.noise else c for c in answer) + EOS, True)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--task", choices=["sort", "add", "tool"], default="sort")
    parser.add_argument("--num_digits", type=int, default=8)
    parser.add_argument("--min_digits", type=int, default=None, help="shortest string to sort; default: --num_digits")
    parser.add_argument("--tail", type=float, default=None, help="exponent of the lengths, see `SortDigits`")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.03, help="share of answer characters that are replaced")
    parser.add_argument("--reversed", type=float, default=0.5, help="share of answers that are written backwards")
    parser.add_argument("--tool_share", type=float, default=0.35, help="share of demonstrations that use the tool")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    make_task = partial(SortDigits, min_digits=args.min_digits, tail=args.tail) if args.task == "sort" else Addition
    train = make_task(args.num_digits, size=10**9, seed=args.seed)
    held_out = make_task(args.num_digits, size=512, split="held_out", seed=args.seed)
    tokenizer = character_tokenizer()
    lm = make_policy(tokenizer, args.hidden, args.layers)
    print(f"{sum(p.numel() for p in lm.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=args.learning_rate, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / args.steps))
    chance = random.Random(args.seed)
    for step in range(args.steps):
        problems = [train[step * args.batch_size + n] for n in range(args.batch_size)]
        pieces = [[(p.text, False), *demonstrate(p, args, chance)] for p in problems]
        texts = ["".join(text for text, _ in row) for row in pieces]
        batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
        ids = batch["input_ids"]
        learn = torch.zeros(ids.shape, dtype=torch.bool)
        for n, row in enumerate(pieces):  # every piece is whole tokens: a character, or the end
            flags = [flag for text, flag in row for _ in tokenizer(text)["input_ids"]]
            learn[n, : len(flags)] = torch.tensor(flags)
        logits = lm(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits[learn[:, 1:]], ids[:, 1:][learn[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % 50 == 49:
            share = (
                ""
                if args.task == "tool"
                else f", accuracy {accuracy(lm, tokenizer, held_out, max_tokens=args.num_digits + 4):.3f}"
            )
            print(f"step {step + 1}: loss {loss.item():.3f}{share}", flush=True)
    lm.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
