"""`steercap codecs check`: choice of the cheapest codec that preserves given measures on rows of the user's texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command, group_of
from steercap.cli.contents import directions_in, load
from steercap.cli.destinations import Force, file_ready, may_replace, saved
from steercap.cli.engines import ReachOptions
from steercap.cli.parsing import layers_of, names_of
from steercap.cli.preflight import preflight, reached
from steercap.cli.prompts import records_of
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.cli.vectors import texts_in
from steercap.core.values import shown
from steercap.errors import InvalidFile


def labels_in(path: Path) -> dict[str, list[float]] | None:
    """Read "labels" of a JSONL file of texts: values by label name, in order of lines; None if no line has labels.

    Raises:
        InvalidFile: a line lacks a label that another has, or one is no number.
    """
    lines = [
        (number, value.get("labels") if isinstance(value, dict) else None) for number, value in records_of(str(path))
    ]
    names = next((list(labels) for _, labels in lines if isinstance(labels, dict)), None)
    if names is None and all(labels is None for _, labels in lines):
        return None
    for number, labels in lines:
        given = labels if isinstance(labels, dict) else {}
        if (
            names is None
            or set(given) != set(names)
            or not all(type(one) in {int, float, bool} and math.isfinite(one) for one in given.values())
        ):
            raise InvalidFile(
                f"{path}, line {number}: labels={shown(labels)}; give each text a finite number by the same names: "
                f"{', '.join(names or ['calm'])}"
            )
    return {name: [float(labels[name]) for _, labels in lines if labels] for name in names or ()}


def tables_of_codecs(records: list[dict[str, Any]]) -> list[Table]:
    """Return a table of the measures that have a threshold, and one of the others; a row per site and codec."""
    from steercap.lab.mechanism.codec_judge import BARRED

    known = list(dict.fromkeys(name for record in records for name in record))
    told = [name for name in known if name not in {*BARRED, "site", "codec", "bytes", "failed", "chosen"}]
    found = []
    for title, names in (("worst over layers", [name for name in BARRED if name in known]), ("told", told)):
        table = titled(title, ("", "site", "codec", "bytes", *names), words=("", "site", "codec"))
        for column in table.columns[:4]:
            column.no_wrap = True
        for record in records:
            head = ("✓" if record["chosen"] else "", record["site"], record["codec"], f"{record['bytes']:,}")
            table.add_row(*head, *(_measure(record, name) for name in names))
        found += [table] if names else []
    return found


def _measure(record: Mapping[str, Any], name: str) -> Text:
    if name not in record:
        return Text("")
    value = record[name]
    return Text("none" if value is None else f"{value:.3f}", style="red" if name in record["failed"] else "")


def _check(app: typer.Typer) -> None:
    @command(
        app,
        "check",
        examples=[
            "steercap codecs check texts.jsonl --out codecs.json",
            "steercap codecs check texts.jsonl -m Qwen/Qwen3-8B --directions calm.safetensors --layers 9 --out c.json",
            "steercap codecs check texts.jsonl --sites neurons --codec int4 --codec topk8,k=256 --out c.json",
        ],
    )
    async def check(
        texts: Annotated[
            Path,
            typer.Argument(
                exists=True, dir_okay=False, help='Texts, one per line; in .jsonl with "labels": {"NAME": NUMBER}.'
            ),
        ],
        options: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(dir_okay=False, help="File for the chosen codecs: .json.")],
        sites: Annotated[str, typer.Option(help="Sites to judge, separated by commas.")] = "resid_post,neurons",
        layers: Annotated[str | None, typer.Option(help="Layers to judge (default: three, at the quarters).")] = None,
        codec: Annotated[
            list[str] | None, typer.Option(metavar="CODEC,k=N", help="Codec to judge; repeatable (default: ten).")
        ] = None,
        rows: Annotated[int, typer.Option(min=64, help="Maximum rows of each point.")] = 2000,
        directions: Annotated[Path | None, typer.Option(help="File of directions whose cosines must be kept.")] = None,
        sae: Annotated[Path | None, typer.Option(help="SAE to give decoded rows to: its folder.")] = None,
        train_sae: Annotated[bool, typer.Option("--train-sae", help="Also train SAEs on raw and top-k rows.")] = False,
        seed: Annotated[int, typer.Option(min=0, help="Seed of pairs of rows, and of training.")] = 0,
        force: Force = False,
    ) -> None:
        """Choose the cheapest codec that preserves what you measure on rows of your own texts: ranks of neurons, scores
        of probes of the labels, cosines with directions, to a correlation of 0.95 with raw rows. --codec and
        --record-site read the written file as @FILE; it has all measures.
        """
        from steercap.core.spec import CaptureSpec
        from steercap.lab.mechanism.codec_check import CANDIDATES, check_codecs, check_labels, codings_of
        from steercap.saes.sae import SAE

        options.require_there()
        file_ready(out, extensions=[".json"])
        asked, labels, armed = texts_in(texts)[0], labels_in(texts), names_of(sites)
        given = None if directions is None else directions_in(load(directions), directions)
        candidates, wanted = codec or CANDIDATES, None if layers is None else layers_of(layers)
        codings_of(candidates)
        if given is not None and given.site not in armed:
            raise typer.BadParameter(
                f"the directions are at {given.site}; add this site to --sites", param_hint="--directions"
            )
        check_labels(labels or {})
        known = None if sae is None else SAE.load(sae)
        if known is not None and (known.transcodes or known.input.site not in armed):
            raise typer.BadParameter(
                f"{known!r}; give an SAE, not a transcoder, of one of --sites, {', '.join(armed)}", param_hint="--sae"
            )
        there = preflight(options, sites=armed)
        there.check_capture(CaptureSpec(layers="all" if wanted is None else wanted, sites=armed))
        if given is not None:
            there.check_directions(given, wanted, "--directions")
        may_replace(out, terminal, force=force)  # last: it asks
        async with reached(options, terminal, sites=armed) as open_model:
            with terminal.progress() as tell:
                found = await check_codecs(
                    open_model,
                    asked,
                    layers=wanted,
                    sites=armed,
                    candidates=candidates,
                    labels=labels,
                    directions=given,
                    sae=known,
                    train_sae=train_sae,
                    most_rows=rows,
                    seed=seed,
                    progress=tell,
                )
            file, error = saved(out, found.save, terminal)
            records = found.table()
            facts_of = {"rows": found.rows, "texts": found.texts, **found.notes, "file": file}
            terminal.show({"codecs": records, **facts_of}, *tables_of_codecs(records), facts("", facts_of))
            if error is not None:
                raise error


def register(app: typer.Typer) -> None:
    """Add the group `codecs` with the command `check` to `app`."""
    codecs = group_of("Codecs of stored rows.")
    app.add_typer(codecs, name="codecs")
    _check(codecs)
