"""`steercap vectors extract|show|compare|convert`: directions extracted from texts, shown, compared and converted."""

from __future__ import annotations

import enum
import json
import math
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text as Cell

from steercap.cli.command import command, group_of
from steercap.cli.contents import Target, directions_in, kind_of, load, write
from steercap.cli.destinations import Force, file_ready, may_replace, saved
from steercap.cli.engines import ReachOptions, located
from steercap.cli.parsing import FirstRow, Level, dtype_of, first_row_of, layers_of, refuse, tokens_of
from steercap.cli.persona import folded
from steercap.cli.preflight import preflight, reached
from steercap.cli.prompts import SpecialTokens, records_of
from steercap.cli.tables import (
    advice,
    best_tried,
    by_layer,
    cosines,
    document_of,
    facts,
    origin,
    replies_of,
    titled,
    told_of,
    tried_document,
    tried_layers,
)
from steercap.cli.terminal import Terminal
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from rich.table import Table

    from steercap.lab.directions.extraction import Text
    from steercap.lab.studies.trying import TriedLayers
    from steercap.lab.training import ComparedVectors
    from steercap.model import SteerModel
    from steercap.steering.directions import DirectionSet


#: Hint on converting to other formats, for error messages.
CONVERTED: Final = "; steercap vectors convert makes .gguf or .pt of it"


#: Maximum number of pairs of vectors that a comparison shows.
LEAST_ALIKE: Final = 10


class Bound(enum.StrEnum):
    """Choices of `--bound`: "high" if the caps of a capping experiment are upper bounds, "low" if lower bounds."""

    HIGH = "high"
    LOW = "low"


def texts_in(path: Path) -> tuple[list[Text], list[str] | None]:
    """Read the texts of a file, and the group of each; None in place of groups if the file has none.

    The file has one text per line, or is JSONL of strings, {"text"} or {"prompt", "response"}, optionally with "group".

    Raises:
        InvalidFile: the file cannot be read, a line has another form, or only some lines have a group.
    """
    from steercap.lab.directions.extraction import Exchange

    texts: list[Text] = []
    groups: list[str] = []
    for number, value in records_of(str(path)):
        match value:
            case str():
                texts.append(value)
            case {"prompt": str() | list() as prompt, "response": str(response)}:
                texts.append(Exchange(prompt, response))
            case {"text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidFile(
                    f"{path}, line {number}: {value!r}; give a string, {{'text': ...}}, or {{'prompt': ..., "
                    "'response': ...}"
                )
        if isinstance(value, dict) and "group" in value:
            groups.append(str(value["group"]))
    if groups and len(groups) != len(texts):
        raise InvalidFile(f"{path}: {len(groups)} of {len(texts)} lines have a group; give all of them one, or none")
    return texts, groups or None


@dataclass(frozen=True)
class ExtractTexts:
    """Contrasting texts from which to extract a direction.

    Args:
        positive, negative: texts that show a property, and texts that do not.
        groups, others: group of each positive and each negative text, both None if not given.
    """

    positive: list[Text]
    negative: list[Text]
    groups: list[str] | None
    others: list[str] | None

    def check(self, **how: Any) -> None:
        """Check that a direction can be extracted from the texts, with `method`, `held_out` and `seed` of `extract`.

        Raises:
            The errors of `steercap.lab.directions.contrast.check_groups`.
        """
        from steercap.lab.directions.contrast import check_groups

        ours, theirs = self.groups or range(len(self.positive)), self.others or range(len(self.negative))
        check_groups(ours, theirs, **how)


def texts_between(positive: Path, negative: Path) -> ExtractTexts:
    """Read the texts of two files, of those that show a property and those that do not.

    Raises:
        InvalidFile: see `texts_in`; or only one file has groups.
    """
    (ours, groups), (theirs, others) = texts_in(positive), texts_in(negative)
    if (groups is None) != (others is None):
        raise InvalidFile(f"only one of {positive} and {negative} has groups; give groups in both or in neither")
    return ExtractTexts(ours, theirs, groups, others)


