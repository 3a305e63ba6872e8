"""The secret of a run that spans hosts: from a file, from the environment, or made anew."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import ConfigError
from paceline.fabric.wire import check_secret, new_secret

VARIABLE = "PACELINE_SECRET"


def given_secret(file: Path | None) -> str | None:
    """What the user gave; None if nothing."""
    text = os.environ.get(VARIABLE)
    if file is not None:
        try:
            text = file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the secret in {file}: {error.strerror}.") from None
    if text is not None:
        check_secret(text)
    return text


def needed_secret(file: Path | None) -> bytes:
    """What the user gave, since there is no way without."""
    secret = given_secret(file)
    if secret is None:
        raise ConfigError(
            "hosts talk only to who knows the same secret, and none was given. Make one with "
            f"`openssl rand -hex 32`, and give it to both by --secret-file FILE or {VARIABLE}."
        )
    return check_secret(secret)


def secret_for(folder: Path, file: Path | None) -> str:
    """The secret of a run that listens; a new one is kept in its folder, for its owner's eyes only."""
    given = given_secret(file)
    if given is not None:
        return given
    secret, path = new_secret(), folder / "secret"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(secret + "\n")
    return secret
