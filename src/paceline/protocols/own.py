"""A user's own protocols: a class in a file (`my_rules.py:HalfWay`), or one from an installed package.

A file is the user's own code, as the training script is: it is named on the command line or by the script,
found on this machine, and run. Nothing that came over a network is ever run. A package offers a protocol by
an entry point of the group `paceline.protocols`, under a name of its own.

What was loaded is remembered with the SHA-256 of its file, so that a run can tell whether all of its
processes use the same one, and a replay whether it is still the one of the record.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.protocols.core.base import Pacing
from paceline.protocols.core.peer import Peer
from paceline.protocols.own_checks import check_protocol, protocols_in

GROUP = "paceline.protocols"
Kind = type[Pacing] | type[Peer]


class Own(NamedTuple):
    """A protocol that is not built in."""

    cls: Kind
    digest: str
    """SHA-256 of the file it stands in, as it was when it was loaded."""


_known: dict[str, Own] = {}
"""What was loaded in this process, by its name."""
_modules: dict[str, tuple[str, ModuleType]] = {}
"""Files that were run in this process: their SHA-256 and what they define, by path."""
_loading: list[str] = []
"""Files that are being run just now, to find a protocol in them."""


def names_a_file(name: str) -> bool:
    """Whether this is `file.py:Class`, or the file alone."""
    return name.endswith(".py") or name.rpartition(":")[0].endswith(".py")


def canonical(name: str) -> str:
    """One name for one class, however its path is written: from the current folder, if the file is in it."""
    if not names_a_file(name) or name.endswith(".py"):
        return name
    file, _, cls = name.rpartition(":")
    path = os.path.realpath(file)
    inside = os.path.relpath(path, os.path.realpath(os.curdir))
    return f"{path if inside.startswith(os.pardir) else inside}:{cls}"


def short(name: str) -> str:
    """The class alone, where a path has no place: the name of a run's folder, say."""
    return name.rpartition(":")[2] if names_a_file(name) else name


def find(name: str) -> Kind | None:
    """The class under this name, loaded if need be; None if it is neither a file's nor a package's."""
    own = _of_file(canonical(name)) if names_a_file(name) else _offered(name)
    if own is None:
        return None
    _known[canonical(name)] = own
    return own.cls


def known(name: str) -> Own | None:
    """What was loaded under this name in this process; nothing is loaded."""
    return _known.get(canonical(name))


def digest(name: str | None) -> str:
    """The SHA-256 of the file of a protocol of one's own that was loaded; of others nothing."""
    own = None if name is None else known(name)
    return "" if own is None else own.digest


def named(cls: Kind) -> str:
    """The name under which other processes find this class: its entry point's, else its file and its own."""
    installed = (entry.name for entry in _entry_points() if _is_at(cls, entry.value))
    return loaded_as(cls) or next(installed, None) or _adopt(cls)


def loaded_as(cls: type) -> str | None:
    """The name under which this class was loaded in this process, if it was."""
    return next((name for name, own in _known.items() if own.cls is cls), None)


def check_same_file(name: str, expected: str, where: str) -> None:
    """Refuse a file that is not the one the run was started with."""
    mine = digest(name)
    if expected and mine != expected:
        raise ConfigError(
            f"the file of protocol {name!r} is not the same everywhere: SHA-256 {mine[:12] or 'unknown'} on "
            f"host {os.uname().nodename}, {expected[:12]} {where}. Copy the file to every host, and do not "
            "change it while a run starts."
        )


def check_not_loading() -> None:
    """Refuse to begin a training while a file is merely run to find a protocol in it."""
    if _loading:
        raise ConfigError(
            f"{_loading[-1]} calls paceline.join() when it is loaded, so its protocol cannot be loaded "
            "without training. Put the class in a file of its own, or the training under `if __name__ == "
            "'__main__'`."
        )


def offered() -> dict[str, str]:
    """The protocols that installed packages offer: name, and the class as `module:Class`."""
    return {entry.name: entry.value for entry in _entry_points()}


# -- files --------------------------------------------------------------------------------------------


def _of_file(name: str) -> Own:
    file, _, cls = ("", "", "") if name.endswith(".py") else name.rpartition(":")
    file = file or name
    path = Path(os.path.realpath(file))
    if not path.is_file():
        raise ConfigError(
            f"no file {file} for protocol {name!r}, seen from {os.getcwd()} on host {os.uname().nodename}. "
            "Give the path of a Python file; every host of a run needs it at the same path."
        )
    module, sha256 = _module(path, file)
    if not cls:
        raise ConfigError(f"{file} is a file; name a class in it, as {file}:{_example(module)}.")
    found = getattr(module, cls, None)
    if found is None:
        there = ", ".join(protocols_in(module)) or "none"
        raise ConfigError(f"no class {cls!r} in {file}. Protocols there: {there}.")
    return Own(check_protocol(name, found), sha256)