async def extract_from(
    model: SteerModel, texts: ExtractTexts, terminal: Terminal, *, name: str, **how: Any
) -> DirectionSet:
    """Extract the direction `name` from texts, with a progress bar; `how` are further arguments of `extract`.

    Raises:
        The errors of `steercap.lab.directions.extract`.
    """
    from steercap.lab.directions.extraction import extract

    with terminal.progress() as tell, terminal.warned():
        return await extract(
            model,
            texts.positive,
            texts.negative,
            name=name,
            groups=texts.groups,
            negative_groups=texts.others,
            progress=tell,
            **how,
        )


def register(app: typer.Typer) -> None:
    """Add the group `vectors` with the commands `extract`, `show`, `compare` and `convert` to `app`."""
    vectors = group_of("Make directions from texts, show and compare them, convert them to other formats.")
    app.add_typer(vectors, name="vectors")
    _register_extract(vectors)
    _register_show(vectors)
    _register_compare(vectors)
    _register_convert(vectors)


def _register_extract(app: typer.Typer) -> None:
    @command(
        app,
        "extract",
        examples=[
            "steercap vectors extract praise.txt complaint.txt --out praise.safetensors",
            "steercap vectors extract kind.jsonl cold.jsonl --method probe --layers 8:24 --out kind.safetensors",
        ],
    )
    async def extract(
        positive: Annotated[
            Path, typer.Argument(exists=True, dir_okay=False, help="File of texts that show the concept.")
        ],
        negative: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of texts that do not.")],
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(dir_okay=False, help="File for the directions: .safetensors.")],
        name: Annotated[
            str | None, typer.Option(help="Name of the direction (default: the first file's name).")
        ] = None,
        method: Annotated[str, typer.Option(help="Method: difference, pca or probe.")] = "difference",
        layers: Annotated[str, typer.Option(help="Layers: all, 8, 8,16,-1 or 4:20:2.")] = "all",
        site: Annotated[str, typer.Option(help="Site: resid_pre, resid_post, attn_out or mlp_out.")] = "resid_post",
        tokens: Annotated[
            str,
            typer.Option(
                help="Tokens used of texts without a response; the first token is an attention sink in most models."
            ),
        ] = "1:",
        held_out: Annotated[
            float, typer.Option(min=0, max=0.99, help="Fraction of texts held out to compute the AUC.")
        ] = 0.25,
        seed: Annotated[int, typer.Option(help="Seed of the held-out split.")] = 0,
        special_tokens: SpecialTokens = None,
        force: Force = False,
        prompts: Annotated[
            list[str] | None,
            typer.Option("--try", metavar="PROMPT", help="Steer replies to this prompt at a few layers; repeatable."),
        ] = None,
        scale: Annotated[
            float | None, typer.Option("--try-scale", help="Vector multiplier of --try, both signs (default 2).")
        ] = None,
    ) -> None:
        """Find the direction in which some texts differ from others. The files hold one text per line, or JSONL with
        prompt and response, whose rows are the response's, and group if texts belong together, such as answers to one
        question. The direction is tested on held-out texts: AUC 1 separates all of them, 0.5 is chance. With --try, a
        few layers are steered both ways, and the one whose replies differ most along the direction is named.
        """
        from steercap.core.spec import CaptureSpec

        if not prompts:
            refuse("there is no --try PROMPT", {"--try-scale": scale})
        if not 0 < (1.0 if scale is None else scale) < math.inf or not all(prompts or ["none"]):
            raise typer.BadParameter("give prompts that are not empty, and a multiplier above 0", param_hint="--try")
        model.require_there()
        file_ready(out, extensions=[".safetensors"], hint=CONVERTED)
        split = {"method": method, "held_out": held_out, "seed": seed}
        where = {"layers": layers_of(layers), "tokens": tokens_of(tokens)}
        texts, said = texts_between(positive, negative), positive.stem if name is None else name
        if not said:
            raise typer.BadParameter("a direction needs a name", param_hint="--name")
        texts.check(**split)
        preflight(model, sites=site).check_capture(CaptureSpec(sites=site, **where))
        may_replace(out, terminal, force=force)  # last: it asks
        async with reached(model, terminal, sites=site) as open_model:
            found = await extract_from(
                open_model, texts, terminal, name=said, site=site, add_special_tokens=special_tokens, **split, **where
            )
            trial = partial(tried_at, open_model, found, prompts, scale, terminal) if prompts else None
            await report(found, said, out, terminal, trial, model.flags())


