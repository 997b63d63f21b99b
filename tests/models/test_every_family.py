"""Every causal-LM type that transformers can build: computed rightly by trainer and engine, or refused by name."""

import json

import pytest
import transformers
from every_family import PARTS, TABLE, UNBUILDABLE, examine, model_types, params, reason

USUAL = {"llama", "gpt2", "gemma2", "mamba2"}
STORED = json.loads(TABLE.read_text())
KINDS = {name: kind for name, kind in model_types().items() if name not in UNBUILDABLE}


@pytest.mark.parametrize("name", params(KINDS, usual=USUAL, sampled=pytest.mark.slow, rest=pytest.mark.sweep))
def test_a_model_type_is_right_or_refused_and_the_documentation_says_which(name, tmp_path):
    found = {part: reason(message) for part, message in examine(KINDS[name], tmp_path).items()}
    if transformers.__version__ == STORED["transformers"]:
        assert found == STORED["types"][name]


def test_the_documentation_has_all_types_of_its_version():
    if transformers.__version__ == STORED["transformers"]:
        assert STORED["types"].keys() == KINDS.keys()
    right = [name for name, parts in STORED["types"].items() if not any(parts[part] for part in PARTS)]
    assert len(right) > 60