def _example(module: ModuleType) -> str:
    return next(iter(protocols_in(module)), "HalfWay")


def _module(path: Path, shown: str) -> tuple[ModuleType, str]:
    """What a file defines. It is run once for every content it has; a script that runs already is not."""
    text = _read(path, shown)
    sha256 = hashlib.sha256(text).hexdigest()
    for running in (sys.modules.get("__main__"), sys.modules.get(path.stem)):
        if running is not None and _file_of(running) == str(path) and str(path) not in _modules:
            return running, sha256
    cached = _modules.get(str(path))
    if cached is None or cached[0] != sha256:
        cached = _modules[str(path)] = sha256, _run(path, shown)
    return cached[1], sha256


def _read(path: Path, shown: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}. Fix its permissions.") from None


def _run(path: Path, shown: str) -> ModuleType:
    """Import the file: as part of its package if it is in one, else under a name that nobody else has."""
    parents = _packages(path)
    root = path.parents[len(parents)]
    name = ".".join([*parents, path.stem]) if parents else f"paceline_own_{_tag(path)}_{path.stem}"
    _loading.append(shown)
    try:
        with _blamed_on(shown), _found_in(root):
            if parents:
                return _imported(name, path)
            return _fresh(name, path)
    finally:
        _loading.pop()


class _Source(SourceFileLoader):
    """Runs what the file says now. Python would take a compiled form of the same second and length for it."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(Path(self.path).read_bytes(), self.path, "exec", dont_inherit=True)


def _fresh(name: str, path: Path) -> ModuleType:
    loader = _Source(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _imported(name: str, path: Path) -> ModuleType:
    if str(path) in _modules:  # with another content, or it would not be run again
        return _fresh(name, path)
    module = importlib.import_module(name)
    if _file_of(module) != str(path):
        raise ConfigError(
            f"{path} is module {name!r} of a package, but a package of that name is imported already, from "
            f"{_file_of(module)}. Rename one of them."
        )
    return module


def _packages(path: Path) -> list[str]:
    """The packages a file is in, outermost first: folders with an `__init__.py`."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _tag(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:8]


def _file_of(module: Any) -> str:
    file = getattr(module, "__file__", None)
    return "" if file is None else os.path.realpath(file)


@contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Modules beside the file can be imported while it is run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _blamed_on(shown: str) -> Iterator[None]:
    """Errors of the file's own code, in one line that names it."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename or shown}, line {error.lineno}: {error.msg}. Fix the file."
        ) from None
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{shown} raised {type(error).__name__} when it was loaded: {text}. Fix it. Code that should "
            "run only as a script belongs under `if __name__ == '__main__'`."
        ) from error


# -- installed packages, and classes that a script hands over -------------------------------------------


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _offered(name: str) -> Own | None:
    entries = {entry.value: entry for entry in _entry_points() if entry.name == name}
    if not entries:
        return None
    if len(entries) > 1:
        raise ConfigError(
            f"several installed packages offer a protocol {name!r}: {', '.join(sorted(entries))}. Uninstall "
            "all but one of them, or name a class by its file, as my_rules.py:HalfWay."
        )
    (value,) = entries
    with _blamed_on(f"the installed protocol {name!r} ({value})"):
        cls = entries[value].load()
    return Own(check_protocol(name, cls), _digest_of(cls))


def _is_at(cls: type, value: str) -> bool:
    return value == f"{cls.__module__}:{cls.__qualname__}"


def _adopt(cls: Kind) -> str:
    """Name a class that is in use already by its file, without running that again."""
    path = _file_of(sys.modules.get(cls.__module__))
    if not path or "." in cls.__qualname__:
        raise ConfigError(
            f"the other processes of a run cannot find the class {cls.__qualname__}: it must be at the top "
            "level of a file, not in a function, another class or a notebook. Move it to a file such as "
            "my_rules.py."
        )
    name = canonical(f"{path}:{cls.__qualname__}")
    _known[name] = Own(check_protocol(name, cls), _digest_of(cls))
    return name


def _digest_of(cls: type) -> str:
    path = _file_of(sys.modules.get(cls.__module__))
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
