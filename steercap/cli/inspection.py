"""`steercap inspect`: summary of a file or folder, of which no more is read than needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from steercap.cli.command import FAILED, command
from steercap.cli.contents import kind_of
from steercap.cli.folders import inspected_folder
from steercap.cli.tables import document_of, facts, origin, told_of
from steercap.cli.terminal import Terminal
from steercap.core.display import layers_by_site, span
from steercap.core.extras import extra
from steercap.errors import InvalidFile

#: Maximum number of records of a Parquet table that are shown.
ROWS: Final = 5
#: Maximum characters of a value, and of a column's name or type, in a table for a terminal of 80 columns.
CELL: Final = 28
WIDEST: Final = 24


def inspected(path: Path, *, verify: bool = False) -> tuple[dict[str, Any], list[RenderableType]]:
    """Describe a file or a folder, as a document for JSON and as tables.

    Args:
        path: captures, steering, vectors, directions, a Parquet table, a GGUF control vector, or a `.pt`; or a folder,
            see `inspected_folder`.
        verify: True to compare the SHA-256 of the files that a manifest lists, or of a data set's files.

    Raises:
        InvalidFile: the path cannot be read, is none of these, or has no manifest to verify it by.
    """
    if verify and not any((path / name).is_file() for name in ("manifest.json", "definition.json")):
        raise InvalidFile(f"{path} has no manifest.json and is not a data set, so its files cannot be verified")
    if path.is_dir():
        return inspected_folder(path, verify=verify)
    how = {"parquet": _parquet, "gguf": _gguf, "pt": _pt, "safetensors": _safetensors}[kind_of(path)]
    document, tables = how(path)
    return {"file": str(path), "bytes": path.stat().st_size, **document}, tables


def _safetensors(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    import msgspec

    from steercap.files.base import read_tensors

    text, _ = read_tensors(path, tensors=False)
    try:
        says = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"{path} has a steercap header that cannot be read: {error}") from error
    if isinstance(says, dict) and says.get("kind") == "steering":
        return _steering(path)
    if isinstance(says, dict) and says.get("kind") == "sketch":
        return _sketch(path)
    if isinstance(says, dict) and "kind" in says:
        return _directions(path)
    return _captures(path)


def _captures(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    import msgspec
    from safetensors import safe_open

    from steercap.captures.files import read_header
    from steercap.core.schema import RAW

    header = read_header(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- it is not a mapping
        shapes = {name: {"shape": part.get_shape(), "dtype": part.get_dtype()} for name, part in tensors.items()}
    prompt, answer = (shapes[name]["shape"][0] for name in ("prompt_token_ids", "output_token_ids"))
    rows = next(part for name, part in shapes.items() if name.startswith(("rows.", "q.")))  # or codes
    coded = "" if header.coding == RAW else f", codes of {header.coding}"
    known = {
        "kind": "captures",
        "model": header.model,
        "request": header.request_id,
        "text": header.text,
        "tokens": f"{prompt} of the prompt, {answer} generated",
        "rows": f"{' × '.join(map(str, rows['shape']))} {rows['dtype']} at each point{coded}"
        + (f", the {header.reduce} of {shapes['positions']['shape'][0]}" if header.reduce else ""),
        "layers": f"{layers_by_site(header.points)} of {header.num_layers}",
        "directions": ", ".join(header.directions),
        "messages": ", ".join(
            f"{one.role} {'nowhere' if one.start == one.stop else f'{one.start} to {one.stop - 1}'}"
            for one in header.messages
        ),
        "steered": ""
        if header.steering is None
        else f"rows by edit {list(header.steering.rows)}, {header.steering.cached} tokens read from the cache",
    }
    document = {"kind": "captures", "header": msgspec.to_builtins(header), "tensors": shapes}
    return document, [facts(str(path), known)]


def _steering(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    from steercap.files.native import read_header
    from steercap.steering.spec import SteeringSpec

    header, spec = read_header(path), SteeringSpec.load(path)
    edits = list(map(repr, spec.flat()))
    document = {"kind": "steering", "model": header.model, "preserve_norm": spec.preserve_norm, "edits": edits}
    document |= {"provenance": header.provenance} if header.provenance else {}
    table = Table("", "edit", title_justify="left")
    for number, edit in enumerate(edits):
        table.add_row(str(number), Text(edit))
    known = {"kind": "steering", "model": header.model, "preserves the norm": "yes" if spec.preserve_norm else "no"}
    known |= header.provenance
    return document, [facts(str(path), known), table]


def _directions(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    from steercap.cli.contents import directions_in, load

    content = load(path)
    found = directions_in(content, path)
    kind = "directions" if content is found else "vectors"
    known = {
        "kind": kind,
        "names": ", ".join(found),
        "site": found.site,
        "layers": span(found.layers),
        "width": found.width,
        **origin(found),
    }
    few = [part for name in found for part in told_of(found, name)] if len(found) == 1 else []
    return {"kind": kind, **document_of(found)}, [facts(str(path), known), *few]


def _sketch(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    from steercap.captures.sketch import Sketch

    found = Sketch.load(path)
    known = {
        "kind": f"sketch, {found.kind}" + (f" of {found.size} rows" if found.size else ""),
        "model": found.model,
        "rows": f"{found.rows} of each point, of {found.requests} requests",
        "layers": f"{layers_by_site(found.points)} of {found.num_layers}",
        "tokens": str(found.tokens) + (", before edits" if found.before_edits else ""),
        "versions": ", ".join(found.versions),
    }
    return {**known, "kind": "sketch", "sketch": found.kind, "rows": found.rows, "requests": found.requests}, [
        facts(str(path), known)
    ]


def _gguf(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    document, tables = _directions(path)
    return {**document, "kind": "GGUF control vector"}, tables


def _pt(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    import torch

    from steercap.files.base import read_pt
    from steercap.steering.formats import load_capping

    content = read_pt(path)
    if isinstance(content, torch.Tensor):
        shape, dtype = list(content.shape), str(content.dtype).removeprefix("torch.")
        known = {
            "kind": "tensor of layers" if len(shape) == 2 else "tensor",
            "shape": " × ".join(map(str, shape)),
            "dtype": dtype,
            "layers": "the file does not say which layer row 0 is; --first-row of the commands does",
        }
        norms = content.float().norm(dim=-1).tolist() if len(shape) == 2 else None
        return {"kind": known["kind"], "shape": shape, "dtype": dtype, "norms": norms}, [facts(str(path), known)]
    experiments = {name: [repr(edit) for edit in spec.flat()] for name, spec in load_capping(path).items()}
    table = Table("experiment", "edits", title=f"{path}: experiments of activation capping", title_justify="left")
    for name, edits in experiments.items():
        table.add_row(name, Text("\n".join(edits)))
    return {"kind": "capping experiments", "experiments": experiments}, [table]


def _parquet(path: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    with extra("experiments", "personas"):
        import pyarrow as pa
        from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        schema, first = file.schema_arrow, next(file.iter_batches(ROWS), None)
    except (OSError, pa.ArrowException) as error:
        raise InvalidFile(f"{path} cannot be read as a Parquet table: {error}") from error
    records = first.to_pylist() if first is not None else []
    columns = {field.name: str(field.type) for field in schema}
    table = Table(title=f"{path}: {file.metadata.num_rows:,} records", title_justify="left", expand=True)
    # Names and types are shown in full; values are cut, and --json has all of them.
    types = {name: kind.replace("element: ", "") for name, kind in columns.items()}
    for title, words, style in (("column", columns, "cyan"), ("type", types.values(), "dim")):
        table.add_column(title, style=style, no_wrap=True, width=min(max(map(len, [title, *words])), WIDEST))
    table.add_column(f"the first {len(records)}", no_wrap=True, ratio=1)
    for name in columns:
        table.add_row(name, types[name], Text(" · ".join(_cell(record[name]) for record in records)))
    return {"kind": "table", "records": file.metadata.num_rows, "columns": columns, "first": records}, [table]


def _cell(value: Any) -> str:
    """Return a value as one line of at most `CELL` characters."""
    text = "''" if value == "" else " ".join(str(value).split())
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def register(app: typer.Typer) -> None:
    """Add the command `inspect` to `app`."""

    @command(
        app,
        "inspect",
        examples=[
            "steercap inspect out/paris/0000.safetensors",
            "steercap inspect out/rows --verify",
            "steercap inspect out/sweep --json",
        ],
    )
    def inspect(
        file: Annotated[Path, typer.Argument(exists=True, metavar="PATH", help="File or folder to inspect.")],
        terminal: Terminal,
        verify: Annotated[
            bool, typer.Option("--verify", help="Check files of captures or data sets by SHA-256.")
        ] = False,
    ) -> None:
        """Describe a file or folder: captures, steering, vectors, directions or a sketch of steercap, a Parquet table
        of a pipeline or a sweep, a GGUF control vector, a .pt; the folder of a run of personas, a sweep, captures, a
        data set of activations, an SAE or a model. Shows shapes, layers, texts and origin; rows of captures and data
        sets are read only with --verify. Exit code 1 means that files differ from their list.
        """
        document, tables = inspected(file, verify=verify)
        terminal.show(document, *tables)
        if document.get("wrong"):
            raise typer.Exit(FAILED)
