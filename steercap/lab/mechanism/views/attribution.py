"""Direct logit attribution to the features of an SAE: contributions to a logit at each row.

A feature adds its activation times its decoder row to the residual stream, which the final norm and the unembedding
read. With the scale of the norm fixed at that of the whole row, the logit is a sum of products, one for each feature.
Effects of a feature through later layers are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float, Int

from steercap.core.prompts import texts_of
from steercap.core.spec import Point
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidRequest
from steercap.files.fingerprint import names_of, warn_of_other_model
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.views.lens import checkpoint_of, require_own, tokenizer_of, warn_of_other_checkpoint
from steercap.lab.mechanism.weights.unembedding import Unembedding
from steercap.saes.encoder import Features
from steercap.saes.sae import SAE

if TYPE_CHECKING:
    from steercap.core.protocols import FetchedRows
    from steercap.lab.mechanism.views.lens import Source

#: Sites of the residual stream itself, and sites of block outputs that are added to it.
RESIDUAL_SITES: Final = frozenset({"resid_pre", "resid_mid", "resid_post"})
ADDED: Final = frozenset({"attn_out", "mlp_out"})


@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution:
    """Contributions of SAE features to one logit at each row.

    `logits = contributions of all features + bias + rest + constants`, before any soft-capping; `others` is the sum
    over the features that are not among the `ids`.

    Args:
        positions: positions of the rows, int64 [rows].
        read: text of the token read at each row.
        token_ids: tokens whose logits are attributed, int64 [rows].
        tokens: texts of these tokens.
        ids: features with the greatest contributions by magnitude, int64 [rows, top]; -1 where fewer are active.
        activations, contributions: activations and contributions of these features, float32 [rows, top].
        others: sum of the contributions of all other known features, float32 [rows].
        bias: contribution of what the SAE writes without any feature, float32 [rows]: the decoder's bias and, where
            `SAE.decode` adds them, the row's mean and the skip.
        rest: contribution of everything else in the row: other layers, and the SAE's reconstruction error; with
            `features=`, which come without rows, also the row's mean and the skip; float32 [rows].
        constants: contribution of the biases of the final norm and the unembedding, float32 [rows].
        logits: the logits, float32 [rows].
        complete: True if all active features of a row are known: bool [rows]. Unknown features count in `rest`.
    """

    positions: Int[torch.Tensor, " rows"]
    read: tuple[str, ...]
    token_ids: Int[torch.Tensor, " rows"]
    tokens: tuple[str, ...]
    ids: Int[torch.Tensor, "rows top"]
    activations: Float[torch.Tensor, "rows top"]
    contributions: Float[torch.Tensor, "rows top"]
    others: Float[torch.Tensor, " rows"]
    bias: Float[torch.Tensor, " rows"]
    rest: Float[torch.Tensor, " rows"]
    constants: Float[torch.Tensor, " rows"]
    logits: Float[torch.Tensor, " rows"]
    complete: torch.Tensor

    def __len__(self) -> int:
        return len(self.read)

    def records(self) -> list[dict[str, Any]]:
        """Return a dictionary for each row and feature of `ids`: position, texts, logit, and the feature's values."""
        return [
            {
                "position": int(self.positions[row]),
                "read": self.read[row],
                "token": self.tokens[row],
                "logit": float(self.logits[row]),
                "feature": int(feature),
                "activation": float(self.activations[row, at]),
                "contribution": float(self.contributions[row, at]),
            }
            for row in range(len(self))
            for at, feature in enumerate(self.ids[row].tolist())
            if feature >= 0
        ]

    def __str__(self) -> str:
        """Format a line for each row: the logit, its largest contributions, and the remaining terms."""
        lines = []
        for row, (read, token) in enumerate(zip(self.read, self.tokens, strict=True)):
            pairs = zip(self.ids[row].tolist(), self.contributions[row].tolist(), strict=True)
            gave = "  ".join(f"{feature}: {value:+.2f}" for feature, value in pairs if feature >= 0)
            parts = f"others {self.others[row]:+.2f}, bias {self.bias[row]:+.2f}, rest {self.rest[row]:+.2f}"
            parts += f", constants {self.constants[row]:+.2f}"
            lines.append(f"{int(self.positions[row]):5} {read!r} → {token!r} {self.logits[row]:.2f} = {gave}  {parts}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"LogitAttribution({len(self)} rows, {self.ids.shape[1]} features each)"


def logit_attribution(
    handle: FetchedRows,
    model: Source,
    sae: SAE,
    *,
    token: int | str | None = None,
    features: Features | None = None,
    top: int = 8,
    unembedding: Unembedding | None = None,
) -> LogitAttribution:
    """Compute the direct contributions of an SAE's features to a logit at each row.

    It is computed on the client, from the weights of the checkpoint in float32, as by `logit_lens`.

    Args:
        handle: fetched handle with rows of "resid_post" of the model's last layer, and, without `features`, of
            `sae.input`.
        model: the open model of the handle, or the folder or name of its checkpoint.
        sae: SAE with the features.
        token: token whose logit is attributed: an id, or a text of one token; by default, the next token of each row.
        features: features of the same rows computed in a worker: `handle.features[point]` of a capture with `sae=`.
            That they are of `sae` is checked by the number of features, the point, if it is known (`Features.point`),
            and the encoder, if the capture is of an open model (`Features.digest`).
        top: number of features in the table for each row.
        unembedding: unembedding of the model, if it was read before; None to read it.

    Raises:
        InvalidRequest: the handle lacks the rows, `features` are of other rows or another SAE, the SAE's output is not
            added to the residual stream, or layers do more than add to it after the SAE, `token` is not a single token,
            or `top` is below 1; or, if the handle is of an open model, rows are from before their edits, or the request
            edits "final_norm".
        InvalidSpec: the rows have another width.
        UnsupportedModel, ModelNotLoaded, InvalidFile: as for `logit_lens`, or a norm that cannot be frozen.
        CaptureNotFetched: the handle was not fetched.
    """
    count_of(top, "logit_attribution: top", wrong=InvalidRequest)
    checkpoint, revision = checkpoint_of(model)
    unembedding = unembedding or Unembedding.load(checkpoint, revision=revision)
    warn_of_other_checkpoint(handle, checkpoint)
    warn_of_other_model("sae=", sae.model, names_of(checkpoint), tuned=True)
    end = Point(handle.num_layers - 1, "resid_post")
    last = _rows(handle, end).float()
    require_own(handle, end, "logit_attribution")
    factor = _factor(sae, unembedding, end)
    dense, complete, scales, base = _activations(handle, sae, features)
    tokenizer = tokenizer_of(model)
    targets = _targets(handle, token, tokenizer)
    read, constants = unembedding.directions(last, targets)
    if read.shape[1] != sae.d_out:
        raise InvalidRequest(
            f"logit_attribution: {sae} writes {sae.d_out} elements, and the stream has {read.shape[1]}"
        )
    scaled = read * (scales * factor)[:, None]
    with exact_products():
        gave, bias = dense * (scaled @ sae.decoder.T), (read * factor * base).sum(dim=1)
    order = gave.abs().topk(min(top, gave.shape[1]), dim=1).indices
    active = dense.gather(1, order)
    contributions = gave.gather(1, order)
    whole, logits = gave.sum(dim=1), (read * last).sum(dim=1) + constants
    known = [*handle.token_ids.tolist(), *targets.tolist()]
    texts = texts_of(tokenizer, known)
    return LogitAttribution(
        handle.positions,
        tuple(texts[: len(dense)]),
        targets,
        tuple(texts[len(dense) :]),
        order.where(active > 0, -1),
        active,
        contributions,
        whole - contributions.sum(dim=1),
        bias,
        logits - constants - whole - bias,
        constants,
        logits,
        complete,
    )


def _rows(handle: FetchedRows, point: Point) -> torch.Tensor:
    if handle.receipt.reduce or handle.directions or point not in handle.captures:
        raise InvalidRequest(
            f"logit_attribution: the handle has no rows of {point}; capture {point.site!r} at layer {point.layer} too"
        )
    rows: torch.Tensor = handle.captures.elements(point)
    return rows


def _factor(sae: SAE, unembedding: Unembedding, end: Point) -> float:
    """Return the factor by which an SAE's reconstruction counts in the rows of `end`, the last layer's resid_post."""
    added, factor = sae.output.site in ADDED, unembedding.blocks
    if sae.output == end:
        return 1.0
    if factor is not None and (added or sae.output.site in RESIDUAL_SITES):
        return factor if added else 1.0
    raise InvalidRequest(
        f"logit_attribution: {sae} writes at {sae.output}, whose output is not simply added to the residual stream"
        if factor is not None
        else f"logit_attribution: {sae} writes at {sae.output}, and layers of this model do more to the stream than "
        f"add to it; give an SAE of {end}"
    )


def _activations(
    handle: FetchedRows, sae: SAE, features: Features | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return activations, a mask of rows with all active features known, output scales, and output without features.

    The shapes are [rows, d_sae], [rows], [rows], and [rows, d_out] or [d_out].
    """
    count = len(handle.positions)
    if features is None:
        rows = _rows(handle, sae.input)
        require_own(handle, sae.input, "logit_attribution")
        dense = sae.encode(rows)
        base = sae.decode(torch.zeros_like(dense), rows)
        return dense, torch.ones(count, dtype=torch.bool), sae.encoder.scales(rows.flatten(1)), base
    if len(features) != count or features.width != sae.d_sae:
        raise InvalidRequest(
            f"logit_attribution: {features!r} for {count} rows and {sae}; give those of the same tokens and SAE"
        )
    if features.point not in {None, sae.input} or (features.digest and features.digest != sae.encoder.digest()):
        where = "" if features.point is None else f" of {features.point}"
        raise InvalidRequest(
            f"logit_attribution: {features!r}{where} are not of {sae}; give those that this SAE read at {sae.input}"
        )
    if sae.encoder.normalisation != "none":
        raise InvalidRequest(
            f"logit_attribution: {sae} normalises rows, so what a feature writes depends on the row; capture "
            f"{sae.input} and leave features= out"
        )
    return features.dense(), features.complete, torch.ones(count), sae.decoder_bias


def _targets(handle: FetchedRows, token: int | str | None, tokenizer: Any) -> torch.Tensor:
    """Return the id of the token whose logit is attributed at each row, `token` or the next: int64 [rows]."""
    if token is None:
        sequence = torch.tensor([*handle.prompt_token_ids, *handle.output_token_ids])
        following = handle.positions + 1
        if len(following) and int(following.max()) >= len(sequence):
            raise InvalidRequest("logit_attribution: no token follows the last row; give token=")
        return sequence[following]
    ids = tokenizer.encode(token, add_special_tokens=False) if isinstance(token, str) else [index_of(token)]
    if len(ids) != 1 or ids[0] is None:
        raise InvalidRequest(f"logit_attribution: token={shown(token)} is {len(ids)} tokens; give one, or its id")
    return torch.full((len(handle.positions),), ids[0], dtype=torch.int64)
