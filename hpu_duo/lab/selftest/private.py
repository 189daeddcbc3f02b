"""Names and addresses of the machine, and names of its user, which a report does not have."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable
from pathlib import Path

_PART = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Versions may have four parts too, so an address is one with a port, or of a private network.
_ADDRESS = re.compile(
    rf"(?<![\w.-])(?:{_PART}(?:\.{_PART}){{3}}(?=:\d)"
    rf"|(?:10\.{_PART}|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.{_PART}){{2}}(?!\w|\.\d))"
    r"|(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])"
)


def hide_names() -> Callable[[str], str]:
    """Return a function that replaces the host's name, addresses, the home directory and the user's in paths.

    Addresses are those of IPv4, with a port or of a private network, and of network cards.
    """
    patterns = [(_ADDRESS, "ADDRESS")]
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
