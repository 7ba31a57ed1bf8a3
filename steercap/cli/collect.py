"""`steercap collect`: activations of a corpus, written as a data set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from steercap.cli.capture import RowOptions
from steercap.cli.command import command
from steercap.cli.contents import directions_in, load
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import ReachOptions, unopened
from steercap.cli.parsing import SteerOptions, layers_of, names_of, refuse, sites_of, tokens_of
from steercap.cli.preflight import HIDDEN_WIDTH_SITES, check_sampling, preflight, reached
from steercap.cli.tables import facts
from steercap.cli.terminal import Terminal
from steercap.core.protocols import ProgressCallback

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting import DocumentSource, RayActors
    from steercap.lab.datasets.collecting.collection import Collected
    from steercap.lab.datasets.collecting.samples import TokenSample
    from steercap.model import SteerModel

_corpus = partial(typer.Option, rich_help_panel="Corpus")
_sample = partial(typer.Option, rich_help_panel="Tokens")
_ray = partial(typer.Option, rich_help_panel="Many machines")


@dataclass(frozen=True)
class CorpusOptions:
    """Options for reading a corpus: file format, documents, and how they are cut into windows."""

    format: Annotated[str | None, _corpus(help="Format: jsonl, parquet, arrow or text (default: by file name).")] = None
    split: Annotated[str | None, _corpus(help="Split to read, if the folder has several.")] = None
    column: Annotated[str | None, _corpus(help="Column of documents (default: text, messages or tokens).")] = None
    unit: Annotated[str, _corpus(help="Unit of a document in text files: line, paragraph or file.")] = "line"
    skip_bad: Annotated[bool, _corpus("--skip-bad", help="Skip and count invalid documents.")] = False
    context: Annotated[int | None, _corpus(help="Maximum tokens of a window (default: the engine's).")] = None
    long: Annotated[
        str | None, _corpus(help="Longer documents: split, cut or refuse (default split; with --max-tokens, refuse).")
    ] = None
    bos: Annotated[str, _corpus(help="Put the <bos> token before each document, each window, or none.")] = "document"

    def source(self, corpus: str) -> DocumentSource:
        """Open the corpus `corpus`: a file, a folder or a glob pattern.

        Raises:
            InvalidFile, InvalidSetting, UnknownName: see `open_source`.
        """
        from steercap.lab.datasets.collecting import open_source

        bad: Any = "skip" if self.skip_bad else "error"
        unit: Any = self.unit
        return open_source(corpus, format=self.format, split=self.split, column=self.column, unit=unit, bad=bad)


@dataclass(frozen=True)
class ContinuationOptions:
    """Options for generating after each document."""

    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens to generate after each document, which are kept too.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature for --max-tokens (default 1); 0 is greedy.")
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of sampling for --max-tokens (default 0); documents' seeds follow from it."),
    ] = None

    def params(self) -> dict[str, Any] | None:
        """Return the options as fields of vLLM's SamplingParams, without the seed; None without --max-tokens.

        Raises:
            typer.BadParameter: a number is out of range, or an option is given without --max-tokens.
        """
        if self.max_tokens is None:
            given = {"--temperature": self.temperature, "--seed": self.seed}
            refuse("nothing is generated without --max-tokens", given)
            return None
        found: dict[str, Any] = {"temperature": 1.0 if self.temperature is None else self.temperature}
        found["max_tokens"] = self.max_tokens
        check_sampling(**found, seed=self.seed)
        return found


@dataclass(frozen=True)
class SampleOptions:
    """Options that select the tokens whose activations are kept."""

    tokens: Annotated[
        str, _sample(help="Tokens to keep: all, prompt, generated, last_prompt, positions, slices, or several.")
    ] = "all"
    one_in: Annotated[int | None, _sample(help="Keep a random one in N of these tokens.")] = None
    sample_seed: Annotated[int | None, _sample(help="Seed of --one-in (default 0).")] = None
    probe: Annotated[Path | None, _sample(help="Keep tokens by their projection on this file's direction.")] = None
    probe_layer: Annotated[int | None, _sample(help="Layer whose rows --probe projects.")] = None
    above: Annotated[float | None, _sample(help="Minimum projection to keep.")] = None
    below: Annotated[float | None, _sample(help="Maximum projection to keep.")] = None

    def sample(self, attention: int | None = None) -> TokenSample:
        """Return the token sample that the options describe; `attention` is the value of --attention.

        Raises:
            typer.BadParameter: --one-in together with --probe, or one of them with --attention; a probe of several
                directions, or one without a layer; options of a probe without one.
            InvalidSpec, InvalidSelection: see `steercap.lab.datasets.collecting.samples`.
        """
        from steercap.core.spec import CaptureSpec
        from steercap.lab.datasets.collecting import ByProbe, OneIn
        from steercap.lab.datasets.collecting.samples import Selected

        tokens = tokens_of(self.tokens)
        if attention is not None:
            CaptureSpec(attention=attention, tokens=tokens)  # which must begin at the first
        if attention is not None and not (self.one_in is None and self.probe is None):
            raise typer.BadParameter(
                "--attention reads all tokens; leave --one-in and --probe out", param_hint="--attention"
            )
        if self.probe is None and not (self.probe_layer is None and self.above is None and self.below is None):
            raise typer.BadParameter("--probe-layer, --above and --below need --probe", param_hint="--probe")
        if self.one_in is not None and self.probe is not None:
            raise typer.BadParameter("give --one-in or --probe, not both", param_hint="--probe")
        if self.one_in is not None:
            return OneIn(self.one_in, self.sample_seed or 0, tokens)
        refuse("there is no --one-in", {"--sample-seed": self.sample_seed})
        if self.probe is None:
            return Selected(tokens)
        found = directions_in(load(self.probe), self.probe)
        if len(found) != 1 or self.probe_layer is None:
            raise typer.BadParameter(
                f"give --probe-layer, and a file of one direction; {self.probe} has {len(found)}", param_hint="--probe"
            )
        (vectors,) = found.values()
        return ByProbe(vectors, layer=self.probe_layer, above=self.above, below=self.below, of=tokens)


@dataclass(frozen=True)
class RayOptions:
    """Options for distributing the work over Ray actors."""

    ray: Annotated[int | None, _ray(min=1, help="Spread the work over N Ray actors, one engine each.")] = None
    ray_address: Annotated[
        str | None,
        _ray(
            help="Address of the Ray cluster (default: RAY_ADDRESS, else the one last started on this machine, else a "
            "new one)."
        ),
    ] = None
    ray_gpus: Annotated[float, _ray(min=0, help="GPUs of each actor.")] = 0
    ray_cpus: Annotated[float, _ray(min=0, help="CPU cores of each actor.")] = 1
    ray_restarts: Annotated[int, _ray(min=-1, help="Maximum restarts of a lost actor; -1 for no limit.")] = -1
    ray_retries: Annotated[int, _ray(min=-1, help="Maximum retries of a lost shard; -1 for no limit.")] = 3

    def actors(self) -> RayActors | None:
        """Return the settings of the Ray actors; None without --ray.

        Raises:
            typer.BadParameter: other options of Ray are given without it.
        """
        from steercap.lab.datasets.collecting import RayActors

        if self.ray is None:
            if self != RayOptions():
                raise typer.BadParameter("the --ray-* options need --ray N", param_hint="--ray")
            return None
        return RayActors(
            self.ray,
            num_gpus=self.ray_gpus,
            num_cpus=self.ray_cpus,
            address=self.ray_address,
            max_restarts=self.ray_restarts,
            max_task_retries=self.ray_retries,
        )


@contextmanager
def resumable(terminal: Terminal) -> Iterator[ProgressCallback]:
    """Show progress bars in the block; if it is interrupted, say that the written shards stay."""
    try:
        with terminal.progress() as tell:
            yield tell
    except asyncio.CancelledError:
        terminal.say("the shards that are written stay; the same command resumes")
        raise


@asynccontextmanager
async def not_opened(options: ReachOptions, terminal: Terminal, **settings: Any) -> AsyncIterator[SteerModel]:
    """Yield a model that is not open: each Ray actor opens its own.

    Raises:
        typer.BadParameter: an API key, which no actor would use.
    """
    refuse("actors start engines of their own", {"--api-key": options.api_key})
    with terminal.alone():
        yield await unopened(options, terminal, **settings)


def told(collected: Collected) -> dict[str, Any]:
    """Return the totals of a collection as texts to show, by label."""
    totals, rate = collected.totals, collected.tokens / collected.seconds
    return {
        "documents": f"{totals.documents:,}",
        "tokens": f"{totals.tokens:,}, of which {totals.rows:,} were kept",
        "shards": f"{totals.shards:,}, {decimal(totals.bytes)}",
        "there before": f"{collected.resumed} shards" if collected.resumed else "",
        "mended": f"{collected.mended} shards" if collected.mended else "",
        "skipped": f"{collected.skipped:,}: {'; '.join(collected.complaints)}" if collected.skipped else "",
        "this call": f"{collected.tokens:,} tokens in {collected.seconds:,.0f} s, {rate:,.0f} a second",
        "sha256": totals.sha256,
    }


def register(app: typer.Typer) -> None:
    """Add the command `collect` to `app`."""

    @command(
        app,
        "collect",
        examples=[
            "steercap collect corpus.jsonl --out out/corpus --layers 8,16 --context 512",
            "steercap collect data/wiki --out out/sample --split train --layers 12 --one-in 8 --codec full8",
            "steercap collect corpus.jsonl --out out/answers --layers 12 --tokens generated --max-tokens 64",
            "steercap collect corpus.jsonl --out out/attention --layers 10:20 --attention 8",
            "steercap collect corpus.jsonl --out s3://bucket/rows --layers 12 --ray 8 --ray-gpus 1 --ray-address auto",
            "steercap inspect out/corpus --verify",
        ],
    )
    async def collect(
        corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Corpus: a file, a folder or a glob pattern.")],
        how: CorpusOptions,
        chosen: SampleOptions,
        answers: ContinuationOptions,
        steer: SteerOptions,
        stored: RowOptions,
        spread: RayOptions,
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[
            str,
            typer.Option(metavar="PATH", help="Folder for the data set, or a URL; credentials are the environment's."),
        ],
        layers: Annotated[str, typer.Option(help="Layers: all, 8, 8,16,-1 or 4:20:2.")] = "all",
        sites: Annotated[
            str, typer.Option(help="Sites: resid_pre, resid_post, attn_out, mlp_out, ..., separated by commas.")
        ] = "resid_post",
        shard_mib: Annotated[int, typer.Option(min=1, help="Rows per shard, in MiB.")] = 256,
        documents_per_shard: Annotated[
            int | None, typer.Option(min=1, help="Documents per shard (default: as many as fill --shard-mib).")
        ] = None,
        statistics_every: Annotated[
            int | None,
            typer.Option(min=0, help="Compute statistics from one row in N (default 8 per point); 0 for none."),
        ] = None,
        concurrency: Annotated[
            int | None, typer.Option(min=1, help="Maximum concurrent windows; 1 gives bit-identical results.")
        ] = None,
        verify: Annotated[
            bool, typer.Option("--verify", help="Check existing shards by SHA-256, and rewrite damaged ones.")
        ] = False,
    ) -> None:
        """Save the activations of a corpus as a data set: shards of safetensors with a Parquet index, which
        steercap.lab.datasets and other tools open. Interrupted, even killed, the same call resumes; every document is
        in it once. Documents come from JSON lines, Parquet, text, or folders of these and of Hugging Face data sets. A
        data set at a URL is verified in Python: steercap.lab.datasets.verify("s3://bucket/rows").
        """
        from steercap.architectures.sites import placed
        from steercap.core.spec import CaptureSpec
        from steercap.lab.datasets.collecting import ByProbe
        from steercap.lab.datasets.collecting import collect as collect_corpus
        from steercap.lab.datasets.collecting.reading import CollectArguments, check_room, check_sample

        model.require_there()
        if "://" not in out:
            folder_ready(Path(out))
        source, sample, spec = how.source(corpus), chosen.sample(stored.attention), steer.spec()
        params = answers.params()
        wanted = CaptureSpec(
            layers=layers_of(layers),
            sites=names_of(sites),
            attention=stored.attention,
            **stored.coding(names_of(sites)),
        )
        armed = tuple(dict.fromkeys((*wanted.sites, *sites_of(spec))))
        planned = preflight(model, sites=armed, **stored.settings())
        planned.check_capture(wanted)
        planned.check_steering(spec)
        if planned.model.layers:
            check_sample(sample, placed(wanted.points(planned.model.layers), planned.model.layers))
        if isinstance(sample, ByProbe) and sample.probe.site in HIDDEN_WIDTH_SITES:
            planned.check_width(sample.probe.width, "--probe")
        arguments: dict[str, Any] = {
            "capture": wanted,
            "tokens": sample,
            "context": how.context,
            "long": how.long,
            "bos": how.bos,
            "sampling_params": params,
            "seed": answers.seed or 0,
            "steering": spec,
            "shard_bytes": shard_mib << 20,
            "documents_per_shard": documents_per_shard,
            "statistics_every": statistics_every,
            "concurrency": concurrency,
            "verify": verify,
        }
        CollectArguments(**arguments)  # what collect() would refuse is refused before an engine starts
        if how.context is not None and (room := model.room()):
            check_room(how.context, max(1, room - (answers.max_tokens or 1)))
        actors = spread.actors()
        if actors is not None and model.url is not None:
            raise typer.BadParameter("actors start engines of their own; leave --ray out", param_hint="--url")
        opening: Any = reached if actors is None else not_opened
        async with opening(model, terminal, sites=armed, **stored.settings()) as open_model:
            with resumable(terminal) as tell:
                found = await collect_corpus(open_model, source, out, **arguments, progress=tell, ray=actors)
            terminal.show(found, facts(found.folder, told(found)))
