"""Flags that become a run's configuration, each declared once, in options.py, with its help and default.

A command has a parameter `dials: Dials` and lists the flags that stand in its place:

    @takes("workers", *EMULATION, "seed", workers=4)       # the last: another default than elsewhere
    def compare(script: o.Script, dials: Dials, runs: o.Runs = Path("runs")) -> None:
        config = dials.asked()                  # what was given, by field of the configuration

So a new flag is a field of the configuration, its declaration, and its name in one of the groups.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from paceline.cli.flags import options as o

EMULATION = ("slow", "device_time", "jitter")
RUN = (*EMULATION, "seed", "target")
NUMBERS = (
    "weighting",
    "damping",
    "drop_staler",
    "lr_cap",
    "trigger",
    "trigger_most",
    "park",
    "apply",
    "park_slow",
    "correct",
    "schedule",
    "clip_norm",
    "shards",
    "inject",
    "fabric",
)
TROUBLE = ("bad_gradient", "on_failure")
KEEPING = ("stuck_after", "checkpoint_every", "keep", "trace_limit", "private_weights")
ENGINE = ("engine", "address", "master")
HOSTS = ("listen", "here", "store_hosts", "host_patience", "secret_file", "tls", "tls_cert", "tls_key")


class Dials:
    """The values of a command's flags, as they were typed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, flag: str) -> Any:
        return self._values[flag]

    def changed(self) -> list[str]:
        """The flags whose values are not their defaults."""
        return [
            flag for flag, value in self._values.items() if (value or None) != (dial_of(flag).default or None)
        ]

    def asked(self) -> dict[str, Any]:
        """The same as the configuration has them: by field, and read where they are text."""
        asked = {}
        for flag, value in self._values.items():
            dial = dial_of(flag)
            if dial.field is not None:
                asked[dial.field or flag] = value if dial.parse is None else dial.parse(value)
        return asked


def takes(*flags: str, **other_defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put these flags in the place of the command's parameter `dials`. One that the command declares itself
    stays its own, and is only shown there."""

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        shared = [flag for flag in flags if flag not in own]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            dials = Dials({flag: given.pop(flag) for flag in shared})
            command(**given, dials=dials)

        places = []
        for name in _in_order(list(own), flags):
            place = own[name] if name in own else _place(name, other_defaults)
            places.append(place.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        called.__signature__ = inspect.Signature(places)  # type: ignore[attr-defined]
        called.__annotations__ = {place.name: place.annotation for place in places}
        return called

    return with_flags


def _in_order(own: list[str], flags: tuple[str, ...]) -> list[str]:
    at = own.index("dials")
    before, after = ([name for name in some if name not in flags] for some in (own[:at], own[at + 1 :]))
    return [*before, *flags, *after]


def dial_of(flag: str) -> o.Dial:
    """What options.py says about this flag besides its help."""
    return next(each for each in get_args(_declared(flag)) if isinstance(each, o.Dial))


def fields() -> dict[str, str]:
    """The configuration's field for every flag, where it has another name."""
    declared = (name for name, each in vars(o).items() if get_origin(each) is Annotated and _is_dial(each))
    flags = ("".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_") for name in declared)
    return {flag: dial_of(flag).field or flag for flag in flags if dial_of(flag).field is not None}


def _is_dial(declared: Any) -> bool:
    return any(isinstance(each, o.Dial) for each in get_args(declared))


def _declared(flag: str) -> Any:
    return getattr(o, "".join(word.capitalize() for word in flag.split("_")))


def _place(flag: str, other_defaults: dict[str, Any]) -> inspect.Parameter:
    default = other_defaults.get(flag, dial_of(flag).default)
    return inspect.Parameter(
        flag, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_declared(flag)
    )
