"""Mental arithmetic as chat prompts, and the reward that reads the last number."""

import re
from pathlib import Path

import pytest
import yaml

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards import last_number
from lit_async_rl.tasks import MentalArithmetic

ROOT = Path(__file__).parents[2]


def questions(split) -> dict[str, Prompt]:
    source = MentalArithmetic(split=split)
    return {source[n].messages[0]["content"]: source[n] for n in range(len(source))}


def test_answers_are_right_and_no_problem_occurs_twice():
    for split in ("train", "held_out"):
        found = questions(split)
        assert len(found) == len(MentalArithmetic(split=split))
        for text, prompt in found.items():
            expression = re.fullmatch(r"What is ([\d x+-]+)\? Answer with just the number\.", text)[1]
            assert eval(expression.replace("x", "*")) == int(prompt.answer) >= 0


def test_worked_answers_restate_the_problem():
    plain, worked = MentalArithmetic(kinds=["products"]), MentalArithmetic(kinds=["products"], worked=True)
    for n in range(len(plain)):
        problem = plain[n].messages[0]["content"].removeprefix("What is ").partition("?")[0]
        assert worked[n].messages == plain[n].messages
        assert worked[n].answer == f"{problem} = {plain[n].answer}"


@pytest.mark.slow
def test_numbers_are_held_out_in_both_orders():
    train, held_out = questions("train"), questions("held_out")
    assert not train.keys() & held_out.keys()
    assert len(held_out) >= 200
    for text in held_out:
        swapped = re.sub(r"is (\d+) ([+x]) (\d+)", r"is \3 \2 \1", text)
        assert swapped not in train


def test_kinds_can_be_chosen_and_more_be_held_out():
    settings = dict(largest=12, largest_factor=10, kinds=["sums", "differences", "products", "tens"], held_out=0.5)
    train, held_out = (MentalArithmetic(split=split, **settings) for split in ("train", "held_out"))
    texts = [source[n].messages[0]["content"][8:-30] for source in (train, held_out) for n in range(len(source))]
    assert len(held_out) >= 200
    assert len(texts) == len(set(texts)) == 169 + 91 + 81 + 81 - 1  # 10 + 10 is of two kinds
    assert {"30 + 90", "12 - 12", "10 x 2", "0 + 0"} <= set(texts)
    with pytest.raises(ValueError, match=r"MentalArithmetic.kinds=\['sum'\]: \['sum'\] are none of \['sums', "):
        MentalArithmetic(kinds=["sum"])


def test_the_factors_of_products_have_a_smallest_and_a_largest():
    settings = dict(largest_factor=12, smallest_factor=1, kinds=["products"], held_out=0.5)
    sources = [MentalArithmetic(split=split, **settings) for split in ("train", "held_out")]
    texts = {source[n].messages[0]["content"][8:-30] for source in sources for n in range(len(source))}
    assert texts == {f"{a} x {b}" for a in range(1, 13) for b in range(1, 13)}
    with pytest.raises(ValueError, match=r"MentalArithmetic\.largest_factor must be >= 5, got 4"):
        MentalArithmetic(smallest_factor=5, largest_factor=4)


def test_the_problems_of_the_shipped_configuration():
    """As docs/models.md says."""
    data = yaml.safe_load((ROOT / "configs/smollm2.yaml").read_text())["data"]
    given = [data["prompts"]["init_args"], data["validation"]["prompts"]["init_args"]]
    train, held_out = (MentalArithmetic(**settings) for settings in given)
    assert (len(train), len(held_out)) == (158, 211)
    asked = [{source[n].text for n in range(len(source))} for source in (train, held_out)]
    assert not asked[0] & asked[1]


def test_fine_tuning_has_the_problems_and_the_adapter_of_what_follows():
    tuned, trained = (
        yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text()) for name in ("smollm2_sft", "smollm2")
    )
    records = tuned["data"]["records"]["init_args"]
    assert records == trained["data"]["prompts"]["init_args"] | {"worked": True}
    assert tuned["data"]["validation"] == trained["data"]["validation"]
    assert {name: tuned["model"][name] for name in ("model", "lora", "packing")} == {
        name: trained["model"][name] for name in ("model", "lora", "packing")
    }


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("7", 1), ("3 + 4 = 7.", 1), ("12-5 is 7\n", 1), ("3 + 4 = 7, not 8", 0), ("seven", 0), ("-7", 0), ("7.5", 0)],
)
def test_the_last_number_counts(completion, reward):
    assert last_number(Prompt(text="", answer="7"), completion) == reward


def test_signs_and_thousands():
    assert last_number(Prompt(text="", answer="-1200"), "It is -1,200") == 1
    assert last_number(Prompt(text="", answer="1200"), "10-1200") == 1
