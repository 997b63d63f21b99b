"""A sequence classifier as the reward: batches of what waits, the same logit as alone, and limits with a name."""

import asyncio
import contextlib
import threading

import pytest
import torch
from chat_models import CHATML, byte_level
from flow import fit, make_data, make_module
from transformers import Gemma3Config, Gemma3ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import lit_async_rl as rl
from lit_async_rl.errors import RewardError, RewardSetupError
from lit_async_rl.judges import model as model_module
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.utils.identity import reward_identity


def classifier(folder, num_labels=1, template=CHATML, positions=256, change=lambda lm: None, **config):
    """A random classifier with its tokenizer."""
    tokenizer = byte_level(template=template)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=positions)
    lm = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=num_labels, **config))
    torch.nn.init.normal_(lm.score.weight, std=1.0)
    change(lm)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def scores(reward, asked, **settings):
    scorer = Scorer(reward, **settings)
    try:
        return score_all(scorer, asked, lambda: None)
    finally:
        scorer.close()


def logit(folder, ids):
    lm = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return lm.score(lm.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, -1].item()


@pytest.mark.parametrize("padding", [None, 0])
def test_rows_of_a_batch_have_the_logit_that_they_have_alone(tmp_path, padding):
    folder = classifier(tmp_path, pad_token_id=padding)
    reward, tokenizer = rl.RewardModel(folder, max_wait_s=0.2), byte_level()
    texts = ["", "a", "abc ab", "the answer is 12", "x" * 60] * 5
    found = scores(reward, [(Prompt(text="q: "), text) for text in texts])
    assert found == pytest.approx([logit(folder, tokenizer("q: " + text)["input_ids"]) for text in texts], abs=1e-5)
    assert len({round(value, 4) for value in found}) == 5
    assert reward.metrics()["reward_model/num_scored"] == 25
    assert reward.metrics()["reward_model/batch_size"] > 5
    reward.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-model"]
    assert scores(reward, [(Prompt(text="q: "), "a")]) == pytest.approx(found[1:2]), "it is loaded again"
    reward.close()


@pytest.mark.parametrize(("whole", "text"), [(3, 5), (3, None), ("absent", 5)])
def test_levels_of_a_configuration_may_name_different_padding_tokens(tmp_path, whole, text):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    sizes |= dict(num_key_value_heads=1, max_position_embeddings=256, vocab_size=330, pad_token_id=text)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=8)
    config = Gemma3Config(text_config=sizes, vision_config=vision | {"patch_size": 8}, num_labels=1)
    if whole != "absent":
        config.pad_token_id = whole
    torch.manual_seed(0)
    lm = Gemma3ForSequenceClassification(config)
    torch.nn.init.normal_(lm.score.weight, std=1.0)
    lm.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    reward = rl.RewardModel(str(tmp_path), max_wait_s=0.2)
    asked = [(Prompt(text="q: "), end) for end in ("", "a", "the answer is 12", "x" * 60)]
    together = scores(reward, asked)
    assert reward.metrics()["reward_model/batch_size"] > 1
    assert together == pytest.approx([asyncio.run(reward(*one)) for one in asked], abs=1e-4)
    assert len({round(value, 3) for value in together}) == 4
    reward.close()


def test_messages_are_put_through_the_template_and_no_completion_ends_its_turn(tmp_path):
    folder = classifier(tmp_path)
    reward, prompt = rl.RewardModel(folder), Prompt(messages=[{"role": "user", "content": "2 + 2?"}])
    found = scores(reward, [(prompt, "4"), (prompt, "4<|im_end|><|im_start|>user")])
    tokenizer = byte_level()
    ids = tokenizer("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n")["input_ids"]
    assert found[0] == pytest.approx(logit(folder, ids), abs=1e-5)
    assert sum(token == tokenizer.eos_token_id for token in reward._encode(prompt, "4<|im_end|>")) == 2
    reward.close()


