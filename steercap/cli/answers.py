"""`steercap persona answers`: activations of existing answers, as a model reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from steercap.cli.command import command
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import ReachOptions, located, pairs_of, say_why
from steercap.cli.parsing import refuse
from steercap.cli.preflight import reached
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal

if TYPE_CHECKING:
    from steercap.lab.personas import AnswersRead


def table_of(answers: AnswersRead) -> Table:
    """Return a table with a row per persona and score level: numbers of answers used and left out, with reasons."""
    table = titled(
        str(answers.folder.vectors("NAME")), ("persona", "level", "answers", "left out"), words=("persona", "level")
    )
    for name, receipt in answers.personas.items():
        for level in {**receipt.levels, **receipt.left_out}:
            why = ", ".join(f"{count} {reason}" for reason, count in receipt.left_out.get(level, {}).items())
            table.add_row(name, level, str(receipt.levels.get(level, "absent")), why)
    return table


def document_of(answers: AnswersRead) -> dict[str, Any]:
    """Return the result as a document for JSON: folders of means, number of default answers, receipts of personas."""
    return {
        "vectors": str(answers.folder.vectors("NAME").parent),
        "response_activations": str(answers.folder.activations("NAME").parent),
        "default_answers": answers.default,
        "personas": answers.personas,
    }


def register(persona: typer.Typer) -> None:
    """Add the command `answers` to the group `persona`."""

    @command(
        persona,
        "answers",
        examples=[
            "steercap persona answers responses extract_scores --kind role -m Qwen/Qwen3-8B --out out/answers",
            "steercap persona answers responses extract_scores --kind trait --dtypes float32,bfloat16 --out out",
        ],
    )
    async def answers(
        model: ReachOptions,
        terminal: Terminal,
        responses: Annotated[Path, typer.Argument(metavar="RESPONSES", help="Folder of answers, NAME.jsonl.")],
        scores: Annotated[Path, typer.Argument(metavar="SCORES", help="Folder of their scores, NAME.json.")],
        kind: Annotated[
            Literal["trait", "role"], typer.Option(help="Kind of the personas: scored 0 to 100, or 0 to 3.")
        ],
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the means of answers and levels.")],
        name: Annotated[list[str] | None, typer.Option(help="Name of a persona; repeatable (default: all).")] = None,
        dtypes: Annotated[
            str | None,
            typer.Option(help="dtypes to run in turn, each with folders of its own: float32,bfloat16,float16."),
        ] = None,
        minimum: Annotated[
            int | None, typer.Option(min=1, help="Minimum number of answers of a level (default: roles 50, traits 1).")
        ] = None,
        stored: Annotated[
            Literal["float32", "bfloat16", "float16"], typer.Option(help="dtype of the means of answers on disk.")
        ] = "float32",
        concurrency: Annotated[
            int, typer.Option(min=1, help="Maximum concurrent answers; 1 gives files that are equal byte for byte.")
        ] = 128,
    ) -> None:
        """Read existing answers with a model: keep the mean row of each answer over its tokens, and the means of each
        score level. Nothing is generated. An interrupted run is resumed by the same call. A dtype whose model does not
        fit into memory is refused before anything starts; the others run.
        """
        from steercap.lab.personas import read_answers, read_answers_by_dtype
        from steercap.lab.personas.answer_files import read_personas
        from steercap.model import SteerModel

        if dtypes is not None and model.url is not None:
            raise typer.BadParameter("a server has one dtype; leave --dtypes out", param_hint="--url")
        given_dtype = model.dtype is not None or "dtype" in dict(pairs_of(model.engine_arg or (), "--engine-arg"))
        if dtypes is not None and given_dtype:  # a preset has one too, in place of which the options may give another
            raise typer.BadParameter(
                "give --dtype, as such or by --engine-arg, or --dtypes, not both", param_hint="--dtypes"
            )
        if dtypes is not None:
            refuse("--dtypes starts engines of its own", {"--api-key": model.api_key})
        model.require_there()
        folder_ready(out)
        await asyncio.to_thread(read_personas, responses, scores, kind, name or None)
        given: dict[str, Any] = {"kind": kind, "names": name or None, "minimum": minimum}
        given |= {"stored": stored, "concurrency": concurrency}
        refused: dict[str, str] = {}
        with terminal.progress() as tell:
            given["progress"] = tell
            if dtypes is None:
                async with reached(model, terminal) as open_model:
                    found = {"": await read_answers(open_model, responses, scores, out, **given)}
            else:
                path = str(await asyncio.to_thread(located, model.model))
                given["dtypes"] = [dtype.strip() for dtype in dtypes.split(",")]

                def opening(dtype: str) -> SteerModel:
                    return SteerModel(path, **{**model.arguments(), "dtype": dtype})

                say_why(terminal)
                with terminal.alone():
                    found, refused = await read_answers_by_dtype(opening, responses, scores, out, **given)
        terminal.show(
            {"folder": str(out), "runs": {dtype: document_of(one) for dtype, one in found.items()}, "refused": refused},
            *map(table_of, found.values()),
            facts("refused", refused) if refused else facts("", {"folder": out}),
        )
