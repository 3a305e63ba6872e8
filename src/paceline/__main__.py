"""The `paceline` command, also as `python -m paceline`. Ctrl-C ends it with one word at any moment."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the installed command."""
    try:
        from paceline.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
