"""Makes a small policy for the sorting, addition and calculator tasks: supervised fine-tuning from random weights.

    python scripts/warm_start.py --out lit_async_rl/assets/sort_policy

The answers that it learns from have two flaws, see `FlawedAnswers`: half of them are written backwards, and each
character is replaced by a random digit with probability `--noise`. Reinforcement learning then has to find out, from a
verifier alone, which of the policy's behaviours are correct, as with language models. `configs/warm_start.yaml` is the
same training for the architecture of the quick start; this script makes architectures and tokenizer, too.
Deterministic for a given seed, torch version and processor.
"""

from __future__ import annotations

import argparse
import random
import string
from functools import partial

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lit_async_rl as rl
from lit_async_rl.tasks.calculator import observation

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


def with_tool(problem: rl.Prompt, tool_share: float, chance: random.Random) -> dict[str, list[dict[str, object]]]:
    """A guess or, with probability `tool_share`, a call of the calculator and what follows from it."""
    answer = problem.answer or ""
    said = [("".join(chance.choices(string.digits, k=len(answer))) + EOS, True)]
    if chance.random() < tool_share:
        call = f"[{problem.text.rstrip('=')}]{EOS}"
        said = [(call, True), (observation(answer), False), (f"{answer}{EOS}", True)]
    return {"segments": [{"text": text, "train": train} for text, train in [(problem.text, False), *said]]}


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
    sorting = partial(rl.SortDigits, min_digits=args.min_digits, tail=args.tail)
    make_task = sorting if args.task == "sort" else rl.Addition
    problems = make_task(args.num_digits, size=args.steps * args.batch_size, seed=args.seed)
    held_out = make_task(args.num_digits, size=512, split="held_out", seed=args.seed)
    chance = random.Random(args.seed)
    records = rl.FlawedAnswers(problems, reversed=args.reversed, noise=args.noise, seed=args.seed)
    if args.task == "tool":
        records = [with_tool(problems[n], args.tool_share, chance) for n in range(len(problems))]
    tokenizer = character_tokenizer()
    lm = make_policy(tokenizer, args.hidden, args.layers)
    print(f"{sum(p.numel() for p in lm.parameters()):,} parameters")
    trainer = rl.sft(
        lm,
        records,
        tokenizer=tokenizer,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        scheduler=rl.Cosine(),
        samples_per_step=args.batch_size,
        validation={} if args.task == "tool" else dict(prompts=held_out, batch_size=512),
        reward=rl.exact_match,
        sampling=dict(max_tokens=args.num_digits + 4),
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.lightning_module.policy.causal_lm.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
