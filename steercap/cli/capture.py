"""`steercap capture`: activations of every prompt, written to one safetensors file each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, cast

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from steercap.cli.captured import Captured, Store, arguments_of_call, capture_to, check_goes_on
from steercap.cli.command import command
from steercap.cli.contents import directions_in, load
from steercap.cli.destinations import Force, folder_ready, may_replace
from steercap.cli.engines import ReachOptions, opened
from steercap.cli.generate import SamplingOptions
from steercap.cli.parsing import SteerOptions, layers_of, names_of, refuse, sites_of, tokens_of
from steercap.cli.preflight import preflight, reached
from steercap.cli.prompts import PromptOptions
from steercap.cli.terminal import Terminal
from steercap.core.display import span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from steercap.cli.preflight import Preflight
    from steercap.core.names import Name
    from steercap.core.spec import CaptureSpec, Layers
    from steercap.lab.mechanism.views.heatmap import TokenHeatmap
    from steercap.saes.sae import SAE
    from steercap.steering.directions import DirectionSet

_row = partial(typer.Option, rich_help_panel="Rows (see docs/settings.md)")
#: Options `--at` and `--sae`.
Places: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Points, in place of --layers and --sites: resid_post[5], blocks.5.attn.hook_z, "
        "model.layers.5.mlp.input, ..., separated by commas."
    ),
]
Saes: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(exists=True, help="SAE whose strongest features are kept instead of rows, a folder; repeatable."),
]
#: Maximum number of prompts whose heat maps are shown; the files have the rows of all prompts.
HEATMAPS: Final = 8


@dataclass(frozen=True)
class RowOptions:
    """Options for storing captured rows (activation vectors); those left out come from the environment."""

    codec: Annotated[
        str | None,
        _row(help="Codec of stored rows: raw (default), full8, ..., or @FILE, as written by steercap codecs check."),
    ] = None
    codec_k: Annotated[int | None, _row(help="Values stored per row, for topk8, rp8 and rp16.")] = None
    codec_seed: Annotated[int | None, _row(help="Seed of the random matrix of rp8 and rp16.")] = None
    capture_bytes: Annotated[int | None, _row(help="Maximum shared memory for rows on each worker, in bytes.")] = None
    device_ring_bytes: Annotated[int | None, _row(help="Device memory that rows pass through, in bytes.")] = None
    reduce_bytes: Annotated[int | None, _row(help="Maximum device memory for running reductions, in bytes.")] = None
    overflow: Annotated[str | None, _row(help="When memory for rows is full: wait, error or spill (to disk).")] = None
    overflow_timeout: Annotated[
        float | None, _row(help="Seconds that a request waits for memory while no other runs.")
    ] = None
    spill_folder: Annotated[str | None, _row(help="Folder for the spill file.")] = None
    spill_bytes: Annotated[int | None, _row(help="Maximum size of the spill file, in bytes.")] = None
    transport: Annotated[str | None, _row(help="How rows reach the client: auto, shared (memory) or wire (RPC).")] = (
        None
    )
    attention: Annotated[
        int | None, _row(help="Keep the N tokens that each head attends to most, instead of rows.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the options that were given, as arguments of `SteerModel`; without those of `CaptureSpec`."""
        given, own = asdict(self).items(), ("codec", "attention")
        return {name: value for name, value in given if not name.startswith(own) and value is not None}

    def coding(self, sites: Sequence[str]) -> dict[str, Any]:
        """Return the codec of these sites as fields of `CaptureSpec`: codec, codec_k and codec_seed, None if not set.

        Raises:
            typer.BadParameter: --codec-k or --codec-seed beside a file of codecs.
            InvalidFile, UnknownName, InvalidSpec: the file cannot be read, or has no one codec for the sites.
        """
        if self.codec is None or not self.codec.startswith("@"):
            return {"codec": self.codec, "codec_k": self.codec_k, "codec_seed": self.codec_seed}
        if self.codec_k is not None or self.codec_seed is not None:
            raise typer.BadParameter(
                "a file of codecs sets k and seed; leave --codec-k and --codec-seed out", param_hint="--codec"
            )
        from steercap.captures.site_codecs import SiteCodecs

        coding = SiteCodecs.load(self.codec[1:]).coding_of(sites)
        return {"codec": coding.encoding, "codec_k": coding.k or None, "codec_seed": coding.seed or None}


