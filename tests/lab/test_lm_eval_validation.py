"""Tasks of lm-eval while training, on local data: scores are those of plain forward passes and greedy samples."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from flow import MODEL, fit, make_data, make_module
from metric_page import find
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_async_rl as rl
from lit_async_rl.training.trackers import CSVLog

pytest.importorskip("lm_eval")

PROBLEMS = [
    {"question": f"{digits}=", "sorted": "".join(sorted(digits)), "reversed": "".join(sorted(digits))[::-1]}
    for digits in ("31424210", "98765432", "11112222", "50505050", "27182818", "31415926")
]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task of two choices and one of generated answers, on local data."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    shared |= {"doc_to_text": "{{question}}", "target_delimiter": ""}
    choice = {"task": "sort_choice", "output_type": "multiple_choice", "doc_to_target": 0}
    choice |= {"doc_to_choice": "{{[sorted, reversed]}}", "metric_list": [{"metric": "acc"}]}
    answer = {"task": "sort_answer", "output_type": "generate_until", "doc_to_target": "{{sorted}}"}
    answer |= {"generation_kwargs": {"until": ["="], "max_gen_toks": 10}, "metric_list": [{"metric": "exact_match"}]}
    for task in (choice, answer):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    return str(folder)


def expected() -> tuple[float, float]:
    """(share of problems whose sorted digits are likelier than the reversed ones, share solved greedily)."""
    lm = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def logprob(prompt: str, answer: str) -> float:
        ids = torch.tensor([tokenizer.encode(prompt + answer, add_special_tokens=False)])
        count = len(tokenizer.encode(answer, add_special_tokens=False))
        with torch.no_grad():
            logprobs = lm(ids).logits[0, -count - 1 : -1].log_softmax(-1)
        return float(logprobs.gather(-1, ids[0, -count:, None]).sum())

    def greedy(prompt: str) -> str:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        with torch.no_grad():
            found = lm.generate(ids, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))
        return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).partition("=")[0]

    likelier = [logprob(p["question"], p["sorted"]) > logprob(p["question"], p["reversed"]) for p in PROBLEMS]
    solved = [greedy(p["question"]) == p["sorted"] for p in PROBLEMS]
    return sum(likelier) / len(PROBLEMS), sum(solved) / len(PROBLEMS)


@pytest.mark.slow
def test_tasks_are_scored_as_by_plain_passes_logged_and_leave_training_alone(tasks, tmp_path):
    callback = rl.LMEvalValidation(["sort_choice", "sort_answer"], every_n_steps=2, include_path=tasks, batch_size=4)
    module = make_module()
    log = CSVLog(tmp_path, name="run")
    fit(module, make_data(schedule="fixed_lag", max_staleness=1), 3, [callback], logger=log, log_every_n_steps=1)
    assert sorted(callback.results) == [0, 2, 3]
    likelier, solved = expected()
    assert likelier > 0
    assert callback.results[0]["lm_eval/sort_choice/acc"] == pytest.approx(likelier)
    assert callback.results[0]["lm_eval/sort_answer/exact_match"] == pytest.approx(solved)
    assert all(find(name) for name in callback.results[0])
    assert "lm_eval/sort_choice/acc" in (tmp_path / "run/version_0/metrics.csv").read_text()
    alone = make_module()
    fit(alone, make_data(schedule="fixed_lag", max_staleness=1), 3)
    for with_it, without in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(with_it, without)


def test_long_prompts_lose_their_beginning(monkeypatch):
    from lit_async_rl.lab.lm_eval_validation import answer_logprobs

    data = make_data()
    lm = make_module().policy.causal_lm
    ids = data.codec.tokenizer.encode("31424210=01122344", add_special_tokens=False)
    with torch.no_grad():
        ((whole, _),) = answer_logprobs(lm, [(ids[:-1], ids[-1:])], data)
        monkeypatch.setattr(lm.config, "max_position_embeddings", 4)
        ((cut, _),) = answer_logprobs(lm, [(ids[:-1], ids[-1:])], data)
        ((same, _),) = answer_logprobs(lm, [(ids[-5:-1], ids[-1:])], data)
    assert cut == pytest.approx(same)
    assert cut != pytest.approx(whole)


@pytest.mark.slow
def test_an_unknown_task_is_refused_before_anything_is_sampled(tasks):
    callback = rl.LMEvalValidation(["sort_choise"], include_path=tasks)
    with pytest.raises(ValueError, match=r"LMEvalValidation.tasks: lm-eval has no task 'sort_choise'; did you mean"):
        fit(make_module(), make_data(), 1, [callback])
    with pytest.raises(ValueError, match=r"LMEvalValidation.tasks must be a list of names such as \['arc_easy'\]"):
        rl.LMEvalValidation("arc_easy")
