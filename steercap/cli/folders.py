"""Summaries of folders for `steercap inspect`: runs of personas, sweeps, captures, data sets, SAEs and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from steercap.cli.contents import kind_of
from steercap.cli.tables import facts
from steercap.core.display import layers_by_site, span
from steercap.core.extras import extra
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from steercap.lab.datasets import DatasetFolder, ShardReceipt
    from steercap.lab.studies.sweeps.grid import SweepDefinition


def inspected_dataset(path: Path, *, verify: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Describe a data set of activations, as a document for JSON and as tables.

    `verify` compares the SHA-256 of its files, not their sizes alone.

    Raises:
        InvalidFile: the definition, a receipt or the totals cannot be read.
    """
    from steercap.lab.datasets import DatasetFolder

    folder = DatasetFolder.open(path)
    receipts = folder.receipts()
    wrong = folder.wrong(receipts.values(), content=verify)
    totals, definition = folder.totals(), folder.definition
    whole = "" if totals is None or wrong else folder.wrong_whole([*receipts.values()], content=verify)
    is_whole = totals is not None and not wrong and not whole
    known = {
        "kind": "data set of activations",
        "model": definition.model.get("name", ""),
        "layers": layers_by_site(one.point for one in definition.points),
        "codec": ", ".join(dict.fromkeys(str(point.coding) for point in definition.points)),
        "row": f"{definition.row_bytes:,} bytes at all points",
        **{name: _as_text(value) for name, value in definition.asked.items()},
        **_counted(receipts),
        "complete": "yes" if is_whole else "no; the call that began it resumes it",
        "files": "; ".join(wrong.values())
        or whole
        or (
            "equal to their receipts, by SHA-256"
            if verify
            else ("equal to their receipts, by size; --verify reads them")
        ),
        "sha256": "" if totals is None else totals.sha256,
    }
    document = {
        **known,
        "wrong": {str(number): why for number, why in wrong.items()} | ({"whole": whole} if whole else {}),
        "definition": msgspec.to_builtins(definition),
        "totals": None if totals is None else msgspec.to_builtins(totals),
    }
    return document, [facts(str(path), known), *_norms(folder, complete=is_whole)]


def _counted(receipts: dict[int, ShardReceipt]) -> dict[str, str]:
    found = list(receipts.values())
    return {
        "shards": f"{len(found):,}, {decimal(sum(receipt.bytes for receipt in found))}",
        "documents": f"{sum(receipt.documents for receipt in found):,}",
        "tokens": f"{sum(receipt.tokens for receipt in found):,} read, {sum(receipt.rows for receipt in found):,} kept",
    }


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {said}" for name, said in value.items() if said not in (None, {}, ""))
    return "" if value in (None, False) else str(value)


