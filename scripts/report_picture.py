"""Writes docs/report.png: a picture of the report that `paceline compare` makes.

    .venv/bin/python scripts/report_picture.py                      # train once more, then draw
    .venv/bin/python scripts/report_picture.py --report runs/demo.html

It needs Chromium, which opens the page without a window. Without --report it trains the digits example
under four protocols first, which takes about two minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MOST_BYTES = 300_000
COMPARE = (
    *("compare", "examples/digits.py", "--protocols", "bsp,ssp,dssp,asp", "--workers", "4"),
    *("--slow", "3:2.5", "--device-time", "0.04", "--jitter", "0.1", "--target", "0.95"),
)


def browser() -> str:
    """The program that draws the page."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(
            f"error: no Chromium here (looked for {', '.join(BROWSERS)}). It draws the page: install it, "
            "on Debian with `apt-get install chromium`."
        )
    return found


def trained(folder: Path) -> Path:
    """A report of fresh runs."""
    report = folder / "report.html"
    program = Path(sys.executable).parent / "paceline"
    command = [str(program), *COMPARE, "--runs", str(folder / "runs"), "--report", str(report)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit(f"error: {' '.join(command)} failed; its message stands above.")
    return report


def draw(program: str, report: Path, picture: Path, width: int, height: int) -> None:
    """Open the page and keep what can be seen of it."""
    command = [
        *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--virtual-time-budget=5000", f"--window-size={width},{height}"),
        *(f"--screenshot={picture}", report.resolve().as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0 or not picture.is_file():
        raise SystemExit(f"error: {program} drew nothing (exit status {done.returncode}):\n{done.stderr}")


def main() -> None:
    """Train if need be, draw, look at the size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--report", type=Path, help="A report that is there already.")
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=1590)
    asked = parser.parse_args()
    program = browser()
    if asked.report is not None and not asked.report.is_file():
        raise SystemExit(f"error: there is no report at {asked.report}.")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "report.png"
        draw(program, asked.report or trained(Path(folder)), picture, asked.width, asked.height)
        size = picture.stat().st_size
        if size > MOST_BYTES:
            raise SystemExit(
                f"error: the picture has {size} bytes, more than {MOST_BYTES}. Take a smaller --height."
            )
        shutil.copyfile(picture, asked.out)
    print(f"{asked.out}: {size} bytes")


if __name__ == "__main__":
    main()