async def tried_at(
    model: SteerModel, directions: DirectionSet, prompts: list[str], scale: float | None, terminal: Terminal
) -> TriedLayers:
    """Steer replies to prompts along a direction at a few layers; see `steercap.lab.studies.trying.try_layers`.

    Raises:
        The errors of `try_layers`.
    """
    from steercap.lab.studies.trying import try_layers

    how: dict[str, Any] = {} if scale is None else {"scale": scale}
    with terminal.status("steering a few layers both ways"):
        return await try_layers(model, directions, prompts, **how)


async def report(
    directions: DirectionSet,
    name: str,
    out: Path,
    terminal: Terminal,
    trial: Callable[[], Awaitable[TriedLayers]] | None = None,
    flags: Sequence[str] = (),
) -> None:
    """Write a direction to a file, run `trial`, and show the direction, without the trial if that fails.

    Args:
        directions, name: set with this direction alone, and its name.
        out: path of the file.
        terminal: terminal for the output.
        trial: function that steers replies, which are shown too; None for none.
        flags: flags of the model, for the sweep that is proposed after the trial.

    Raises:
        OSError: `out` cannot be written; a file in a temporary folder is named on stderr, or all numbers are on stdout.
        The errors of the trial.
    """
    file, failed = saved(out, directions.save, terminal)
    tried = None
    try:
        tried = await trial() if trial is not None else None
    finally:
        _show(directions, name, file, terminal, tried, flags)
    if failed is not None:
        raise failed


def sweep_around(tried: TriedLayers, layers: Sequence[int], file: Path, flags: Sequence[str]) -> str | None:
    """Return a sweep for pasting: at the best layer tried and its neighbours, on the same prompts; None for no layer.

    Args:
        tried: the trial.
        layers: layers of the direction in `file`.
        file: file of the direction.
        flags: flags of the model.
    """
    if tried.best is None or any("\n" in prompt for prompt in tried.prompts):  # a prompt a line
        return None
    from steercap.lab.measures.scores import shipped_traits

    words: dict[str, object] = {
        "--vectors": file,
        "--layers": ",".join(str(layer) for layer in layers if abs(layer - tried.best) <= 1),
        "--scales": f"{tried.scale / 2:g},{tried.scale:g}",
        "--prompts": "/dev/stdin",
        "--measures": f"perplexity,score:{tried.name}" if tried.name in shipped_traits() else "perplexity,repetition",
        "--out": f"{file.with_suffix('')}-sweep",
    }
    said = [str(word) for pair in words.items() for word in pair]
    prompts = shlex.join(["printf", r"%s\n", *tried.prompts])
    return f"{prompts} |\n{folded(shlex.join(['steercap', 'sweep', *said, *flags]))}"


