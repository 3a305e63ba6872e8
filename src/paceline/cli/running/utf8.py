"""Names that are not ASCII, whatever the locale: `main.py` asks for it before anything else.

In the C locale Python cannot read such names of files, and records of a run (JSON) are UTF-8 anyway. So the
command begins anew in Python's UTF-8 mode there, which its workers inherit.
"""

from __future__ import annotations

import os
import sys

from paceline.errors import ConfigError


def use_utf8() -> None:
    """Begin anew in UTF-8 mode, if need be; refuse names that are not UTF-8."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and sys.stdout.errors == "strict":
        reconfigure(errors="backslashreplace")
    for name in (os.getcwd(), *sys.argv[1:]):
        _check(name)


def _check(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name {name!a} is not UTF-8, in which a run is recorded. Rename the file or folder."
        ) from None
