"""The class `SAE`: a sparse autoencoder or transcoder that is checked when it is loaded from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float

from steercap.core.spec import Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import flag_of, index_of, number_of, shown
from steercap.errors import InvalidFile, InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.kernels.codecs.topk import rows_at_once, strongest_features
from steercap.saes.encoder import Encoder, Features, floats_of
from steercap.saes.finding import find, read_found
from steercap.steering.edits.add import Add, SAEFeature


@dataclass(frozen=True, eq=False, repr=False)
class SAE:
    """Sparse autoencoder or transcoder: features, each with a direction, whose sum reconstructs the rows of a point.

    Made by `load`. With `CaptureSpec(sae=)` workers encode rows by it. All tensors are float32; never write to them.

    Attributes:
        encoder: the encoder half; see `steercap.saes.encoder`.
        decoder: vector that each feature adds to the reconstruction, float32 [d_sae, d_out].
        decoder_bias: bias of the reconstruction, float32 [d_out].
        input: point whose rows the SAE reads.
        output: point whose rows the SAE reconstructs; equal to `input` except for a transcoder.
        architecture: "standard", "topk", "jumprelu", "gated", or a kind of transcoder.
        skip: linear map from input rows that a skip transcoder adds to its output, float32 [d_out, d_in]; else None.
        name, model: labels of the SAE and its model, "" if the file has none.
    """

    encoder: Encoder
    decoder: Float[torch.Tensor, "d_sae d_out"]
    decoder_bias: Float[torch.Tensor, " d_out"]
    input: Point
    output: Point
    architecture: str
    skip: Float[torch.Tensor, "d_out d_in"] | None = None
    name: str = ""
    model: str = ""

    @staticmethod
    def load(
        source: str | os.PathLike[str],
        folder: str = "",
        *,
        revision: str | None = None,
        input: Point | tuple[int, str] | None = None,  # noqa: A002 -- the field's word
        output: Point | tuple[int, str] | None = None,
        activation_scale: float | None = None,
        centred: bool | None = None,
    ) -> SAE:
        """Load an SAE from a folder or the hub, in SAELens's format or another one listed in docs/saes.md.

        SAELens's files are `cfg.json` and `sae_weights.safetensors`. No code in a file is run. Names and shapes are
        checked before tensors are read, and numbers must be finite.

        Args:
            source: a folder, or the name of a repository, which huggingface_hub reads from the hub or its cache.
            folder: subfolder of the source; or one weights file, for formats with a file for each layer.
            revision: revision of the repository; None for the default branch.
            input, output: points as (layer, site), if the file names no known point, or to override it; None for the
                file's.
            activation_scale: factor by which rows are multiplied first, SAELens's norm_scaling_factor, for files with
                `normalize_activations` "expected_average_only_in" that lack it.
            centred: True to subtract each row's mean first; None to follow the file, or SAELens's data on the
                repository. It is for SAEs trained on models with layer norm that TransformerLens loaded with
                `center_writing_weights`, its default, so that their residual stream has mean zero.

        Raises:
            InvalidFile: there are no such files, or they are damaged; the architecture or normalisation is unknown; no
                point is known; or it is not known whether rows of a model with layer norm were centred.
            InvalidSpec: `input` or `output` is not a point, they differ though this is no transcoder, or `centred` is
                neither True nor False.
            MissingExtra: `source` is no folder, and huggingface_hub is not installed.
        """
        if centred is not None and flag_of(centred) is None:
            raise InvalidSpec(f"centred={shown(centred)}; give True, False, or None for what the file says")
        found = find(source, folder, revision)
        settings, parts = read_found(found, os.fspath(source), activation_scale, centred)
        reads = settings.input if input is None else point_of("input", input)
        writes = (settings.output if settings.transcodes else reads) if output is None else point_of("output", output)
        for point, name, hook in zip((reads, writes), ("input", "output"), settings.hooks, strict=True):
            if point is None:
                raise InvalidFile(
                    f"{found.weights}: it is for {shown(hook)}, which steercap cannot match to a point; if a point has "
                    f"the same rows, name it: SAE.load(..., {name}=(layer, site))"
                )
        assert reads is not None
        assert writes is not None
        if writes != reads and not settings.transcodes:
            raise InvalidSpec(f"{found.weights} is not a transcoder: it reads {reads}, so it cannot write {writes}")
        return SAE(
            parts.encoder,
            parts.decoder,
            parts.decoder_bias,
            reads,
            writes,
            settings.architecture,
            parts.skip,
            settings.name,
            settings.model,
        )

    @property
    def d_in(self) -> int:
        """Number of elements of an input row."""
        return self.encoder.d_in

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.encoder.d_sae

    @property
    def d_out(self) -> int:
        """Number of elements of a reconstructed row."""
        return self.decoder.shape[1]

    @property
    def transcodes(self) -> bool:
        """True for a transcoder, which reconstructs other rows than it reads."""
        return "transcoder" in self.architecture

    def encode(self, rows: torch.Tensor) -> Float[torch.Tensor, "rows d_sae"]:
        """Return the activations of all features in each row: float32 [rows, d_sae].

        Args:
            rows: rows at `input`, [rows, *shape of the point], any floating dtype.

        Raises:
            InvalidSpec: rows have another width.
        """
        with torch.no_grad():
            return self.encoder.activations(self._flat(rows))

    def strongest(self, rows: torch.Tensor, k: int = 32) -> Features:
        """Return the `k` most active features of each row, equal to those captured with `CaptureSpec(sae=, sae_k=)`.

        Raises:
            InvalidSpec: rows have another width, or `k` exceeds the number of features.
        """
        from steercap.core.schema import Coding, PointSchema
        from steercap.kernels.codecs.coded import FEATURES, CodedRows
        from steercap.kernels.codecs.topk import STRONGEST

        if index_of(k) is None or not 1 <= k <= self.d_sae:
            raise InvalidSpec(f"k={shown(k)}; this SAE has {self.d_sae} features")
        flat, coding = self._flat(rows), Coding(FEATURES, k)
        schema = PointSchema((self.d_sae,), "float32")
        with torch.no_grad():
            blocks = flat.split(rows_at_once(self.encoder, self.d_in))
            stored = torch.cat([strongest_features(block, self.encoder, k) for block in blocks])
        return Features.of(CodedRows(coding, schema, STRONGEST.parts(stored, schema, coding)), self.input)

    def decode(self, activations: torch.Tensor, rows: torch.Tensor | None = None) -> Float[torch.Tensor, "rows d_out"]:
        """Return the rows that feature activations reconstruct: float32 [rows, d_out].

        Args:
            activations: [rows, d_sae], any floating dtype, such as `encode` or `Features.dense` returns.
            rows: the rows that were encoded, one per row of `activations`; needed if the SAE normalises or centres
                rows, which the reconstruction undoes, and for a skip transcoder.

        Raises:
            InvalidSpec: activations have another shape, or `rows` is needed and missing, or has another shape.
        """
        with torch.no_grad(), exact_products():
            codes = floats_of(activations, "activations", self.d_sae, "encode() and Features.dense() return such")
            found = codes.float() @ self.decoder + self.decoder_bias
            adds_means = self.encoder.normalisation == "layer_norm" or (self.encoder.centred and not self.transcodes)
            if self.encoder.normalisation == "none" and self.skip is None and not adds_means:
                return found
            if rows is None:
                raise InvalidSpec("the reconstruction also needs the rows that were encoded; give rows=")
            flat = self._flat(rows).float()
            if len(flat) != len(found):
                raise InvalidSpec(f"{len(found)} activations and {len(flat)} rows; give each activation its own row")
            means = flat.mean(dim=1, keepdim=True)
            if self.skip is not None:
                return found + (flat - means if self.encoder.centred else flat) @ self.skip.T
            found = found * self.encoder.scales(flat)[:, None]
            return found + means if adds_means else found

    # Steering

    def add_feature(
        self, feature: int, amount: float, *, tokens: Tokens | TokenSelection = "all", relative: bool = False
    ) -> Add:
        """Return an edit that adds `amount` to a feature's activation, at `output`.

        The edit adds the feature's decoder row times `amount`; for an SAE with "constant_norm_rescale", also times the
        edited row's norm over √d_in, as `decode` does.

        Args:
            feature: index of the feature.
            amount: amount in units of the feature's activation; with `relative`, as a fraction of each row's norm.
            tokens, relative: see `Add`.

        Raises:
            InvalidSpec: there is no such feature; or, without `relative`, the reconstruction's scale does not follow
                from the row's norm at `output`: with "layer_norm", or with "constant_norm_rescale" of centred rows or a
                transcoder.
            InvalidVector: the feature's decoder row is zero, with `relative` or "constant_norm_rescale".
        """
        layer, site = self.output
        row, scale = self.decoder[self._feature(feature)], amount
        if flag_of(relative) is False and self.encoder.normalisation != "none":
            if self.encoder.normalisation != "constant_norm_rescale" or self.encoder.centred or self.transcodes:
                raise InvalidSpec(
                    "add_feature: this SAE scales what a feature writes by a spread of each row, which no edit of a "
                    "row can follow; give relative=True, and amount= as a fraction of each row's norm"
                )
            number, relative = number_of(amount), True
            scale = amount if number is None else number * float(row.double().norm()) / self.d_in**0.5
        return Add(row, scale=scale, relative=relative, layer=layer, site=site, tokens=tokens, model=self.model)

    def set_feature(self, feature: int, value: float, *, tokens: Tokens | TokenSelection = "all") -> SAEFeature:
        """Return an edit that sets a feature's activation and keeps the part of rows that the SAE does not explain.

        Args:
            feature: index of the feature.
            value: the feature's activation after the edit; 0 switches it off.
            tokens: see `SAEFeature`.

        Raises:
            InvalidSpec: there is no such feature; or its activation does not follow from one projection of the edited
                row: for a transcoder, a topk SAE, or an SAE that normalises or centres rows.
            InvalidVector: the feature's encoder or decoder vector is zero.
        """
        index, encoder = self._feature(feature), self.encoder
        reasons = {
            "a transcoder reads one point and writes another": self.transcodes,
            "whether a feature of a topk SAE is active depends on all other features": encoder.k,
            "it normalises rows before it reads them": encoder.normalisation != "none" or encoder.centred,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise InvalidSpec(f"set_feature: {reason}, which no edit of a row can follow; use add_feature")
        return SAEFeature(
            encoder.weight[:, index],
            self.decoder[index],
            value=value,
            bias=float(encoder.bias[index]),
            decoder_bias=encoder.shift,
            threshold=0.0 if encoder.threshold is None else float(encoder.threshold[index]),
            layer=self.input.layer,
            site=self.input.site,
            tokens=tokens,
            model=self.model,
        )

    def __repr__(self) -> str:
        to = f" to {self.output}" if self.transcodes else ""
        known = f"{self.name}: " if self.name else ""
        read = "" if self.encoder.normalisation == "none" else f", rows by {self.encoder.normalisation}"
        read += ", rows centred" if self.encoder.centred else ""
        return f"SAE({known}{self.architecture}, {self.d_sae:,} features of {self.input}{to}, {self.d_in} wide{read})"

    def _feature(self, feature: int) -> int:
        index = index_of(feature)
        if index is None or not 0 <= index < self.d_sae:
            raise InvalidSpec(f"feature {shown(feature)}; this SAE has features 0 to {self.d_sae - 1}")
        return index

    def _flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows flattened to [rows, d_in]; InvalidSpec if they have another width, or no floating dtype."""
        hint = "one row as row[None], batches of rows as .flatten(0, 1)"
        return floats_of(rows, "rows", self.d_in, hint)


def point_of(name: str, given: Any) -> Point:
    """Check a point that the user gave as (layer, site), and return it.

    Raises:
        InvalidSpec: it is no such pair; the message begins with `name`, that of the argument.
    """
    layer, site = given if isinstance(given, tuple) and len(given) == 2 else (None, None)
    index = index_of(layer)
    if index is None or index < 0 or not isinstance(site, str):
        raise InvalidSpec(f"{name}={shown(given)}; give a layer from 0 up and a site: (12, 'resid_post')")
    return Point(index, site)
