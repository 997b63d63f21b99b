"""Completions on a terminal: nothing that they hold is a command to it."""

import builtins
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.assets import asset
from lit_async_rl.cli import chat
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.utils.visible import visible

EVIL = "a\x1b[2J\x1b]0;title\x07b\r\u202ec\x9b31m\ud800<script>\n\té👩\u200d🔬\u3000z"


def test_control_characters_are_shown_and_all_else_stays():
    assert visible(EVIL) == "a␛[2J␛]0;title␇b␍⟨U+202E⟩c⟨U+009B⟩31m⟨U+D800⟩<script>\n\té👩\u200d🔬\u3000z"


@given(st.text())
def test_what_is_shown_can_be_printed_and_is_shown_as_it_is(text):
    shown = visible(text)
    assert all(unicodedata.category(character) not in ("Cs", "Zl", "Zp") for character in shown)
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown)
    assert visible(shown) == shown


@pytest.mark.parametrize("ask", ["once", "in a conversation"])
def test_a_chat_shows_them_too(ask, monkeypatch, capsys):
    monkeypatch.setattr(TextCodec, "decode", lambda self, token_ids, stop=(): EVIL)
    words = ["--model", str(asset("sort_policy")), "--max_tokens", "1"]
    lines = iter(["12="])
    monkeypatch.setattr(builtins, "input", lambda _: next(lines, "") or (_ for _ in ()).throw(EOFError))
    chat.main([*words, "--prompt", "12="] if ask == "once" else words)
    printed = capsys.readouterr().out
    assert "␛[2J" in printed
    assert "\x1b" not in printed
    assert "\u202e" not in printed
