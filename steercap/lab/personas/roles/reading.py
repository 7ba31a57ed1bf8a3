"""Reader of roles from a folder of files, or from a table: CSV, Parquet or JSON lines."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.files.base import blame
from steercap.files.fingerprint import nearest_path
from steercap.files.tables import read_yaml
from steercap.lab.personas.roles.role import ASSISTANT, Role, RoleSet

#: Name of the file, in a folder of roles, with the questions and prompts that all roles share.
SHARED: Final = "_shared.yaml"
#: Names of the default assistant in tables and of its file.
DEFAULTS: Final = (ASSISTANT, "default")
TABLES: Final = (".csv", ".parquet", ".jsonl")
#: Optional columns of a table that describe a role beside its prompts.
_TOLD: Final = ("description", "keywords", "examples", "rubric")


class _Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of `_shared.yaml`: questions for all roles, prompts of the assistant, and plain sentences."""

    questions: tuple[str, ...] = ()
    assistant: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


class _Instruction(msgspec.Struct, frozen=True):
    """Entry of a role's JSON file in the format of the assistant axis: one system prompt."""

    pos: str


class _Published(msgspec.Struct, frozen=True):
    """Contents of a role's JSON file in the format of the assistant axis (Lu et al. 2026), named after the role."""

    instruction: tuple[_Instruction, ...]
    eval_prompt: str = ""


def load_roles(
    path: str | Path, *, questions: str | Path | Sequence[str] | None = None, assistant: Sequence[str] | None = None
) -> RoleSet:
    """Read roles from a folder or a table.

    A folder has a file for each role: YAML with the fields of `Role`, or JSON as published with the assistant axis,
    `{"instruction": [{"pos": ...}]}`, where `default.json` is the assistant. `_shared.yaml` is optional, with the
    fields `questions`, `assistant` and `plain`, as in `RoleSet`.

    A table (.csv, .parquet, .jsonl) has the columns `role` and `prompt`, a row for each system prompt, or in JSON lines
    and Parquet `prompts`, a list. `description`, `keywords`, `examples` and `rubric` are read from a role's first row
    (in CSV a list is JSON). The role `assistant`, or `default`, is the default assistant, whose prompt may be empty.
    Other columns are ignored.

    Args:
        path: the folder or the table.
        questions: questions for all roles, if the folder has none: texts, or a file with one in each line (.txt), or
            with a column `question` (.csv, .parquet, .jsonl).
        assistant: system prompts of the default assistant, in place of those at `path`; "" is no system prompt, the
            default if there are none.

    Raises:
        InvalidFile: a file is missing, cannot be read, or is incomplete.
        MissingExtra: the extra "personas" is not installed.
    """
    path = Path(path)
    roles, shared = _folder(path) if path.is_dir() else _table(path)
    asked = tuple(_questions(questions)) or shared.questions
    if not asked:
        raise InvalidFile(f"{path} has no questions; give questions=[...], or a file of them")
    with blame(path):
        return RoleSet(roles, asked, tuple(assistant or ()) or shared.assistant or ("",), shared.plain)


@functools.cache
def shipped_roles() -> RoleSet:
    """Return the 24 roles that come with steercap, with 24 questions."""
    with resources.as_file(resources.files("steercap.lab.personas.roles") / "shipped") as folder:
        return load_roles(folder)


def _folder(path: Path) -> tuple[tuple[Role, ...], _Shared]:
    files = sorted(file for file in path.iterdir() if file.suffix in {".yaml", ".yml", ".json"})
    shared = _decoded(path / SHARED, _Shared) if (path / SHARED).exists() else _Shared()
    roles = []
    for file in files:
        if file.name.startswith("_"):
            continue
        found = _decoded(file, Role) if file.suffix != ".json" else _published(file)
        if isinstance(found, Role):
            roles.append(found)
        else:
            shared = msgspec.structs.replace(shared, assistant=found)
    if not roles:
        raise InvalidFile(f"{path} holds no role; give a .yaml or .json file for each, or a table")
    return tuple(roles), shared


