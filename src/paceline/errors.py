"""Every exception of the project::

    PacelineError                 anything we raise on purpose
    ├── ConfigError (ValueError)  the user asked for something impossible; exit status 2
    ├── RunError                  a run could not go on; exit status 1
    │   ├── WorkerFailed          a worker raised, died or was lost
    │   ├── BadGradient           NaN or infinity in a gradient
    │   ├── EngineLost            the process that starts workers is gone
    │   └── RunStopped            the run was told to stop (Ctrl-C); what was done is saved
    ├── TraceError                a trace or result that cannot be read
    │   └── NoTrace               there is none where the user said (a ConfigError too); exit status 2
    └── Undecodable               a file, or what another program says, is not in its form

All fields are passed to `super().__init__`, so that they cross process boundaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Anything Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """The request itself is wrong; running it again changes nothing."""


class RunError(PacelineError, RuntimeError):
    """The request was fine, the run was not."""


class WorkerFailed(RunError):
    """A worker raised, died or was lost."""


class BadGradient(RunError):
    """A gradient held NaN or infinity."""


class EngineLost(RunError):
    """The process that starts workers is gone, and they with it."""


class NobodyThere(RunError):
    """Where a process listened, none does any more: it has ended."""


class RunStopped(RunError):
    """Somebody stopped the run. Its state is saved and can be resumed."""


class TraceError(PacelineError, ValueError):
    """A trace, result or checkpoint that cannot be read."""


class NoTrace(TraceError, ConfigError):
    """There is no run at the place that was named."""


class Undecodable(PacelineError, ValueError):
    """Bytes that are not in the form they should be in. Whoever reads a file says which, and what to do."""


def unknown(kind: str, name: str, available: Iterable[str]) -> ConfigError:
    """One sentence for every misspelt name: what it was, what it may have meant, what there is."""
    names = sorted(available)
    swapped = [each for each in names if sorted(each) == sorted(name) and each[:1] == name[:1]]
    close = swapped or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Available: {', '.join(names)}.")
