"""Names of the machine and its user, which a report does not have."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable
from pathlib import Path


def hide_names() -> Callable[[str], str]:
    """Return a function that replaces the host's name, the home directory and the user's in paths."""
    patterns = []
    if (home := str(Path.home())) != "/":
        patterns.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~"))
    if user := _user():
        patterns.append((re.compile(rf"(?<=/){re.escape(user)}(?![\w.-])"), "USER"))
    host = socket.gethostname().partition(".")[0]
    if host not in ("", "localhost"):
        # With its domain, if that follows.
        patterns.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?:\.[\w-]+)*(?![\w-])"), "HOST"))

    def hide(text: str) -> str:
        for pattern, stand_in in patterns:
            text = pattern.sub(stand_in, text)
        return text

    return hide


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in some containers
        return ""
