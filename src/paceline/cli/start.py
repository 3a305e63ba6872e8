"""The first steps: what `paceline` alone says, and `paceline example`, which writes a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.running.common import errors_for_people
from paceline.errors import ConfigError

FIRST_STEPS = """\
Paceline trains one PyTorch model on many workers, and you choose how tightly they keep step.

First steps:
  paceline example digits.py                    write a training script to begin with
  paceline train digits.py --workers 2          train it on two workers of this machine
  paceline compare digits.py --workers 4 --slow 3:2 --device-time 0.02
                                                one worker is slow: compare protocols, draw a report
  paceline report runs/latest                   draw that run: open report.html in a browser
  paceline simulate --workers 8 --slow 1:3 --protocol bsp,ssp,asp
                                                see who waits for whom, without training

In a script of your own three lines are Paceline's: import paceline, join(), prepare().
"""


def first_steps(runs: Path = Path("runs")) -> None:
    """Say what to do next: the first steps, and how to look at the newest run if there is one."""
    print(FIRST_STEPS)
    if (runs / "latest").exists():
        newest = (runs / "latest").resolve().name
        print(f"The newest run is {newest}. Draw it: paceline report {runs / 'latest'}")
    print("All commands: paceline --help. The flags of one: paceline train --help.")


def example(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")] = Path("digits.py"),
) -> None:
    """Write a training script to begin with.

    It trains a small CNN on the digits that scikit-learn ships.

    Example: paceline example digits.py
    """
    with errors_for_people():
        text = packaged_example().read_text()
        try:
            with file.open("x") as new:
                new.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{file} exists already. Name another file: paceline example my_{file.name}."
            ) from None
        except FileNotFoundError:
            raise ConfigError(
                f"cannot write {file}: there is no folder {file.parent}. "
                f"Make it first: mkdir -p {file.parent}"
            ) from None
    print(f"wrote {file}. Train it on two workers: paceline train {file} --workers 2", file=sys.stderr)
    if not _has_digits():
        print("it needs scikit-learn: pip install 'paceline[demo]'", file=sys.stderr)


def packaged_example() -> Path:
    """The script as it was installed; in a checkout, the one in examples/."""
    import paceline

    package = Path(paceline.__file__).parent
    installed = package / "examples" / "digits.py"
    return installed if installed.is_file() else package.parents[1] / "examples" / "digits.py"


def _has_digits() -> bool:
    from importlib.util import find_spec

    return find_spec("sklearn") is not None