def _norms(folder: DatasetFolder, *, complete: bool) -> list[RenderableType]:
    """Return a table of the norms of each point's sampled rows; [] if the data set is not whole or has none."""
    from rich.table import Table

    if not complete or not folder.definition.statistics_every:
        return []
    table = Table(title="norms", title_justify="left")
    for name in ("point", "looked at", "mean", "least", "greatest", "zeros"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for point, found in folder.merged(known.point for known in folder.definition.points).items():
        numbers = (f"{float(one):.4g}" for one in (found.norm_mean, found.norm_min, found.norm_max))
        table.add_row(str(point), f"{int(found.count):,}", *numbers, f"{float(found.zeros):.2%}")
    return [table]


#: Summary of a folder: a document for JSON, and tables.
Found: TypeAlias = "tuple[dict[str, Any], list[RenderableType]]"
#: Maximum number of captures whose generated texts are shown.
SHOWN: Final = 8


def inspected_folder(path: Path, *, verify: bool = False) -> Found:
    """Describe a folder, as a document for JSON and as tables: a command's run, an SAE, a model, or other files.

    `verify` compares the SHA-256 of the files that a manifest lists; otherwise only their sizes are compared.

    Raises:
        InvalidFile: the folder has no file that steercap knows, or a file cannot be read.
    """
    known: tuple[tuple[str, Callable[[Path], Found]], ...] = (
        ("settings.json", _persona),
        ("sweep.json", _sweep),
        ("evaluation.json", _evaluation),
        ("manifest.json", partial(_run, verify=verify)),
        ("definition.json", partial(inspected_dataset, verify=verify)),
        ("config.json", _describe_model),
    )
    how = next((how for name, how in known if (path / name).is_file()), _describe_files)
    if how in {_describe_model, _describe_files}:  # an SAE may have a config.json
        from steercap.saes.finding import LAYOUTS

        how = _describe_sae if any((path / str(one.weights)).is_file() for one in LAYOUTS) else how
    document, tables = how(path)
    return {"folder": str(path), **document}, tables


def _persona(path: Path) -> Found:
    try:
        state = msgspec.json.decode((path / "settings.json").read_bytes())
        settings, done = state["settings"], list(state["done"])
        known = {
            "kind": "run of personas",
            "model": state["model"].get("model", state["model"].get("name", "")),
            "traits": ", ".join(settings["traits"]),
            "scorer": settings["scorer"],
            "layers": settings["layers"] if isinstance(settings["layers"], str) else span(_listed(settings["layers"])),
            "site": settings["site"],
            "done": ", ".join(dict.fromkeys(key.partition("/")[0] for key in done)) or "nothing yet",
            **_tables_in(path, ("responses", "scores", "kept")),
            "vectors": _there(path / "directions.safetensors"),
            "report": _there(path / "report.md"),
        }
    except (OSError, msgspec.MsgspecError, LookupError, TypeError, AttributeError) as error:
        raise InvalidFile(f"{path / 'settings.json'} does not describe a run of personas: {error}") from error
    return {**known, "stages_done": done}, [facts(str(path), known)]


def _listed(layers: int | list[int]) -> list[int]:
    return layers if isinstance(layers, list) else [layers]


def _sweep(path: Path) -> Found:
    from steercap.lab.studies.sweeps.grid import SWEEP

    definition = SWEEP.read(path)
    answers = sum(_records(part) for part in (path / "answers").glob("*.parquet"))
    asked = _requested_answers(definition)
    known = {
        "kind": "sweep",
        "model": definition.model.get("model", definition.model.get("name", "")),
        "vectors": ", ".join(definition.vectors),
        "operations": ", ".join(definition.operations),
        "layers": ", ".join("+".join(map(str, together)) for together in definition.layers),
        "scales": ", ".join(f"{scale:g}" for scale in definition.scales),
        "controls": f"{definition.random} random vectors{', negated scales' if definition.negated else ''}",
        "prompts": len(definition.prompts),
        "answers": f"{answers:,} of {asked:,}",
        "measured": ", ".join(sorted(part.name.rpartition("-")[0] for part in (path / "values").glob("*"))),
        "results": _there(path / "results.parquet"),
        "pictures": ", ".join(sorted(picture.name for picture in path.glob("*.png"))),
    }
    document = {**known, "answers": answers, "asked": asked, "definition": msgspec.to_builtins(definition)}
    return document, [facts(str(path), known)]


def _requested_answers(definition: SweepDefinition) -> int:
    """Return the number of answers of a sweep with this definition; it does not depend on its vectors' values."""
    from steercap.lab.studies.sweeps import Sweep
    from steercap.steering.layers import LayerVectors

    layers = {layer for together in definition.layers for layer in together}
    sweep = Sweep(
        vectors={name: LayerVectors({layer: [1.0] for layer in layers}) for name in definition.vectors},
        layers=definition.layers,
        scales=definition.scales,
        prompts=definition.prompts,
        operations=definition.operations,
        relative=definition.relative,
        random=definition.random,
        negated=definition.negated,
    )
    return len(sweep.conditions()) * len(definition.prompts) * definition.samples


def _evaluation(path: Path) -> Found:
    from steercap.lab.studies.evaluation.definition import FOLDER

    definition = FOLDER.read(path)
    answers = sum(_records(part) for part in (path / "answers").glob("*.parquet"))
    asked = len(definition.conditions) * definition.samples * sum(map(len, definition.questions))
    methods: dict[str, list[str]] = {}
    for one in definition.conditions:
        methods.setdefault(one.method, []).append(f"{one.dose:g}")
    known = {
        "kind": "evaluation",
        "model": definition.model.get("model", definition.model.get("name", "")),
        "methods": ", ".join(f"{name} at {' '.join(doses)}" for name, doses in methods.items()),
        "questions": len(definition.questions),
        "turns": max(map(len, definition.questions), default=0),
        "answers": f"{answers:,} of {asked:,}",
        "measured": ", ".join(sorted(part.name.rpartition("-")[0] for part in (path / "values").glob("*"))),
        "tasks": ", ".join(sorted(part.name.rpartition("-")[0] for part in (path / "tasks").glob("*"))),
        "results": _there(path / "results.parquet"),
        "pictures": ", ".join(sorted(picture.name for picture in path.glob("*.png"))),
    }
    document = {**known, "answers": answers, "asked": asked, "definition": msgspec.to_builtins(definition)}
    return document, [facts(str(path), known)]


def _describe_model(path: Path) -> Found:
    from steercap.engine.checkpoint import look_up

    found = look_up(str(path), path)
    known = {
        "kind": "model",
        "architecture": ", ".join(found.architectures),
        "layers": found.layers or "",
        "width": found.width or "",
        "dtype": found.dtype,
        "weights": f"{found.bytes / 1e9:.2f} GB",
    }
    return {**known, "bytes": found.bytes}, [facts(str(path), known)]


def _describe_sae(path: Path) -> Found:
    from steercap.saes.sae import SAE

    found = SAE.load(path)
    known = {"kind": "SAE", "name": found.name, "model": found.model, "architecture": found.architecture}
    known |= {"reads": str(found.input), "writes": str(found.output)}
    known |= {"features": f"{found.d_sae:,}", "width": str(found.d_in)}
    return {**known, "features": found.d_sae, "width": found.d_in}, [facts(str(path), known)]


def _describe_files(path: Path) -> Found:
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    kinds = {file: kind for file in files if (kind := _kind(file))}
    if not kinds:
        raise InvalidFile(
            f"{path} has no file in it that steercap knows; it knows runs of personas, sweeps, captures, data sets, "
            "SAEs and models, and .safetensors, .gguf, .pt and .parquet files"
        )
    captures = [file for file, kind in kinds.items() if kind == "captures"]
    if len(captures) == len(kinds):
        return _captures(path, captures)
    table = Table("file", "kind", title=str(path), title_justify="left", title_style="bold")
    for file, kind in kinds.items():
        table.add_row(Text(file.name, style="cyan"), kind)
    return {"kind": "files", "files": {file.name: kind for file, kind in kinds.items()}}, [table]


def _run(path: Path, *, verify: bool) -> Found:
    """Describe a run of captures by its manifest; `verify` as for `inspected_folder`."""
    from steercap.captures.manifest import Manifest
    from steercap.captures.saving import numbered

    manifest = Manifest.load(path)
    layouts = {request.layout: manifest.layout_of(request) for request in manifest.requests}.values()
    points = {point for layout in layouts for point in layout.points_kept}
    wrong = {request.file: why for request in manifest.requests if (why := manifest.wrong(request, content=verify))}
    unlisted = sorted({file.name for file in numbered(path)} - {request.file for request in manifest.requests})
    recorded = {(request.answer_id, request.time) for request in manifest.requests if request.answer_id}
    known = {
        "kind": "run of captures",
        "model": manifest.model,
        "requests": len(recorded) or len(manifest.requests),  # recorded ones may have several files
        "tokens": f"{sum(request.prompt_tokens for request in manifest.requests):,} of prompts, "
        f"{sum(request.output_tokens for request in manifest.requests):,} generated",
        "rows": f"{sum(request.rows for request in manifest.requests):,} at each point",
        "layers": layers_by_site(sorted(points)),
        "codec": _distinct(point.coding for layout in layouts for point in layout.points),
        "returned": _distinct(layout.returned for layout in layouts),
        "reduced to": _distinct(layout.reduce or "" for layout in layouts),
        "directions": _distinct(name for layout in layouts for name in layout.directions),
        "steered": sum(request.steering is not None for request in manifest.requests) or "",
        "versions": _distinct(str(layout.versions) for layout in layouts),
        "size": f"{sum(request.bytes for request in manifest.requests) / 1e6:,.1f} MB",
        "files": "; ".join(f"{name} {why}" for name, why in wrong.items())
        or ("as listed, by SHA-256" if verify else "as listed, by size; --verify reads them"),
        "not listed": ", ".join(unlisted),
    }
    document = {**known, "wrong": wrong, "unlisted": unlisted, "manifest": msgspec.to_builtins(manifest.document)}
    return document, [facts(str(path), known), _texts(path, [request.file for request in manifest.requests])]


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(filter(None, dict.fromkeys(values)))


def _texts(path: Path, names: list[str]) -> Table:
    """Return a table of the generated texts of the first `SHOWN` of the files `names` in a folder."""
    from steercap.captures.files import read_header

    shown = [name for name in names if (path / name).exists()][:SHOWN]
    table = Table()
    table.add_column("file", style="cyan", no_wrap=True, min_width=max(map(len, shown), default=0))
    table.add_column("answer", no_wrap=True)
    for name in shown:
        table.add_row(name, Text(" ".join(read_header(path / name).text.split())))
    if len(names) > len(shown):
        table.caption = f"and {len(names) - len(shown)} more"
    return table


def _captures(path: Path, files: list[Path]) -> Found:
    from steercap.captures.files import read_header

    headers = {file: read_header(file) for file in files}
    known = {
        "kind": "captures",
        "files": len(files),
        "model": ", ".join(dict.fromkeys(header.model for header in headers.values())),
        "layers": layers_by_site(sorted({point for header in headers.values() for point in header.points})),
        "size": f"{sum(file.stat().st_size for file in files) / 1e6:,.1f} MB",
    }
    texts = {file.name: header.text for file, header in headers.items()}
    return {**known, "texts": texts}, [facts(str(path), known), _texts(path, [file.name for file in files])]


def _kind(path: Path) -> str:
    """Return the kind of a file as a summary names it, such as "GGUF"; "" if steercap does not know it."""
    from steercap.files.base import read_tensors

    try:
        kind = kind_of(path)
        if kind != "safetensors":
            return {"gguf": "GGUF", "pt": ".pt of torch", "parquet": "Parquet table"}[kind]
        says = msgspec.json.decode(read_tensors(path, tensors=False)[0])
    except (InvalidFile, msgspec.MsgspecError):
        return ""
    return str(says.get("kind", "captures")) if isinstance(says, dict) else ""


def _tables_in(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the number of records of each of the run's tables `names` that exists, as text by name."""
    files = {name: path / f"{name}.parquet" for name in names}
    return {name: f"{_records(file):,}" for name, file in files.items() if file.exists()}


def _records(path: Path) -> int:
    with extra("experiments", "personas"):
        import pyarrow as pa
        from pyarrow import parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise InvalidFile(f"{path} cannot be read as a Parquet table: {error}") from error


def _there(path: Path) -> str:
    return path.name if path.exists() else ""
