"""Where a run is, and its checkpoint, while it is made and once it is whole."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import ConfigError


def new_folder(runs: Path, run: str) -> Path:
    """A fresh folder for a run, and `latest` pointing at it."""
    folder = runs / run
    try:
        folder.mkdir(parents=True)
        newest = folder.with_suffix(".latest")
        newest.symlink_to(run)
        newest.replace(runs / "latest")  # at once: other commands may begin a run at the same time
    except OSError as error:
        raise ConfigError(
            f"cannot write runs to {runs}: {error.strerror}. Choose a folder with --runs."
        ) from None
    return folder


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is made before it takes its place."""
    return folder.with_name(folder.name + ".partial")


def previous_of(folder: Path, steps: int = 1) -> Path:
    """Where the checkpoint before it is, or the one so many steps before."""
    return folder.with_name(folder.name + ".previous" + (f".{steps}" if steps > 1 else ""))


def all_saved_in(run: Path) -> list[Path]:
    """The checkpoints of a run that are whole, damaged or not, the newest first; a run killed between two
    renames has only the one before."""
    newest = run / "checkpoint"
    older = run.glob(f"{newest.name}.previous*")
    places = [newest, *sorted(older, key=lambda path: (len(path.name), path.name))]
    return [each for each in places if is_checkpoint(each)]


def saved_in(run: Path) -> Path | None:
    """The newest of them."""
    return next(iter(all_saved_in(run)), None)


def resume_command(config: RunConfig) -> str | None:
    """What goes on from the checkpoint of a run; None: it left none."""
    if saved_in(config.path) is None:
        return None
    return shlex.join(["paceline", "train", str(config.script), "--resume", str(config.path)])


def go_on(config: RunConfig) -> str:
    """How to, in a sentence of its own, if there is a checkpoint to go on from."""
    command = resume_command(config)
    return "" if command is None else f" Its checkpoint is {saved_in(config.path)}. Go on with: {command}"


def is_checkpoint(folder: Path) -> bool:
    """Whether it holds one, damaged or not."""
    return any((folder / name).is_file() for name in ("model.safetensors", "state.json", "lone.json"))
