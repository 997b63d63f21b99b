"""`rl.fit` with rewards of this file; `python fit.py STEPS [CHECKPOINT]`."""

import json
import sys

import lit_async_rl as rl


def no_zeros(prompt, completion, penalty=0.25):
    return -penalty * completion.count("0")


def scaled(reward, scale):
    return lambda prompt, completion: scale * reward(prompt, completion)


def main(max_steps, ckpt_path=None):
    parts = {
        "digits": rl.share_correct,
        "zeros": scaled(no_zeros, 0.5),
        "code": rl.CodeReward(
            languages={"digits": "cat main.digits"}, language="digits", extract="whole", allow_unsandboxed=True
        ),
        "judge": rl.JudgeReward(model="judge", engine=rl.EmbeddedEngine(num_slots=2), max_tokens=4, on_unreadable=0.0),
    }
    return rl.fit(
        "policy",
        [json.loads(line) for line in open("prompts.jsonl")],
        rl.CombinedReward(parts, weights={"judge": 0.1}),
        max_steps=max_steps,
        ckpt_path=ckpt_path,
        max_staleness=4,
        groups_per_step=2,
        group_size=4,
        engine=rl.EmbeddedEngine(num_slots=2),
        sampling={"max_tokens": 10},
        scoring={"timeout_s": 300},
        callbacks=[
            rl.RolloutTape("tape"),
            rl.GradientClipping(),
            rl.LinkedCheckpoint(every_n_train_steps=3, save_top_k=-1),
        ],
        accelerator="cpu",
        default_root_dir="runs",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
