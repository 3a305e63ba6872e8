"""Flags of a command from a TOML file: `paceline train run.toml` instead of a long line.

Keys are the flags' names, as `--help-all` shows them, and `script` and `args`. Flags that are typed win.
Paths are seen from the folder in which the command runs, as they are on a command line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.decoding import decode_toml
from paceline.errors import ConfigError, Undecodable, unknown

SUFFIX = ".toml"
BETWEEN = {"set_": "=", "slow": ":"}
"""What stands between name and value where a table takes the place of a repeated flag."""


def from_file(file: Path, params: list[Any]) -> dict[str, Any]:
    """The values in a file, by the name of the command's parameter."""
    names = {_key(param): param for param in params}
    found = {}
    for key, value in _read(file).items():
        param = names.get(key.replace("_", "-"))
        if param is None:
            raise unknown(f"key in {file}", key, sorted(names))
        found[param.name] = _as_typed(file, key, value, param)
    if not isinstance(found.get("script"), str):
        raise ConfigError(f'{file} names no script. Add a line such as script = "train.py".')
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return decode_toml(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}. Give the path of a TOML file.") from None
    except Undecodable as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from None


def _key(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name)
    return max(param.opts, key=len).lstrip("-")  # type: ignore[no-any-return]


def _as_typed(file: Path, key: str, value: Any, param: Any) -> Any:
    """The value as the command line would have it: text, or a list of texts where a flag may be repeated."""
    if param.nargs == -1 or getattr(param, "multiple", False):
        return _texts(file, key, value, param.name)
    if isinstance(value, bool) and not getattr(param, "is_flag", False):
        raise ConfigError(f"{key} in {file} takes a value, got {str(value).lower()}.")
    if isinstance(value, dict | list):
        raise ConfigError(f"{key} in {file} takes one value, got {value!r}.")
    return value if isinstance(value, bool) else str(value)


def _texts(file: Path, key: str, value: Any, name: str) -> list[str]:
    if isinstance(value, dict) and name in BETWEEN:
        return [f"{each}{BETWEEN[name]}{_text(of)}" for each, of in value.items()]
    if isinstance(value, list):
        return [_text(each) for each in value]
    if isinstance(value, dict):
        raise ConfigError(f"{key} in {file} takes a list, got a table.")
    return [_text(value)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def expand(args: list[str], params: list[Any]) -> tuple[list[str], dict[str, Any]]:
    """The command's words without the file, and what the file says, if a word before `--` is one."""
    end = args.index("--") if "--" in args else len(args)
    takes_value = _values(params)
    for at, word in enumerate(args[:end]):
        if word.endswith(SUFFIX) and (at == 0 or not takes_value(args[at - 1])):
            said = from_file(Path(word), params)
            script, own = said.pop("script"), said.pop("args", [])
            rest = [*args[:at], script, *args[at + 1 :]]
            return (rest if "--" in args or not own else [*rest, "--", *own]), said
    return args, {}


def _values(params: list[Any]) -> Callable[[str], bool]:
    """Whether a word is a flag whose value is the next word."""
    flags = {
        opt for each in params if not getattr(each, "is_flag", False) for opt in each.opts if opt[0] == "-"
    }
    return lambda word: word in flags