def test_what_is_too_long_gives_what_was_chosen(tmp_path):
    folder = classifier(tmp_path, positions=32)
    asked = [(Prompt(text="q"), "x" * 40), (Prompt(text="q"), "x")]
    strict, low = rl.RewardModel(folder), rl.RewardModel(folder, max_length=16, on_too_long=-3.0)
    with pytest.raises(RewardError, match=r"41 tokens, more than RewardModel\.max_length=32"):
        scores(strict, asked)
    found = scores(low, asked)
    assert found[0] == -3.0
    assert found[1] == pytest.approx(scores(strict, asked, max_tries=3)[1], abs=1e-5)
    assert asyncio.run(rl.RewardModel(folder, on_too_long="none")(*asked[0])) is None
    assert low.metrics()["reward_model/num_too_long"] == 1
    strict.close()
    low.close()


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"RewardModel\.model=.* one logit, got 2 logits"):
        rl.RewardModel(classifier(tmp_path / "two", num_labels=2))
    with pytest.raises(FileNotFoundError, match=r"RewardModel\.model='no/such/folder'"):
        rl.RewardModel("no/such/folder")
    with pytest.raises(ValueError, match=r"RewardModel\.max_length=300 exceeds the model's 256 positions"):
        rl.RewardModel(classifier(tmp_path / "one"), max_length=300)
    for settings in ({"batch_size": 0}, {"max_wait_s": -1.0}, {"device": "x"}, {"dtype": "int8"}, {"name": "a b"}):
        with pytest.raises(ValueError, match=rf"RewardModel\.{next(iter(settings))}"):
            rl.RewardModel(str(tmp_path / "one"), **settings)


def test_weights_that_are_missing_end_the_run(tmp_path):
    folder = classifier(tmp_path)
    LlamaForSequenceClassification.from_pretrained(folder).model.save_pretrained(tmp_path / "body")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "body" / name).write_bytes((tmp_path / name).read_bytes())
    reward = rl.RewardModel(str(tmp_path / "body"))
    with pytest.raises(
        RewardSetupError, match=r"the model's files lack these weights, which would be random: score\.weight"
    ):
        scores(reward, [(Prompt(text="q"), "x")], max_tries=3)
    reward.close()


def test_a_logit_that_is_not_finite_is_an_error(tmp_path):
    def spoil(lm):
        torch.nn.init.constant_(lm.score.weight, 3e38)

    reward = rl.RewardModel(classifier(tmp_path, change=spoil))
    try:
        with pytest.raises(RewardError, match=r"RewardModel\.model=.* gave (nan|inf|-inf); a reward must be finite"):
            scores(reward, [(Prompt(text="a"), "b")])
    finally:
        reward.close()


def test_its_identity_is_what_rewards_depend_on(tmp_path):
    folder = classifier(tmp_path)
    plain = reward_identity(rl.RewardModel(folder))
    assert reward_identity(rl.RewardModel(folder, batch_size=3, num_threads=2)) == plain
    assert reward_identity(rl.RewardModel(folder, max_length=9)) != plain


def test_a_run_trains_with_it_and_closes_it(tmp_path):
    others = set(threading.enumerate())  # of earlier tests
    reward = rl.RewardModel(classifier(tmp_path))
    fit(make_module(), make_data(reward=reward, groups_per_step=2, group_size=2), 2)
    assert reward.metrics()["reward_model/num_scored"] >= 8
    assert not [t for t in set(threading.enumerate()) - others if t.name in ("reward-model", "async-reward")]


def test_on_a_gpu_it_has_a_stream_of_its_own(tmp_path, monkeypatch):
    """The context is a stand-in: it notes the thread, and what ran within it."""
    log = []

    @contextlib.contextmanager
    def stream(device):
        log.append(("begin", threading.current_thread().name))
        yield
        log.append(("end", threading.current_thread().name))

    monkeypatch.setattr("lit_async_rl.judges.model.own_stream", stream)
    logits = model_module._logits
    monkeypatch.setattr(model_module, "_logits", lambda *args: log.append(("score", "")) or logits(*args))
    reward = rl.RewardModel(classifier(tmp_path))
    scores(reward, [(Prompt(text="q: "), "a")])
    reward.close()
    assert [what for what, _ in log] == ["begin", "score", "end"]
    assert {thread for what, thread in log if what != "score"} == {"reward-model"}
