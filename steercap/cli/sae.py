"""`steercap sae train`: training of a small SAE on a data set of activations, or on a corpus that a model reads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from steercap.cli.command import command, group_of
from steercap.cli.destinations import Force, folder_ready, may_replace
from steercap.cli.engines import ReachOptions
from steercap.cli.parsing import refuse
from steercap.cli.preflight import preflight, reached
from steercap.cli.tables import facts
from steercap.cli.terminal import Terminal
from steercap.concurrency.heartbeat import watching
from steercap.core.protocols import Progress, ProgressCallback
from steercap.core.spec import CaptureSpec
from steercap.errors import InvalidRequest, InvalidSpec

if TYPE_CHECKING:
    import torch

    from steercap.lab.datasets import ActivationDataset
    from steercap.lab.datasets.rows import Normalisation
    from steercap.lab.training import SAETraining
    from steercap.saes.sae import SAE

#: Maximum number of rows from which the normalisation is computed, and on which an SAE is scored.
SAMPLED_ROWS: Final = 1 << 14
#: Share of a corpus's training steps, the last, whose mean explained variance is the score.
LAST: Final = 0.1
#: Default share of a data set's documents, the last, that is held out.
HELD_OUT: Final = 0.1


@dataclass(frozen=True)
class SAEOptions:
    """Options of an SAE and its training."""

    features: Annotated[int | None, typer.Option(min=1, help="Number of features (default: 8 × the width).")] = None
    k: Annotated[int, typer.Option("--k", min=1, help="Maximum active features of a row.")] = 32
    skip: Annotated[int, typer.Option(min=0, help="Tokens left out at the start of each window.")] = 1
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over a data set (default: 1); a corpus is read once.")
    ] = None
    batch_size: Annotated[int, typer.Option(min=2, help="Batch size: rows of each step.")] = 256
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.002
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.5, help=f"Fraction of a data set's documents held out for the score (default: {HELD_OUT})."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first directions and of the order of rows.")] = 0
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu"

    def how(self, width: int) -> dict[str, Any]:
        """Return the arguments of `SAETraining` for rows of `width` elements."""
        features = 8 * width if self.features is None else self.features
        return {"features": features, "k": self.k, "lr": self.lr, "seed": self.seed, "device": self.device}


def register(app: typer.Typer) -> None:
    """Add the group `sae` with the command `train` to `app`."""
    group = group_of("Sparse autoencoders (SAEs).")
    app.add_typer(group, name="sae")

    @command(
        group,
        "train",
        examples=[
            "steercap sae train out/rows --out out/sae --epochs 5",
            "steercap sae train out/rows --layer 15 --features 4096 --k 32 --out out/sae",
            "steercap sae train corpus.jsonl --layer 15 --out out/sae",
        ],
    )
    async def train(
        rows: Annotated[
            str,
            typer.Argument(
                metavar="ROWS",
                help="Data set that `steercap collect` wrote, or its URL; or a corpus, such as collect reads.",
            ),
        ],
        how: SAEOptions,
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the SAE, in SAELens's format.")],
        layer: Annotated[int | None, typer.Option(min=0, help="Layer of the rows (default: the data set's).")] = None,
        site: Annotated[str | None, typer.Option(help="Site of the rows (default: resid_post).")] = None,
        name: Annotated[str | None, typer.Option(help="Name of the SAE (default: the folder's name).")] = None,
        force: Force = False,
    ) -> None:
        """Train a small top-k SAE on a data set of activations, or on a corpus that a model reads, in plain torch. The
        SAE reads the model's own rows: SAE.load, captures, steering and the explorer take it. A data set may be read
        several times, and is scored on documents held out; a corpus is read once, without a disk. Train dictionaries of
        many thousand features with SAELens or sparsify; steercap reads their files.
        """
        from steercap.lab.datasets.definition import FILE
        from steercap.lab.training import save_sae

        folder_ready(out)
        may_replace(out, terminal, force=force, pattern="cfg.json")
        with terminal.progress() as show:
            stopped = threading.Event()

            def tell(at: Progress) -> None:
                if stopped.is_set():
                    raise KeyboardInterrupt  # ends the thread
                show(at)

            held = None
            if "://" in rows or (Path(rows) / FILE).exists():
                flags = dict.fromkeys(model.flags(), True)
                refuse("a data set has its rows already", {**flags, "--url": model.url, "--api-key": model.api_key})
                try:
                    training, report, known, held = await asyncio.to_thread(
                        train_on_dataset, rows, layer, site, how, tell
                    )
                except asyncio.CancelledError:
                    stopped.set()
                    raise
            else:
                given = {"--epochs": how.epochs, "--held-out": how.held_out}
                refuse("a corpus is read once, and its last batches give the score", given)
                if layer is None:
                    raise typer.BadParameter("a corpus needs the layer to read", param_hint="--layer")
                training, report, known = await train_on_corpus(
                    rows, (layer, site or "resid_post"), how, model, terminal, tell
                )
        sae = training.sae(name=out.name if name is None else name, model=known)
        save_sae(sae, out)
        if held is not None:
            report |= score_on(held, sae, out)
        document = {"sae": str(out), "point": str(training.point), "features": sae.d_sae, "k": how.k, **report}
        shares = {key: f"{document[key]:.1%}" for key in ("explained", "used") if key in document}
        terminal.show(document, facts("", document | shares))


def train_on_dataset(
    folder: str, layer: int | None, site: str | None, how: SAEOptions, tell: ProgressCallback
) -> tuple[SAETraining, dict[str, Any], str, ActivationDataset]:
    """Train on all but the last documents of a data set; at least one of several is held out, unless `how` says 0.

    Returns:
        The training, the report on it, the model's name, and the rows held out.

    Raises:
        InvalidRequest: `layer` and `site` leave several points, or there are too few rows.
        The errors of `ActivationDataset` and `train_sae`.
    """
    from steercap.lab.datasets import ActivationDataset
    from steercap.lab.training import train_sae

    chosen: dict[str, Any] = {
        "layers": "all" if layer is None else [layer],
        "sites": site,
        "positions": slice(how.skip, None),
    }
    there = ActivationDataset(folder, **chosen)
    if len(there.points) != 1:
        raise InvalidRequest(f"{folder} has rows of {', '.join(there.points)}; name one with --layer and --site")
    totals = there.folder.totals()
    documents = 0 if totals is None else totals.documents
    share = HELD_OUT if how.held_out is None else how.held_out
    first = documents - (max(round(share * documents), 1) if share and documents > 1 else 0)
    data: Any = ActivationDataset(folder, **chosen, keep=lambda index: index.document < first)  # of one point: tensors
    if len(data) < 2 * how.batch_size:
        raise InvalidRequest(
            f"{folder} has {len(data):,} rows to train on, fewer than two steps of {how.batch_size:,}; collect more, "
            "or give a smaller --batch-size"
        )
    (point,) = (one.point for one in data.folder.definition.points if str(one.point) == data.points[0])
    normalisation = _normalisation(_some(data))
    batches = data.batches(how.batch_size, seed=how.seed, epochs=how.epochs or 1, drop_last=True)
    training = train_sae(
        (normalisation(rows) for rows in batches),
        tuple(point),
        rows=len(batches) * how.batch_size,
        normalisation=normalisation,
        progress=tell,
        **how.how(data.width),
    )
    held = ActivationDataset(folder, **chosen, keep=lambda index: index.document >= first)
    return training, {"rows": training.seen}, data.folder.definition.model["name"], held


def score_on(held: ActivationDataset, sae: SAE, out: Path) -> dict[str, Any]:
    """Return the scores of an SAE on held-out rows, by name; `out`, where the SAE was written, is for the error.

    Raises:
        InvalidSpec: the rows have no variance, or it is not finite.
    """
    from steercap.lab.training import score_sae

    if len(held) < 2:
        return {"scored_on": f"nothing: {len(held)} rows are held out, of two at least"}
    try:
        score = score_sae(sae, _some(held))
    except InvalidSpec as error:
        raise InvalidSpec(f"{out} is written, and cannot be scored: {error}") from error
    report = {"explained": score.explained, "active": round(score.active, 2), "used": score.used}
    return {**report, "scored_on": f"{score.rows:,} rows of documents held out"}


async def train_on_corpus(
    corpus: str,
    point: tuple[int, str],
    how: SAEOptions,
    model: ReachOptions,
    terminal: Terminal,
    tell: ProgressCallback,
) -> tuple[SAETraining, dict[str, Any], str]:
    """Train once over a corpus that a model reads; `tell` is also told of the tokens read before the first step.

    Returns:
        The training, the report on it, and the model's name.

    Raises:
        InvalidRequest: the corpus has too few tokens.
        The errors of `reached`, `activations` and `SAETraining`.
    """
    from steercap.lab.datasets.collecting import activations, open_source
    from steercap.lab.training import SAETraining

    source = open_source(corpus)
    spec = CaptureSpec(layers=[point[0]], sites=point[1], tokens=slice(how.skip, None))
    preflight(model, sites=(point[1],)).check_capture(spec)
    training = None

    reading: dict[str, Any] = {
        "batch_size": how.batch_size,
        "buffer": max(SAMPLED_ROWS, how.batch_size),
        "seed": how.seed,
    }
    async with (
        reached(model, terminal, sites=(point[1],)) as open_model,
        activations(open_model, source, capture=spec, normalise="standard", drop_last=True, **reading) as batches,
        watching(
            lambda: "" if training else "tokens of the corpus",
            lambda stage, _: tell(Progress(stage, batches.tokens, None)),
        ),
    ):
        rows: Any  # of one point: a tensor
        async for rows in batches:
            if training is None:
                (normalisation,) = batches.normalisations.values()
                training = SAETraining(
                    point, rows.shape[1], normalisation=normalisation, progress=tell, **how.how(rows.shape[1])
                )
            training.step(rows)
        if training is None:
            raise InvalidRequest(
                f"{corpus} has {batches.tokens:,} tokens, fewer than a step of {how.batch_size:,}; give more texts, or "
                "a smaller --batch-size"
            )
        last = training.curve[-max(round(LAST * len(training.curve)), 1) :]
        report = {
            "rows": training.seen,
            "explained": sum(share for _, share in last) / len(last),
            "scored_on": f"the last {len(last):,} batches, each before its step",
        }
        return training, report, open_model.model


def _some(data: Any) -> torch.Tensor:
    """Return at most `SAMPLED_ROWS` rows of one point's data set, evenly spaced: [rows, width]."""
    rows: torch.Tensor = data[np.unique(np.linspace(0, len(data) - 1, SAMPLED_ROWS, dtype=np.int64))]
    return rows


def _normalisation(rows: torch.Tensor) -> Normalisation:
    """Return the normalisation by the rows' own mean and deviation; stored statistics count skipped tokens too."""
    import torch

    from steercap.lab.datasets.rows import Normalisation

    spread = rows.std(dim=0, correction=0)
    return Normalisation(rows.mean(dim=0), torch.where(spread > 0, 1 / spread, 1.0))
