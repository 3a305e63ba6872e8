"""The secret of a run that spans hosts: given in a file or the environment, or made (`paceline secret`)."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.running.common import errors_for_people
from paceline.decoding import decode_text
from paceline.errors import ConfigError, Undecodable
from paceline.fabric.wire import check_secret, new_secret

VARIABLE = "PACELINE_SECRET"


def given_secret(file: Path | None) -> str | None:
    """What the user gave; None if nothing."""
    text = os.environ.get(VARIABLE)
    if file is not None:
        try:
            text = _content(file)
            _warn_if_readable(file)
        except OSError as error:
            raise ConfigError(f"cannot read the secret in {file}: {error.strerror}.") from None
    if text is not None:
        check_secret(text)
    return text


def _content(file: Path) -> str:
    try:
        return decode_text(file.read_bytes()).strip()
    except Undecodable as error:
        raise ConfigError(
            f"{file} holds no secret: {error}. Make one with `paceline secret --out FILE`."
        ) from None


def needed_secret(file: Path | None) -> bytes:
    """What the user gave, since there is no way without."""
    secret = given_secret(file)
    if secret is None:
        raise ConfigError(
            "hosts talk only to who knows the same secret, and none was given. Make one with "
            f"`paceline secret --out FILE`, and give it to both by --secret-file FILE or {VARIABLE}."
        )
    return check_secret(secret)


def secret_for(folder: Path, file: Path | None) -> str:
    """The secret of a run that listens; a new one is kept in its folder, for its owner's eyes only."""
    given = given_secret(file)
    if given is not None:
        return given
    return _make(folder / "secret")


def secret(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to put it.")],
) -> None:
    """Make a secret for runs over several hosts.

    Only the owner of its file can read it. A file that holds one already is kept, and made its owner's only.

    Example: paceline secret --out run.secret
    """
    with errors_for_people():
        try:
            _make(out)
        except FileExistsError:
            check_secret(_content(out))
            out.chmod(0o600)
            print(f"{out} holds a secret already, which is kept", file=sys.stderr)


def _make(path: Path) -> str:
    made = new_secret()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(made + "\n")
    return made


def _warn_if_readable(file: Path) -> None:
    """A pipe or the like, as of `<(...)`, is nobody else's."""
    found = file.stat()
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
        print(
            f"warning: others can read the secret in {file} (mode {found.st_mode & 0o777:o}), and whoever "
            f"knows it can take part in the run. Make it yours alone: chmod 600 {file}",
            file=sys.stderr,
        )
