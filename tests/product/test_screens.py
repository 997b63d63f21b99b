"""What a person sees who types README's commands into a terminal of 80, 100 or 160 columns.

`screens/` has what was seen once and looked at; what is seen now is compared with it but for numbers, and for lines
that depend on the speed of the machine. `SCREENS=write pytest tests/product/test_screens.py` writes the files again;
look at each of them then.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from preloaded import ROOT
from terminal import type_command, type_in_fork

WIDE = pytest.param(160, marks=pytest.mark.sweep)
SCREENS = Path(__file__).parent / "screens"
SMALL = ["--data.groups_per_step", "4", "--data.validation.prompts.init_args.size", "16"]
SMALL += ["--trainer.val_check_interval", "10", "--defaults.verdict.init_args.every_n_steps", "3"]
SMALL += ["--defaults.checkpoint.init_args.every_n_train_steps", "5"]
QUICK_START = ["--config", "configs/quickstart.yaml", *SMALL]
MISSPELT = ["--config", "configs/quickstart.yaml", "--data.max_stalenes", "2"]
CHECKPOINT = "runs/quickstart/version_0/checkpoints/last.ckpt"


@pytest.fixture
def folder(tmp_path):
    """A clone, as far as these commands look at it."""
    for name in ("configs", "scripts", "lit_async_rl"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def python_block():
    """README's first example, with fewer steps."""
    code = re.search(r"<!-- python-first -->.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    return re.sub(r"max_steps=\d+", "max_steps=6, groups_per_step=4", code)


# -- comparison with what was looked at -------------------------------------------------------------------------------


def essence(lines):
    """Lines without numbers, and without what the speed of a machine decides: advice, ages of tokens, notices."""
    found = []
    in_advice = False
    for line in lines:
        text = re.sub(r"\d+(?:[.,:]\d+)*", "#", line)
        text = re.sub(r"[█░]+", "█", re.sub(r"─+", "─", text))
        text = re.sub(r"^resumed: .*", "resumed: ...", " ".join(text.split()))
        if re.match(r"(step #: |whole run: |│ verdict )", text):
            in_advice = True
            found.append(text.partition(":")[0] if text[0] != "│" else "│ verdict")
            continue
        if in_advice and not re.match(r"(step |whole run|run summary|resume|error|[╭╰┌])", text):
            continue
        in_advice = False
        if re.match(r"(waiting for|slow:|│ (staleness )?# █|│ bottleneck|│ trainer (wait|save|forw|optim|val))", text):
            continue
        if "s/step" in text or re.match(r"(│ metrics|step #/# reward)", text):
            text = "(metrics)"  # which of them there are depends on when it was looked
            if found and found[-1] == text:
                continue
        found.append(text)
    return found


def check(seen, name):
    """Nothing is wider than the terminal or glued to something else, and all is as it was looked at."""
    assert "Traceback" not in "\n".join(seen.text)
    for line in [*seen.text, *seen.view]:
        assert len(line) <= seen.columns, line
        for begin in ("whole run:", "resume with:", "loading torch", "`Trainer", "GPU available", "Seed set"):
            assert line.find(begin) in (-1, 0), f"glued together: {line!r}"
    for lines, kind in ((seen.text, ""), (seen.view, "_view")):
        path = SCREENS / f"{name}_{seen.columns}{kind}.txt"
        if not lines and kind:  # a run that ended between two drawings
            continue
        if os.environ.get("SCREENS") == "write":
            path.write_text("\n".join(lines) + "\n")
        assert essence(lines) == essence(path.read_text().splitlines()), path.name


def is_a_box(lines):
    """Each border is where the others are."""
    rows = [line.strip() for line in lines if line.strip()[:1] in ("┌", "│", "└", "╭", "╰")]
    return bool(rows) and len({len(line) for line in rows}) == 1


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.slow), WIDE])
def test_quick_start_and_resume(columns, folder, process):
    seen = type_in_fork(process, [*QUICK_START, "--trainer.max_steps", "10"], columns, folder)
    assert seen.status == 0, seen.text
    check(seen, "quick_start")
    assert seen.view, "no drawing of the run was seen"
    assert is_a_box(seen.view)
    assert is_a_box(seen.text)
    assert any(line.startswith("step 10/10  reward") for line in seen.text)
    more = [*QUICK_START, "--trainer.max_steps", "14", "--ckpt_path", CHECKPOINT]
    resumed = type_in_fork(process, more, columns, folder)
    assert resumed.status == 0, resumed.text
    check(resumed, "resume")
    assert is_a_box(resumed.text)
    assert any("│ resumed" in line for line in resumed.text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "columns", [pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.sweep), WIDE]
)
def test_python_block(columns, folder, process):
    seen = type_in_fork(process, [], columns, folder, code=python_block())
    assert seen.status == 0, seen.text
    check(seen, "python")
    assert is_a_box(seen.text)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_misspelt_key(columns, folder, process):
    seen = type_in_fork(process, MISSPELT, columns, folder)
    assert seen.status == 2
    check(seen, "misspelt")


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_help(columns, folder):
    seen = type_command([sys.executable, "scripts/train.py", "--help"], columns, folder)
    assert seen.status == 0
    check(seen, "help")