def _decoded(file: Path, kind: Any) -> Any:
    """Decode a YAML or JSON file as the type `kind`; raise InvalidFile if it cannot be."""
    try:
        found = msgspec.json.decode(file.read_bytes()) if file.suffix == ".json" else read_yaml(file)
        return msgspec.convert(found, kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{file} cannot be read as roles: {error}") from error


def _published(file: Path) -> Role | tuple[str, ...]:
    """Read a role from a JSON file of the assistant axis; for `default.json`, return the assistant's prompts."""
    found = _decoded(file, _Published)
    prompts = tuple(one.pos for one in found.instruction)
    if file.stem in DEFAULTS:
        return prompts
    with blame(file):
        return Role(file.stem, prompts)  # its eval_prompt asks for grades 0 to 3, and is no rubric of ours


def _table(path: Path) -> tuple[tuple[Role, ...], _Shared]:
    prompts: dict[str, list[str]] = {}
    told: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(_rows(path), 1):
        name, mine = row.get("role"), _prompts(row)
        if not isinstance(name, str) or not name.strip() or mine is None:
            raise InvalidFile(
                f"{path}, row {number}: give a role, and its prompt as text (or prompts, a list); it has "
                f"{', '.join(map(str, row))}"
            )
        name = ASSISTANT if name.strip() in DEFAULTS else name.strip()
        prompts.setdefault(name, []).extend(mine)
        told.setdefault(name, {field: value for field in _TOLD if (value := _field(path, number, field, row))})
    assistant = tuple(prompts.pop(ASSISTANT, ()))
    roles = []
    for name, mine in prompts.items():
        with blame(path):
            roles.append(Role(name, tuple(mine), **told[name]))
    return tuple(roles), _Shared(assistant=assistant)


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    """Read the rows of a table, each as a mapping from column names to values."""
    readers = {".csv": _csv, ".parquet": _parquet, ".jsonl": _lines}
    if path.suffix not in readers:
        raise InvalidFile(
            f"{path} is neither a folder nor a table{nearest_path(path)}; give a folder, or a file of "
            f"{', '.join(TABLES)}"
        )
    try:
        return readers[path.suffix](path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidFile(f"{path} cannot be read as a table: {error}") from error


def _csv(path: Path) -> list[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file, strict=True))
    for number, row in enumerate(found, 1):
        if None in row or None in row.values():
            raise InvalidFile(f"{path}, row {number}: its number of cells differs from that of the first line")
    return list(found)


def _parquet(path: Path) -> list[Mapping[str, Any]]:
    with extra("personas"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise InvalidFile(f"{path} is not a Parquet table: {error}") from error
    return rows


def _lines(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # U+2028 and the like are part of a line
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise InvalidFile(f"{path}, line {number} is not a JSON object: {error}") from error
    return rows


def _prompts(row: Mapping[str, Any]) -> list[str] | None:
    """Return the system prompts of a table's row, None if it has no valid ones."""
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    several = row.get("prompts")
    if isinstance(several, list) and several and all(isinstance(one, str) for one in several):
        return several
    return None


def _field(path: Path, number: int, field: str, row: Mapping[str, Any]) -> Any:
    """Return the value of an optional column of row `number`, lists as tuples; raise InvalidFile if it is not valid."""
    value = row.get(field)
    if field in {"description", "rubric"} or not value:
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidFile(f"{path}, row {number}: {field} is {row[field]!r}; give a list of texts, in CSV as JSON")
    return tuple(value)


def _questions(given: str | Path | Sequence[str] | None) -> Iterable[str]:
    if given is None:
        return ()
    if not isinstance(given, (str, Path)):
        return given
    path = Path(given)
    if path.suffix == ".txt":
        try:
            return [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path} cannot be read as questions: {error}") from error
    found = [row.get("question") for row in _rows(path)]
    if wrong := [number for number, text in enumerate(found, 1) if not isinstance(text, str)]:
        raise InvalidFile(f"{path}, row {wrong[0]}: there is no text in the column 'question'")
    return [str(text) for text in found]
