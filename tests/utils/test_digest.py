"""Checks of a checkpoint's content before it is loaded."""

import pytest

from lit_async_rl.runtime.checkpoint_files import check_content

NEEDED = ("state_dict", "version", "updated")


@pytest.mark.parametrize("missing", [*((name,) for name in NEEDED), NEEDED[:2], NEEDED])
def test_a_checkpoint_that_lacks_any_needed_key_is_refused(missing):
    saved = {name: 0 for name in NEEDED if name not in missing} | {"epoch": 3}
    with pytest.raises(ValueError, match=r"there is not a checkpoint of a PolicyModule.*has .*epoch"):
        check_content(saved, "there", NEEDED)


def test_a_checkpoint_with_all_needed_keys_and_others_is_accepted():
    check_content(dict.fromkeys((*NEEDED, "epoch")), "there", NEEDED)


@pytest.mark.parametrize("content", [None, [], "state_dict version updated"])
def test_what_is_no_dictionary_is_refused(content):
    with pytest.raises(ValueError, match=f"has {type(content).__name__}$"):
        check_content(content, "there", NEEDED)
