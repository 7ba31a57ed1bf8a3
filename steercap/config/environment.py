"""Settings from environment variables, named `STEERCAP_` and a field of `Settings` in capitals.

Values in code or from a command-line flag take precedence, then the environment, then the default. Variables are read
when a model is opened and when a command starts. An unknown variable or an invalid value is an error, so that a
misspelt name is never ignored silently. An empty variable counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec

from steercap.config import Settings
from steercap.core.values import choices, shown
from steercap.errors import InvalidSetting, SteercapError

PREFIX: Final = "STEERCAP_"


@dataclass(frozen=True)
class Variable:
    """Description of an environment variable that steercap reads.

    Args:
        says: short description, for the table in docs/settings.md.
        kind: type of the value.
        code: how to set the same in code, besides `SteerModel`, in Markdown; "" for no other way.
        flag: True if `steercap capture` has the corresponding flag.
        default: default value in words; "" for the default of the field of `Settings`.
    """

    says: str
    kind: type
    code: str = ""
    flag: bool = False
    default: str = ""


#: Environment variables, by field of `Settings`. `sites` and `layers` cannot be set so: they belong to the
#: experiment, not to the machine.
SETTINGS: Final[Mapping[str, Variable]] = {
    "codec": Variable("default codec of stored rows", str, "`CaptureSpec(codec=)`", flag=True),
    "codec_k": Variable(
        "default `k` of the codec",
        int,
        "`CaptureSpec(codec_k=)`",
        flag=True,
        default="the codec's",
    ),
    "codec_seed": Variable(
        "default `seed` of the codec",
        int,
        "`CaptureSpec(codec_seed=)`",
        flag=True,
        default="0",
    ),
    "capture_bytes": Variable("maximum shared memory of captured rows on each worker, in bytes", int, flag=True),
    "device_ring_bytes": Variable(
        "device memory of rows on their way to shared memory on each worker, in bytes",
        int,
        flag=True,
        default="at most 2.5 GiB",
    ),
    "reduce_bytes": Variable("maximum device memory of running reductions on each worker, in bytes", int, flag=True),
    "sketch_bytes": Variable("maximum device memory of sketches on each worker, in bytes", int),
    "sae_bytes": Variable("maximum device memory of SAEs on each worker, in bytes", int),
    "overflow": Variable("action of a request without room: `wait`, `error` or `spill`", str, flag=True),
    "overflow_timeout": Variable("seconds that a request waits for room while no other runs", float, flag=True),
    "spill_folder": Variable("folder of the file that rows spill to", str, flag=True, default="`TMPDIR`, or /var/tmp"),
    "spill_bytes": Variable("maximum size of the spill file, in bytes", int, flag=True),
    "transport": Variable("how rows reach the client: `auto`, `shared` or `wire`", str, flag=True),
    "steering_slots": Variable("steering configurations in use at once", int),
    "vector_bytes": Variable("memory of all vectors on each worker, in bytes", int),
    "edits_per_point": Variable("rank-one edits of one spec at one point", int),
    "restart": Variable("whether an engine that has died is started again", bool, flag=True),
}
#: Variables that correspond to no field of `Settings`, by full name.
OTHERS: Final[Mapping[str, Variable]] = {
    f"{PREFIX}CACHE": Variable("folder of the checkpoints that steercap makes", str, default="`~/.cache/steercap`"),
    f"{PREFIX}PROGRESS": Variable("`0`: no line on how far a start is", str),
    f"{PREFIX}JUDGE_API_KEY": Variable("key of the endpoint that judges answers", str, "`Judge(api_key=)`"),
    **{
        f"{PREFIX}RECORD{name}": Variable(f"`--record{name.lower().replace('_', '-')}` of `steercap serve`", str)
        for name in ("", "_SITE", "_LAYERS", "_TOKENS", "_FRACTION", "_GIB", "_FULL", "_HOURS", "_PROMPTS")
    },
}
#: Variable by which `steercap up` gives its server API keys, which a command line would show to every user.
KEYS: Final = f"{PREFIX}KEYS"
#: Variables that steercap sets itself: marks of an engine's processes, and of clients killed by tests; keys of `up`.
OWN: Final = frozenset({f"{PREFIX}ENGINE", f"{PREFIX}KILLS", KEYS})
#: Prefix of the variables that steercap's own tests read.
TESTS: Final = f"{PREFIX}TEST_"


def settings(**given: Any) -> Settings:
    """Make an engine's settings from the given values, then the environment, then the defaults.

    Args:
        **given: fields of `Settings`; None means not given, for fields that the environment can set.

    Raises:
        InvalidSetting, InvalidSpec, UnknownName: a setting is invalid, or a variable is unknown.
    """
    asked = {name: value for name, value in given.items() if not (name in SETTINGS and value is None)}
    return Settings(**{**from_environment(), **asked})


def from_environment() -> dict[str, Any]:
    """Return the fields of `Settings` that environment variables set, by name, with converted values.

    Raises:
        InvalidSetting: a variable that begins with `STEERCAP_` is unknown, or its value is invalid.
    """
    check_names()
    given = {name: os.environ.get(variable_of(name)) for name in SETTINGS}
    return {name: _converted(name, text) for name, text in given.items() if text}


def check_names() -> None:
    """Check that every environment variable that begins with `STEERCAP_` is known.

    Raises:
        InvalidSetting: one is unknown; the message names the nearest known one.
    """
    known = [*map(variable_of, SETTINGS), *OTHERS]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and not name.startswith(TESTS) and name not in {*known, *OWN}:
            raise InvalidSetting(
                f"{name} is set in the environment, but steercap has no such setting; unset it, or see "
                f"docs/settings.md; {choices(name, known)}"
            )


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a field of `Settings`."""
    return PREFIX + name.upper()


def flag_of(variable: str) -> str:
    """Return the flag of `steercap capture` that corresponds to a variable."""
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


def table() -> str:
    """Return all variables as the Markdown table of docs/settings.md."""
    defaults = {field.name: field.default for field in fields(Settings)}
    head = ["| variable | what it sets | default | in code | flag |", "|---|---|---|---|---|"]
    ours = [
        _line(
            variable_of(name),
            variable,
            variable.default or f"`{defaults[name]}`",
            " ".join(filter(None, [variable.code, f"`SteerModel({name}=)`"])),
        )
        for name, variable in SETTINGS.items()
    ]
    return "\n".join(
        [*head, *ours, *(_line(name, one, one.default or "none", one.code) for name, one in OTHERS.items())]
    )


def _line(name: str, variable: Variable, default: str, code: str) -> str:
    flag = f"`{flag_of(name)}`" if variable.flag else ""
    return f"| `{name}` | {variable.says} | {default} | {code} | {flag} |".replace("  ", " ")


def _converted(name: str, text: str) -> Any:
    """Convert a variable's text to the value of the field `name` of `Settings`.

    Raises:
        InvalidSetting: the value is invalid; the message names the variable.
    """
    try:
        value: Any = msgspec.convert(text, SETTINGS[name].kind, strict=False)
        Settings(**{name: value})
    except (msgspec.ValidationError, SteercapError) as error:
        raise InvalidSetting(
            f"{variable_of(name)}={shown(text)} in the environment is not valid: {error}; it is "
            f"{SETTINGS[name].says.replace('`', '')}"
        ) from error
    return value
