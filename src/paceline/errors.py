"""Every exception of the project::

    PacelineError                 any error that Paceline raises on purpose
    ├── ConfigError (ValueError)  the user asked for something impossible; exit status 2
    ├── RunError                  a run could not go on; exit status 1
    │   ├── WorkerFailed          a worker raised, died or was lost
    │   ├── BadGradient           NaN or infinity in a gradient
    │   ├── EngineLost            the process that starts workers is gone
    │   └── RunStopped            the run was told to stop (Ctrl-C); what was done is saved
    ├── TraceError                a trace or result that cannot be read
    │   └── NoTrace               no trace in the given folder (a ConfigError too); exit status 2
    └── Undecodable               a file or message is not in the expected format

All fields are passed to `super().__init__`, so that they cross process boundaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base class of all errors that Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """The user asked for something impossible. Running it again will fail again."""


class RunError(PacelineError, RuntimeError):
    """The request was valid, but the run failed."""


class WorkerFailed(RunError):
    """A worker raised, died or was lost."""


class BadGradient(RunError):
    """A gradient contained NaN or infinity."""


class EngineLost(RunError):
    """The process that starts the workers is gone, and so are they."""


class NobodyThere(RunError):
    """The process that listened at an address has ended."""


class RunStopped(RunError):
    """The run was told to stop. Its state is saved and can be resumed."""


class TraceError(PacelineError, ValueError):
    """A trace, result or checkpoint that cannot be read."""


class NoTrace(TraceError, ConfigError):
    """There is no run in the given folder."""


class Undecodable(PacelineError, ValueError):
    """Bytes that are not in the expected format. The caller that reads a file says which file, and what to
    do."""


def unknown(kind: str, name: str, available: Iterable[str]) -> ConfigError:
    """The error for an unknown name: the name, what it may have meant, and the known names."""
    names = sorted(available)
    swapped = [each for each in names if sorted(each) == sorted(name) and each[:1] == name[:1]]
    close = swapped or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Available: {', '.join(names)}.")
