"""Keys and passwords, which no message, log or file of a run may show."""

from __future__ import annotations

import copy
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

CONCEALED = "***"
SECRET_NAME = re.compile(r"(?i)(api_?key|token|secret|password)$")  # of a setting that may hold one
_NAME = (  # of one that does, also as a header
    r"(?:(?:access|api|private|secret)[_-]?key|(?:access|api|auth|bearer|hf|hub)[_-]?token|secret|password"
    r"|authorization|cookie)"
)
_HOLDER = re.compile(rf"(?i){_NAME}s?$")
VARIABLE_NAME = re.compile(r"[A-Z]{1,16}(_[A-Z0-9]{1,16})*")  # as variables are called, and no key is
CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")  # of an address, `https://user:password@host`
_KEYS = re.compile(  # by their form: OpenAI and others, Hugging Face, GitHub, Slack, Google, AWS, a JSON Web Token
    r"\b(sk-[\w-]{8,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w+|xox[abpr]-[\w-]+|AIza[\w-]{30,}|AKIA[A-Z0-9]{12,}"
    r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)
_NAMED = re.compile(  # `api_key_env: '...'`
    rf"(?i)({_NAME}(?:_env|_var)?['\"]?\s*[:=]\s*)"
    r"(['\"]?)((?:bearer )?[^'\"\s,;)}\]]+)"
)


def without_secrets(text: str) -> str:
    """Redacts likely keys in a text: by their form, by the name before them, or as the password of an address."""
    text = CREDENTIALS.sub(CONCEALED, _KEYS.sub(CONCEALED, text))
    return _NAMED.sub(lambda found: found[0] if _may_be_shown(found[3]) else f"{found[1]}{found[2]}{CONCEALED}", text)


def _may_be_shown(value: str) -> bool:
    return value in ("None", "null", CONCEALED) or bool(VARIABLE_NAME.fullmatch(value))


def variable(setting: str, name: str) -> str:
    """A setting with the variable's name, for a message; without it if it may be a key.

    Args:
        setting: that names the variable.
        name: as it was given.
    """
    return f"{setting}={name!r}" if VARIABLE_NAME.fullmatch(str(name)) else f"{setting} (not shown, it may be a key)"


def key_of_variable(setting: str, name: str | None) -> str:
    """The key in an environment variable; an empty text where none is named.

    Args:
        setting: that names the variable.
        name: of the variable.

    Raises:
        ValueError: there is no such variable, see `variable`.
    """
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise ValueError(
            f"{variable(setting, name)} is not set in the environment: give the name of the environment variable that "
            "holds the key"
        )
    return key


def check_address(setting: str, url: str, key_setting: str) -> None:
    """Refuses an address with a password or query, since it appears in configurations and messages.

    Args:
        setting: that holds it.
        url: the address.
        key_setting: names an environment variable with the key.

    Raises:
        ValueError: it does; names the setting, and does not repeat the address.
    """
    if any(sign in url for sign in "?#@"):
        raise ValueError(
            f"the address {setting} must contain no user, password or query, because it appears in configurations and "
            f"messages: put the key into an environment variable, and set {key_setting} to the name of that variable"
        )


def concealed(value: Any, name: str = "") -> Any:
    """A setting with `***` for each text under the name of a key or password, for trackers and files.

    Args:
        value: the setting; unchanged. Namespaces of the command line may be in it, too.
        name: of the setting; all in a list or dictionary under the name of a key is concealed.
    """
    is_secret = _HOLDER.search(name) is not None
    if isinstance(value, str):
        return CONCEALED if is_secret or name == "token" else value
    if isinstance(value, Mapping):
        return {key: concealed(item, name if is_secret else str(key)) for key, item in value.items()}
    if isinstance(value, Namespace):
        found = copy.copy(value)
        vars(found).update(concealed(vars(value), name))
        return found
    if isinstance(value, (list, tuple, set)):
        items = [concealed(item, name) for item in value]
        if hasattr(value, "_fields"):  # a namedtuple takes its items one by one
            return type(value)(*items)
        return items if isinstance(value, list) else type(value)(items)
    return value
