"""Training of small SAEs on rows of activations, in plain torch: a top-k SAE and Adam.

Source: Gao et al. 2024, Scaling and evaluating sparse autoencoders (arXiv:2406.04093), without its loss for features
that died, and without its kernels: for dictionaries of some thousand features on one device. Larger ones are for
SAELens or sparsify; steercap reads their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save as to_bytes

from steercap.concurrency.heartbeat import rewritten_line
from steercap.core.names import TRANSFORMER_LENS
from steercap.core.protocols import Progress, ProgressCallback
from steercap.core.spec import Point
from steercap.core.values import count_of, number_of, shown
from steercap.errors import InvalidSpec, TrainingDiverged
from steercap.files.base import write_whole
from steercap.lab.datasets.rows import Labelled, Normalisation
from steercap.saes.encoder import Encoder
from steercap.saes.sae import SAE, point_of

#: Share of the rows after which the learning rate falls linearly, to `LEAST_RATE` of its first value at the end.
FALLS_FROM: Final = 0.5
LEAST_RATE: Final = 0.02
#: Maximum number of rows that `score_sae` encodes at once.
SCORED_ROWS: Final = 4096


class SAEScore(NamedTuple):
    """Quality of an SAE on rows that it was not trained on.

    Args:
        explained: share of the rows' variance that its reconstructions explain; negative if they are worse than the
            mean row.
        active: mean number of active features of a row (L0).
        used: share of the features that are active in any row.
        rows: number of rows.
    """

    explained: float
    active: float
    used: float
    rows: int


class SAETraining:
    """Top-k SAE in training: `step` with batches of rows, then `sae`.

    Features begin as random directions, read and written alike. The loss is the mean squared error of the normalised
    rows.

    Args:
        point: point of the rows, as (layer, site).
        width: number of elements of a row.
        features: number of features.
        k: maximum number of active features of a row.
        lr: learning rate of Adam.
        rows: number of rows of the whole training, for the learning rate: constant in the first half, then falling
            linearly to 2 %; None for a constant rate.
        normalisation: normalisation applied to the batches, such as `data.normalisations["resid_post[15]"]`; it is
            folded into the SAE, which then reads the model's own rows. None if they were not normalised.
        seed: seed of the first directions.
        device: torch device to train on.
        progress: function called with a `Progress` whenever the work advances.

    Attributes:
        seen: number of rows so far.
        curve: for every step, the number of rows so far, and the share of variance explained before the step.

    Raises:
        InvalidSpec: an argument out of range, or a normalisation of another width.
    """

    def __init__(
        self,
        point: Point | tuple[int, str],
        width: int,
        *,
        features: int,
        k: int = 32,
        lr: float = 2e-3,
        rows: int | None = None,
        normalisation: Normalisation | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        progress: ProgressCallback | None = None,
    ) -> None:
        self._progress = progress
        self.point = point_of("SAETraining: point", point)
        given = {"width": width, "features": features, "k": k}
        self.width, features, self.k = (count_of(one, f"SAETraining: {name}") for name, one in given.items())
        if self.k > features:
            raise InvalidSpec(f"SAETraining: k={k} of {features} features; give at most as many")
        self.lr, self.rows = number_of(lr) or 0.0, None if rows is None else count_of(rows, "SAETraining: rows")
        if not 0 < self.lr < 1:
            raise InvalidSpec(f"SAETraining: lr={shown(lr)}; give a number between 0 and 1, such as 0.002")
        _check_normalisation(normalisation, self.width)
        self.normalisation, self.device = normalisation, torch.device(device)
        drawn = torch.randn(features, self.width, generator=torch.Generator().manual_seed(seed))
        decoder = torch.nn.functional.normalize(drawn, dim=1).to(self.device)
        zeros = torch.zeros(features, device=self.device), torch.zeros(self.width, device=self.device)
        self._parameters = tuple(one.requires_grad_() for one in (decoder.T.clone(), decoder, *zeros))
        self._optimiser = torch.optim.Adam(self._parameters, lr=self.lr)
        self.seen: int = 0
        self.curve: list[tuple[int, float]] = []

    def __repr__(self) -> str:
        last = f", explains {self.curve[-1][1]:.1%} of the last batch" if self.curve else ""
        return f"SAETraining({self.point}, {len(self._parameters[1]):,} features, k={self.k}, {self.seen:,} rows{last})"

    @torch.enable_grad()
    def step(self, batch: torch.Tensor | Labelled) -> float:
        """Take one step of Adam; return the share of the batch's variance that the SAE explained before the step.

        Args:
            batch: normalised rows [rows, width], of any floating-point dtype, two at least.

        Raises:
            InvalidSpec: the batch is not such rows, has another width, NaN or infinity, or rows that are all equal.
            TrainingDiverged: the loss is not finite; the parameters are those before this step.
        """
        rows = self._checked(batch)
        share = 0.0 if self.rows is None else self.seen / self.rows
        falls = max(1 - share, 0.0) / (1 - FALLS_FROM) * (1 - LEAST_RATE) + LEAST_RATE
        self._optimiser.param_groups[0]["lr"] = self.lr * min(1.0, falls)
        weight, decoder, bias, shift = self._parameters
        before = ((rows - shift) @ weight + bias).relu()
        kept = before.topk(self.k, dim=1)
        codes = torch.zeros_like(before).scatter(1, kept.indices, kept.values)
        loss = (codes @ decoder + shift - rows).square().mean()
        if not bool(loss.isfinite()):
            raise TrainingDiverged(f"the loss of the SAE is {loss.item()} after {self.seen:,} rows; try a smaller lr=")
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        self.seen += len(rows)
        explained = 1 - float(loss.detach()) / float(rows.var(dim=0, correction=0).mean())
        self.curve.append((self.seen, explained))
        if self._progress is not None:
            details = {"loss": float(loss.detach()), "explained": explained}
            self._progress(Progress("training rows", self.seen, self.rows, details))
        return explained

    def sae(self, *, name: str = "", model: str = "", folded: bool = True) -> SAE:
        """Return a copy of the SAE in its present state, float32 on the CPU.

        Args:
            name, model: names of the SAE and of the model, stored with the SAE.
            folded: True for the model's own rows; False for rows normalised as the batches.
        """
        weight, decoder, bias, shift = (one.detach().float().cpu().clone() for one in self._parameters)
        if self.normalisation is not None and folded:
            mean, scale = (one.float().cpu() for one in (self.normalisation.mean, self.normalisation.scale))
            scale = scale.expand(self.width)
            weight, decoder, shift = weight * scale[:, None], decoder / scale, mean + shift / scale
        encoder = Encoder(weight.contiguous(), bias, shift=shift, k=self.k)
        return SAE(encoder, decoder.contiguous(), shift, self.point, self.point, "topk", name=name, model=model)

    def _checked(self, batch: Any) -> torch.Tensor:
        given = batch.rows if isinstance(batch, Labelled) else batch
        if not isinstance(given, torch.Tensor) or given.ndim != 2 or given.shape[1] != self.width or len(given) < 2:
            form = list(given.shape) if isinstance(given, torch.Tensor) else shown(given)
            raise InvalidSpec(f"SAETraining: a batch {form}; give rows [rows, {self.width}], two at least")
        rows = given.to(self.device, torch.float32)
        if not bool(rows.isfinite().all()):
            raise InvalidSpec(
                f"SAETraining: a batch with NaN or infinity after {self.seen:,} rows; leave such rows out"
            )
        if bool((rows == rows[0]).all()):
            raise InvalidSpec(f"SAETraining: a batch of {len(rows)} equal rows after {self.seen:,}; shuffle the rows")
        return rows


def _check_normalisation(given: Normalisation | None, width: int) -> None:
    if given is None:
        return
    if len(given.mean) != width or given.scale.numel() not in {1, width}:
        raise InvalidSpec(f"SAETraining: a normalisation of {len(given.mean)} elements for rows of {width}")
    if not bool(given.mean.isfinite().all() and given.scale.isfinite().all() and (given.scale > 0).all()):
        raise InvalidSpec("SAETraining: the normalisation cannot be undone: a scale is not above 0, or not finite")


def train_sae(batches: Iterable[Any], point: Point | tuple[int, str], **how: Any) -> SAETraining:
    """Train a top-k SAE by passing once over an iterable of batches.

    Args:
        batches: batches of rows [rows, width], such as `ActivationDataset(...).batches(512, epochs=3)`, a DataLoader,
            or a stream of `steercap.sync`. A batch of one row, as an epoch may end with, is left out.
        point: point of the rows, as (layer, site).
        **how: arguments of `SAETraining`, `features` among them; the width is that of the first batch. Without
            `progress`, in a terminal and in a notebook one line on stderr says how far it is, as for
            `SteerModel.start`.

    Returns:
        The training: `sae()` returns the SAE, and `curve` has the explained variance by step.

    Raises:
        InvalidSpec: no batches, or as for `SAETraining` and its `step`.
        TrainingDiverged: the loss is not finite.
    """
    training = None
    with rewritten_line() as line:
        how = {"progress": lambda at: line(f"SAE: {at}"), **how}
        for batch in batches:
            rows = batch.rows if isinstance(batch, Labelled) else batch
            if isinstance(rows, torch.Tensor) and rows.shape[:1] == (1,):  # the rest of an epoch, without a spread
                continue
            if training is None:
                training = SAETraining(point, rows.shape[-1] if isinstance(rows, torch.Tensor) else 0, **how)
            training.step(batch)
    if training is None:
        raise InvalidSpec("train_sae: there are no batches of two rows or more; an iterator gives its batches once")
    return training


@torch.no_grad()
def score_sae(sae: SAE, rows: torch.Tensor) -> SAEScore:
    """Measure an SAE on rows that it was not trained on.

    Args:
        sae: an SAE that reconstructs the rows it reads, not a transcoder.
        rows: the model's own rows, not normalised, [rows, width], two at least.

    Raises:
        InvalidSpec: `sae` is no such SAE, or the rows have another shape, are all equal or not finite.
    """
    _check_sae("score_sae", sae)
    if sae.transcodes or not isinstance(rows, torch.Tensor) or rows.ndim != 2 or rows.shape[1] != sae.d_in:
        raise InvalidSpec(f"score_sae: {sae!r} on {shown(rows)}; give an SAE and the rows that it reads and writes")
    spread = float((rows.double() - rows.double().mean(0)).square().sum())
    if not 0 < spread < float("inf"):
        raise InvalidSpec(f"score_sae: the variance of {len(rows)} rows is {spread / max(len(rows), 1)}; give others")
    missed, active, used = 0.0, 0, torch.zeros(sae.d_sae, dtype=torch.bool)
    for part in rows.float().split(SCORED_ROWS):
        codes = sae.encode(part)
        missed += float((part - sae.decode(codes, part)).double().square().sum())
        active += int((codes > 0).sum())
        used |= (codes > 0).any(0)
    return SAEScore(1 - missed / spread, active / len(rows), float(used.float().mean()), len(rows))


def save_sae(sae: SAE, folder: str | Path) -> Path:
    """Write a top-k SAE in SAELens's format, for `SAE.load`: `sae_weights.safetensors`, and `cfg.json`, written last.

    Args:
        sae: an SAE from `SAETraining.sae`, or another top-k one.
        folder: folder to write to, created if needed; files of an earlier SAE in it are replaced.

    Raises:
        InvalidSpec: not an SAE, or one that is not top-k, has no point, normalises rows, or writes at another point.
        OSError: a file cannot be written.
    """
    _check_sae("save_sae", sae)
    encoder, point = sae.encoder, point_of("save_sae: sae.input", sae.input)
    if sae.output != point:
        raise InvalidSpec(f"save_sae: sae.output={shown(sae.output)}; give an SAE whose output is its input, {point}")
    if sae.architecture != "topk" or sae.transcodes or encoder.normalisation != "none" or encoder.centred:
        raise InvalidSpec(f"save_sae: {sae!r}; this writes top-k SAEs that read rows as they are")
    shift = torch.zeros(sae.d_in) if encoder.shift is None else encoder.shift
    if not torch.equal(shift, sae.decoder_bias) and encoder.shift is not None:
        raise InvalidSpec(
            "save_sae: the SAE subtracts from a row what it does not add again; SAELens has no form for it"
        )
    tensors = {"W_enc": encoder.weight, "b_enc": encoder.bias, "W_dec": sae.decoder, "b_dec": sae.decoder_bias}
    metadata = {
        "hook_name": _hook_of(point),
        "model_name": sae.model,
        "neuronpedia_id": sae.name or None,
        "model_from_pretrained_kwargs": {"center_writing_weights": False},  # rows are vLLM's, which centres none
    }
    said = {
        "architecture": "topk",
        "k": encoder.k,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "apply_b_dec_to_input": encoder.shift is not None,
        "normalize_activations": "none",
        "metadata": metadata,
    }
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    with write_whole(to / "cfg.json") as configuration:  # it gets its name after the weights have theirs
        configuration.write_text(json.dumps(said, indent=1))
        with write_whole(to / "sae_weights.safetensors") as weights:
            weights.write_bytes(to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()}))
            (to / "cfg.json").unlink(missing_ok=True)  # an earlier SAE's must not stand beside these weights
    return to


def _check_sae(name: str, given: Any) -> None:
    if not isinstance(given, SAE):
        raise InvalidSpec(f"{name}: sae={shown(given)}; give an SAE, such as that of SAETraining(...).sae()")


def _hook_of(point: Point) -> str:
    """Return TransformerLens's name of a point, such as "blocks.5.hook_resid_post", or steercap's if it has none."""
    hook = {site: name for name, site in TRANSFORMER_LENS.items()}.get(point.site)
    return str(point) if hook is None else f"blocks.{point.layer}.{hook}"