def _show(
    directions: DirectionSet,
    name: str,
    file: Path | None,
    terminal: Terminal,
    tried: TriedLayers | None,
    flags: Sequence[str],
) -> None:
    command = None
    document: dict[str, Any] = {"file": file, **document_of(directions)}
    if file is None:
        document["vectors"] = {layer: vector.tolist() for layer, vector in directions[name].items()}
    about = {**origin(directions), **advice(directions, name), "file": file or "none"}
    if tried is not None:
        document["tried"] = tried_document(tried)
        about["best tried"] = best_tried(tried)
        command = file and sweep_around(tried, directions.layers, file, flags)
        document["next"] = [command] if command else []
    tables = [] if tried is None else [*replies_of(tried), tried_layers(tried)]
    terminal.show(document, by_layer(directions, name), *tables, facts("", about))
    if command and not terminal.json:
        terminal.write(f"\nA sweep tests the layers around it, against random vectors:\n{command}")
    if file is None and not terminal.json:
        terminal.write(json.dumps({name: document["vectors"]}))


def _register_show(app: typer.Typer) -> None:
    @command(
        app,
        "show",
        examples=[
            "steercap vectors show praise.safetensors",
            "steercap vectors show traits.safetensors --cosines --layer 16",
            "steercap vectors show persona.pt --first-row 1 --json",
        ],
    )
    def show(
        file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of vectors or directions.")],
        terminal: Terminal,
        name: Annotated[str | None, typer.Option(help="Name of the direction to show.")] = None,
        compare: Annotated[bool, typer.Option("--cosines", help="Show cosines of all pairs of directions.")] = False,
        layer: Annotated[int | None, typer.Option(help="Layer of the cosines (default: the middle one).")] = None,
        first_row: FirstRow = None,
    ) -> None:
        """Show directions: names, layers, norms, the texts they were made from, how well they separate held-out texts,
        and their cosines.
        """
        found = directions_in(load(file, first_row=first_row_of(first_row)), file)
        found = found if name is None else found.select(name)
        document, tables = document_of(found), [part for one in found for part in told_of(found, one)]
        if compare or layer is not None:
            at = found.layers[len(found.layers) // 2] if layer is None else layer
            (at,) = found.at_layers([at]).layers  # raises an error that names the layers that exist
            document["cosines"] = {"layer": at, "names": list(found), "values": found.cosines(at).tolist()}
            tables.append(cosines(found, at))
        terminal.show(document, *tables, facts("", origin(found)))


def _register_compare(app: typer.Typer) -> None:
    @command(
        app,
        "compare",
        examples=[
            "steercap vectors compare vectors_vllm_bfloat16 vectors_vllm_float32",
            "steercap vectors compare base/vectors instruct/vectors --level pos_3 --raw --out compared.parquet",
            "steercap vectors compare out/sweep traits/vectors --model Qwen/Qwen3-32B --dtype bfloat16",
        ],
    )
    def compare(
        first: Annotated[
            Path, typer.Argument(exists=True, help="Folder of NAME.pt or NAME/steering_vector.pt, or directions.")
        ],
        second: Annotated[Path, typer.Argument(exists=True, help="Folder or file to compare with, in the same form.")],
        terminal: Terminal,
        level: Level = None,
        raw: Annotated[bool | None, typer.Option("--raw", help="Do not subtract the default of persona files.")] = None,
        model: Annotated[
            str | None,
            typer.Option("--model", "-m", help="Model of the first, a folder of steercap train: adds perplexities."),
        ] = None,
        dtype: Annotated[str | None, typer.Option(help="dtype of --model (default float32).")] = None,
        out: Annotated[Path | None, typer.Option(dir_okay=False, help="File for the table, in Parquet.")] = None,
        force: Force = False,
    ) -> None:
        """Compare the vectors of equal names in two folders or files, by their cosine and norms at each layer. With
        --model, compare trained vectors with averaged ones and with system prompts, by the perplexity of held-out
        responses, too: this writes steering_vector_comparison.parquet into the first folder.
        """
        import torch

        from steercap.lab.training import HookedModel, compare_trained, compare_vectors

        if model is None:
            refuse("there is no --model", {"--dtype": dtype})
        if out is not None:
            file_ready(out, extensions=[".parquet"])
            may_replace(out, terminal, force=force)
        reading: dict[str, Any] = {name: value for name, value in (("level", level), ("raw", raw)) if value is not None}
        if model is None:
            found = compare_vectors(first, second, **reading)
        else:
            with terminal.progress() as tell:
                device = "cuda" if torch.cuda.is_available() else None
                hooked = HookedModel(located(model), dtype_of(dtype or "float32"), device=device)
                found = compare_trained(hooked, first, second, progress=tell, **reading)
        if out is not None:
            found.save(out)
        about = {"compared": str(found), **found.left_out, **({} if out is None else {"file": out})}
        terminal.show({"rows": found.rows, "left_out": found.left_out}, least_alike(found), facts("", about))


def least_alike(compared: ComparedVectors) -> Table:
    """Return a table of the pairs with the lowest cosines; without losses, of which perplexities tell as much."""
    kind = type(compared.rows[0])
    columns = [one for one in kind.__struct_fields__ if not one.startswith(("loss", "averaged", "lr", "tokens"))]
    title = f"least alike of {len(compared.rows)} pairs"
    table = titled(title, [one.replace("_", " ") for one in columns], words=("name", "dataset"))
    for row in sorted(compared.rows, key=lambda row: -2.0 if row.cosine is None else row.cosine)[:LEAST_ALIKE]:
        cells = [getattr(row, one) for one in columns]
        table.add_row(
            *(f"{cell:.4g}" if isinstance(cell, float) else Cell("" if cell is None else str(cell)) for cell in cells)
        )
    return table


def _register_convert(app: typer.Typer) -> None:
    @command(
        app,
        "convert",
        examples=[
            "steercap vectors convert praise.safetensors --out praise.gguf --layers 1: --model-hint llama",
            "steercap vectors convert response_avg_diff.pt --out evil.safetensors --first-row 1 --name evil",
            "steercap vectors convert capping_config.pt --out cap.safetensors --name layers_46:54-p0.25",
        ],
    )
    def convert(
        source: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File to convert.")],
        out: Annotated[Path, typer.Option(dir_okay=False, help="File for the vectors: .safetensors, .gguf or .pt.")],
        terminal: Terminal,
        name: Annotated[
            str | None, typer.Option(help="Name of the direction or experiment to take from several, or a new one.")
        ] = None,
        layers: Annotated[str, typer.Option(help="Layers to keep.")] = "all",
        first_row: Annotated[
            int | None, typer.Option(min=0, max=1, help="Index of layer 0 in a .pt tensor, read or written: 0 or 1.")
        ] = None,
        bound: Annotated[
            Bound | None,
            typer.Option(
                help="Whether caps of a capping experiment are upper (high, the default) or lower (low) bounds."
            ),
        ] = None,
        model_hint: Annotated[
            str | None, typer.Option(help="Model hint to write into a GGUF file, such as llama.")
        ] = None,
        force: Force = False,
    ) -> None:
        """Convert vectors to another format. Reads steercap's .safetensors, GGUF control vectors of repeng and
        llama.cpp, .pt tensors of persona vectors (--first-row is the row of layer 0) and .pt capping experiments of the
        assistant axis; writes the first three. Experiments become steering that is ready to use.
        """
        extensions = [f".{one}" for one in Target]
        file_ready(out, extensions=extensions)
        if out.suffix.lower() != ".gguf":
            refuse(f"{out} is no GGUF file", {"--model-hint": model_hint})
        written_alone = out.suffix.lower() == ".pt" and kind_of(source) != "pt"
        content = load(
            source,
            first_row=None if written_alone else first_row_of(first_row),
            bound=None if bound is None else bound.value,
        )
        may_replace(out, terminal, force=force)
        written = write(
            content,
            source,
            out,
            name=name,
            layers=layers_of(layers),
            first_row=first_row_of(first_row),
            model_hint=model_hint or "",
        )
        terminal.show({"file": str(out), **written}, facts("", {"file": out, **written}))