def table_of(captured: list[Captured]) -> Table:
    """Return a table with a row per captured file: prompt, answer, numbers of points, of rows and of their elements."""
    total = sum(one.bytes for one in captured)
    size = f"{total / 1e6:,.1f} MB" if total >= 1e5 else f"{total:,} bytes"
    table = Table(expand=True, caption=f"{len(captured)} {'file' if len(captured) == 1 else 'files'}, {size} of rows")
    table.add_column("file", style="cyan", no_wrap=True)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("answer", ratio=2, no_wrap=True)
    for name in ("points", "rows", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in captured:
        words = [Text(" ".join(text.split())) for text in (one.prompt, one.text)]
        table.add_row(Path(one.file).name, *words, str(one.points), str(one.rows), str(one.hidden))
    return table


def heatmaps_of(captured: list[Captured], directions: DirectionSet, layer: int, tokenizer: Any) -> list[TokenHeatmap]:
    """Return heat maps, token by token, of the rows of the first `HEATMAPS` prompts projected on directions.

    A negative `layer` counts from the last.

    Raises:
        InvalidSpec, LayerOutOfRange: the layer has no directions, or was not captured.
    """
    from steercap.captures.handle import CaptureHandle
    from steercap.lab.mechanism.views.heatmap import heatmap_of

    handles = [CaptureHandle.load(one.file) for one in captured[:HEATMAPS]]
    return [
        heatmap_of(handle, directions, layer, tokenizer, title=one.prompt)
        for handle, one in zip(handles, captured, strict=False)
    ]


def saes_of(folders: Sequence[Path], url: str | None) -> list[SAE] | None:
    """Load the SAEs in folders, None if there are none; a server, at `url`, has its own.

    Raises:
        typer.BadParameter: SAEs beside --url.
        InvalidFile: a folder holds no SAE.
    """
    if not folders:
        return None
    from steercap.saes.sae import SAE

    refuse("a server has its own SAEs", {"--url": url})
    return [SAE.load(folder) for folder in folders]


def sites_read(spec: CaptureSpec) -> tuple[str, ...]:
    """Return the names of the sites that a spec reads, to arm in the engine."""
    if spec.at is not None:
        return tuple(name.site for name in cast("tuple[Name, ...]", spec.at))
    if spec.project is not None:
        return (spec.project.site,)
    return tuple(one.input.site for one in spec.saes) or tuple(spec.sites)


def check_points(planned: Preflight, spec: CaptureSpec) -> None:
    """Check that the points of a spec can be captured; raise the errors of `Preflight.check_capture`."""
    for one in spec.saes:
        planned.check_layers([one.input.layer], one.input.site)
    if not spec.saes:
        planned.check_capture(spec)


def check_heat(directions: DirectionSet, layer: int, layers: Layers, num_layers: int) -> None:
    """Check that a layer is captured and has directions, for its heat map; a negative `layer` counts from the last.

    `layers` are the captured ones. `num_layers` is 0 if unknown, and then nothing is checked.

    Raises:
        typer.BadParameter: the layer is not captured, or has no directions.
    """
    from steercap.core.spec import resolve_layers

    if not num_layers:
        return
    kept = directions.layers if layers == "all" else resolve_layers(layers, num_layers)
    asked = layer + num_layers if layer < 0 else layer
    if asked not in kept or asked not in directions.layers:
        raise typer.BadParameter(f"layer {layer} is not captured; give one of {span(kept)}", param_hint="--heat-layer")


def register(app: typer.Typer) -> None:
    """Add the command `capture` to `app`."""

    @command(
        app,
        "capture",
        examples=[
            'steercap capture "The capital of France is" --layers 8,16 --out out/paris',
            "steercap capture --prompts prompts.txt --tokens generated --reduce mean --out out/means",
            "steercap capture --prompts prompts.txt --codec full8 --out out/coded",
            "steercap capture --chat --prompts questions.txt --sites attn_out,mlp_out --layers 4:20:2 --out out/blocks",
            "steercap capture --prompts prompts.txt --at 'resid_post[8],z[9]' --out out/points",
            "steercap capture --prompts prompts.txt --attention 8 --layers 10:20 --out out/attention",
            'steercap capture --chat "How was your day?" --project traits.safetensors --heat-layer 18 --out out/day',
        ],
    )
    async def capture(
        prompts: PromptOptions,
        sampling: SamplingOptions,
        steer: SteerOptions,
        stored: RowOptions,
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for one safetensors file per prompt.")],
        layers: Annotated[str, typer.Option(help="Layers: all, 8, 8,16,-1 or 4:20:2.")] = "all",
        sites: Annotated[
            str, typer.Option(help="Sites: resid_pre, resid_post, attn_out, mlp_out, ..., separated by commas.")
        ] = "resid_post",
        tokens: Annotated[
            str,
            typer.Option(help="Tokens: all, prompt, generated, last_prompt, positions, slices, or several: prompt,-1."),
        ] = "all",
        reduce: Annotated[str | None, typer.Option(help="Reduce to one row per point: mean, sum, max or last.")] = None,
        at: Places = None,
        sae: Saes = None,
        before_edits: Annotated[
            bool, typer.Option("--before-edits", help="Capture rows before the edits of their own point.")
        ] = False,
        allow_nonfinite: Annotated[
            bool,
            typer.Option("--allow-nonfinite", help="Save rows with NaN or infinity; by default they are an error."),
        ] = False,
        project: Annotated[
            Path | None, typer.Option(help="Keep each row's projections on this file's directions instead of the row.")
        ] = None,
        heat_layer: Annotated[
            int | None, typer.Option(help="Show the projections of this layer token by token; needs --project.")
        ] = None,
        force: Force = False,
    ) -> None:
        r"""Generate text and save activations. Each prompt becomes one safetensors file with its rows, their positions
        and token ids, and the texts; CaptureHandle.load reads it, and steercap inspect shows it. There are prompt +
        generated - 1 rows: the last token is never read. Layer i of resid_post is transformers' hidden_states\[i + 1].
        With --project a few numbers per token are saved instead of each row. manifest.json lists the files; an
        interrupted call is resumed by the same call.
        """
        from steercap.core.spec import REDUCTIONS, CaptureSpec, parse_names

        model.require_there()
        folder_ready(out)
        asked, params, spec = prompts.read(), sampling.params(), steer.spec()
        if sampling.samples > 1:
            raise typer.BadParameter("capture keeps one answer per prompt; leave --samples out", param_hint="--samples")
        if reduce is not None and reduce not in REDUCTIONS:
            raise typer.BadParameter(f"{reduce!r}; give {', '.join(REDUCTIONS)}", param_hint="--reduce")
        if heat_layer is not None and project is None:
            raise typer.BadParameter("there is nothing to show without --project FILE", param_hint="--heat-layer")
        directions = None if project is None else directions_in(load(project), project)
        wanted = CaptureSpec(
            layers=layers_of(layers),
            sites=names_of(sites),
            at=None if at is None else names_of(at),
            tokens=tokens_of(tokens),
            reduce=reduce,
            project=directions,
            sae=saes_of(sae or [], model.url),
            before_edits=before_edits,
            allow_nonfinite=allow_nonfinite,
            attention=stored.attention,
            **stored.coding([name.site for name in parse_names(names_of(at or sites))]),
        )
        armed = tuple(dict.fromkeys((*sites_read(wanted), *sites_of(spec))))
        planned = preflight(model, sites=armed, **stored.settings())
        check_points(planned, wanted)
        planned.check_steering(spec)
        if directions is not None and heat_layer is not None:
            check_heat(directions, heat_layer, wanted.layers, planned.model.layers)
        goes_on = not force and check_goes_on(out, arguments_of_call(asked, params, wanted))
        if not goes_on:
            may_replace(out, terminal, force=force, pattern="*.safetensors")  # last: it asks
        async with (opened if sae else reached)(model, terminal, sites=armed, **stored.settings()) as open_model:
            store = Store(out, terminal, afresh=not goes_on)
            found = await capture_to(open_model, asked, params, wanted, store, terminal, steering=spec)
            shown: RenderableType = table_of(found)
            if directions is not None and heat_layer is not None:
                shown = Group(*heatmaps_of(found, directions, heat_layer, open_model.tokenizer), shown)
            terminal.show({"model": model.url or model.model, "captures": found}, shown)
            if store.error is not None:
                raise store.error
