"""`steercap capture`: activations of every prompt, one safetensors file each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.engines import ModelOptions, opened
from steercap.cli.generate import SamplingOptions
from steercap.cli.prompts import Prompt, PromptOptions
from steercap.cli.requests import run_each
from steercap.cli.selections import layers_of, names_of, tokens_of
from steercap.cli.steering import SteerOptions, sites_of
from steercap.cli.terminal import Terminal

if TYPE_CHECKING:
    from steercap.core.spec import CaptureSpec
    from steercap.handle import CaptureHandle
    from steercap.model import SteerModel
    from steercap.steering import SteeringSpec


class Captured(msgspec.Struct, frozen=True):
    """What was kept of one prompt.

    Args:
        file: where.
        prompt: what was asked.
        text: what was generated.
        points: how many.
        rows: at each point.
        hidden: elements of a row.
        dtype: of its elements.
        bytes: of all rows.
    """

    file: str
    prompt: str
    text: str
    points: int
    rows: int
    hidden: int
    dtype: str
    bytes: int


async def capture_to(
    model: SteerModel,
    prompts: list[Prompt],
    params: dict[str, Any],
    spec: CaptureSpec,
    out: Path,
    terminal: Terminal,
    *,
    steering: SteeringSpec | None = None,
) -> list[Captured]:
    """Capture every prompt, and write each down as it ends; what is written needs no memory.

    Args:
        model: an open model.
        prompts: texts and conversations.
        params: fields of vLLM's SamplingParams.
        spec: what is kept.
        out: folder for `0000.safetensors` and so on, see `CaptureHandle.load`.
        terminal: for the bar.
        steering: what is changed.

    Raises:
        The errors of `SteerModel.generate`.
    """
    found: dict[int, Captured] = {}
    digits = max(4, len(str(len(prompts) - 1)))

    def take(number: int, _output: Any, handle: CaptureHandle | None) -> None:
        assert handle is not None
        path = handle.save(out / f"{number:0{digits}}.safetensors")
        tensors = list(handle.captures.values())
        rows, hidden = tensors[0].shape
        found[number] = Captured(
            file=str(path),
            prompt=prompts[number].shown,
            text=handle.text,
            points=len(tensors),
            rows=rows,
            hidden=hidden,
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            bytes=sum(tensor.nbytes for tensor in tensors),
        )
        bar.advance(task)

    with terminal.progress() as bar:
        task = bar.add_task("capturing", total=len(prompts))
        await run_each(model, prompts, params, take, steering=steering, capture=spec)
    return [found[number] for number in sorted(found)]


def table_of(found: list[Captured]) -> Table:
    """A row a file."""
    total = sum(one.bytes for one in found)
    table = Table(expand=True, caption=f"{len(found)} files, {total / 1e6:,.1f} MB of rows")
    table.add_column("file", style="cyan", no_wrap=True)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("answer", ratio=2, no_wrap=True)
    for name in ("points", "rows", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        words = [Text(" ".join(text.split())) for text in (one.prompt, one.text)]
        table.add_row(Path(one.file).name, *words, str(one.points), str(one.rows), str(one.hidden))
    return table


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(
        app,
        "capture",
        examples=[
            'steercap capture "The capital of France is" --layers 8,16 --out out/paris',
            "steercap capture --file prompts.txt --tokens generated --reduce mean --out out/means",
            "steercap capture --chat --file questions.txt --sites attn_out,mlp_out --layers 4:20:2 --out out/blocks",
        ],
    )
    async def capture(
        prompts: PromptOptions,
        sampling: SamplingOptions,
        steer: SteerOptions,
        model: ModelOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for one safetensors file a prompt.")],
        layers: Annotated[str, typer.Option(help="all, 8, 8,16,-1 or 4:20:2.")] = "all",
        sites: Annotated[
            str, typer.Option(help="resid_pre, resid_post, attn_out, mlp_out, or several.")
        ] = "resid_post",
        tokens: Annotated[
            str, typer.Option(help="all, prompt, generated, last_prompt, positions, slices, or several: prompt,-1.")
        ] = "all",
        reduce: Annotated[str | None, typer.Option(help="mean, sum, max or last: one row a point.")] = None,
        force: Annotated[bool, typer.Option("--force", help="Write into a folder that has captures in it.")] = False,
    ) -> None:
        r"""Generate, and keep the activations. Each prompt becomes one safetensors file with its rows, their
        positions and token ids, and the texts; CaptureHandle.load reads it, and steercap inspect shows it. Rows are
        prompt + generated - 1: the last token is never read. Layer i of resid_post is hidden_states\[i + 1] of
        transformers.
        """
        from steercap.core.spec import REDUCTIONS, CaptureSpec

        asked, params, spec = prompts.read(), sampling.params(), steer.spec()
        if sampling.n > 1:
            raise typer.BadParameter("capture keeps one answer to each prompt", param_hint="-n")
        if reduce is not None and reduce not in REDUCTIONS:
            raise typer.BadParameter(f"{reduce!r}; give {', '.join(REDUCTIONS)}", param_hint="--reduce")
        if not force and any(out.glob("*.safetensors")):
            raise typer.BadParameter(f"{out} has captures in it; give another folder, or --force", param_hint="--out")
        wanted = CaptureSpec(
            layers=layers_of(layers),
            sites=names_of(sites),
            tokens=tokens_of(tokens),
            reduce=reduce,
        )
        armed = tuple(dict.fromkeys((*names_of(sites), *sites_of(spec))))
        async with opened(model, terminal, sites=armed) as open_model:
            found = await capture_to(open_model, asked, params, wanted, out, terminal, steering=spec)
            terminal.show({"model": model.model, "captures": found}, table_of(found))
