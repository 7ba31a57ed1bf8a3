"""Logit lens (the model's own final norm and unembedding, applied to rows on its workers), and tuned lenses.

For the last layer the results of the logit lens are the logits that the model samples from, before penalties,
temperature and the like: vLLM's `logprobs` and `prompt_logprobs`.

A tuned lens is a folder of `config.json` and `params.pt`, or `params.safetensors` with the same names: `<layer>.weight`
[hidden, hidden] and `<layer>.bias` [hidden], which may be missing under `bias: false` alone. Translator i takes
transformers' `hidden_states[i]` (our `resid_pre` of layer i, `resid_post` of the one before) to `h + W h + b`.
`params.pt` is read without unpickling objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file

from steercap.architectures.sites import placed
from steercap.captures.pooled import require_kind
from steercap.core.spec import Point
from steercap.core.values import count_of, index_of, parts_of, shown, truth_of
from steercap.errors import InvalidFile, InvalidRequest
from steercap.files.fingerprint import nearest_path, warn_of_other_model
from steercap.kernels.bits import exact_products

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

CONFIG: Final = "config.json"
PARAMS: Final = ("params.safetensors", "params.pt")
#: Index of the translator for rows of a site, relative to the layer's index.
_OFFSETS: Final = {"embed": 0, "resid_pre": 0, "resid_post": 1}


@dataclass(frozen=True, eq=False, repr=False)
class TunedLens:
    """Affine maps of the residual stream to estimates of the last layer's output, by the layer whose input they read.

    Args:
        translators: weight [width, width] and bias [width] of each map, by layer.
        model: name of the model that the lens was made for, as its file has it; "" if unknown.
        width: number of elements of a row.
    """

    translators: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    model: str = field(kw_only=True)
    width: int = field(kw_only=True)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TunedLens:
        """Read a tuned lens from a folder.

        Raises:
            InvalidFile: the files are missing or of another kind, or their tensors contradict the configuration.
        """
        path = Path(folder)
        try:
            config = json.loads((path / CONFIG).read_text())
            width, layers, kind = config["d_model"], config["num_hidden_layers"], config.get("lens_type", "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{error!r}{nearest_path(path)}"
            raise InvalidFile(f"{path / CONFIG} does not describe a tuned lens: {reason}") from error
        if kind not in {"", "linear_tuned_lens"} or not (isinstance(width, int) and isinstance(layers, int)):
            raise InvalidFile(
                f"{path / CONFIG}: lens_type={kind!r}, d_model={width!r} is not a linear tuned lens; give one with "
                "lens_type='linear_tuned_lens'"
            )
        file = next((path / name for name in PARAMS if (path / name).is_file()), None)
        if file is None:
            raise InvalidFile(f"{path} has neither {' nor '.join(PARAMS)}")
        tensors = _tensors(file)
        if config.get("bias", True) is False:
            tensors = {f"{layer}.bias": torch.zeros(width) for layer in range(layers)} | dict(tensors)
        found = {layer: _translator(file, tensors, layer, width) for layer in range(layers)}
        return cls(found, model=str(config.get("base_model_name_or_path") or ""), width=width)

    def translate(
        self, rows: Float[torch.Tensor, "rows hidden"], point: Point, names: Collection[str] = ()
    ) -> Float[torch.Tensor, "rows hidden"]:
        """Return estimates of the last layer's output for rows of the residual stream: float32 [rows, hidden].

        Args:
            rows: rows of the residual stream.
            point: point of the rows; rows from the end of the last layer are returned unchanged.
            names: names of the rows' model, to warn of a lens that was made for another; () if unknown.

        Raises:
            InvalidRequest: the rows have another width, or no translator is for their point.
        """
        if rows.shape[-1] != self.width:
            raise InvalidRequest(f"rows have width {rows.shape[-1]}, and this tuned lens takes {self.width}")
        if point.site not in _OFFSETS:
            raise InvalidRequest(f"a tuned lens takes rows of {', '.join(_OFFSETS)}, not of {point.site}")
        index = point.layer + _OFFSETS[point.site]
        if index == len(self.translators):
            return rows.float()
        if index not in self.translators:
            raise InvalidRequest(f"this tuned lens has translators for {len(self)} layers, and none for {point}")
        warn_of_other_model("translator=", self.model, names, tuned=True)
        weight, bias = self.translators[index]
        with exact_products():
            return rows.float() + rows.float() @ weight.T + bias

    def __len__(self) -> int:
        return len(self.translators)

    def __repr__(self) -> str:
        return f"TunedLens({len(self)} layers × {self.width}, for {self.model or 'an unnamed model'})"


def _tensors(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        safe = file.suffix == ".safetensors"
        found = load_file(file) if safe else torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, LookupError) as error:
        raise InvalidFile(f"{file} cannot be read: {error}") from error
    except Exception as error:  # what unpickling refuses has a type of its own, in a private module
        raise InvalidFile(f"{file} holds more than tensors: {error}") from error
    if not isinstance(found, Mapping):
        raise InvalidFile(f"{file} holds a {type(found).__name__}; expected a dict of tensors by name")
    return found


def _translator(
    file: Path, tensors: Mapping[str, torch.Tensor], layer: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = tensors.get(f"{layer}.weight"), tensors.get(f"{layer}.bias")
    for name, one, shape in (("weight", weight, (width, width)), ("bias", bias, (width,))):
        if not isinstance(one, torch.Tensor) or tuple(one.shape) != shape or not bool(one.float().isfinite().all()):
            held = list(one.shape) if isinstance(one, torch.Tensor) else "no tensor"
            raise InvalidFile(f"{file}: {layer}.{name} is {held}, and must be finite, {list(shape)}")
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    return weight.float(), bias.float()


#: Sites of the residual stream before the final norm.
LENS_SITES: Final = ("embed", "resid_pre", "resid_mid", "resid_post")
#: Site of the residual stream behind the final norm.
BEHIND: Final = "final_norm"
#: Maximum bytes of rows, or of logits, in one call to the workers, during which no other pass of the model runs.
_FRAME_BYTES: Final = 8 << 20
#: Default maximum bytes of the logits that a lens returns.
MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """Next-token predictions from some rows of the residual stream.

    Args:
        positions: positions of the rows in their sequence, int64 [rows]; a row predicts the token after its position.
        token_ids: the most probable next tokens, most probable first, int64 [rows, top].
        log_probs: log probabilities of these tokens, float32 [rows, top].
        chosen: log probabilities of the tokens requested by `ids`, float32 [rows, ids].
        logits: logits of all tokens, float32 [rows, vocabulary]; None unless requested by `full`.
    """

    positions: Int[torch.Tensor, " rows"]
    token_ids: Int[torch.Tensor, "rows top"]
    log_probs: Float[torch.Tensor, "rows top"]
    chosen: Float[torch.Tensor, "rows ids"]
    logits: Float[torch.Tensor, "rows vocabulary"] | None

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"Lens({len(self)} rows, top {self.token_ids.shape[1]})"


async def unembed(
    engine: Engine,
    rows: torch.Tensor,
    *,
    normed: bool = False,
    top: int = 10,
    ids: Sequence[int] = (),
    full: bool = False,
    max_bytes: int = MOST_BYTES,
) -> Lens:
    """Return next-token predictions from rows of the residual stream; `positions` are the indices of the rows.

    Args:
        engine: the engine of the model.
        rows: [rows, hidden], of any floating-point dtype; rounded to the model's dtype.
        normed: True if the rows are from behind the final norm.
        top: number of most probable tokens to return.
        ids: token ids whose log probabilities to return.
        full: True to return the logits of all tokens.
        max_bytes: maximum size of these logits in bytes.

    Raises:
        InvalidRequest: an argument has another type or is out of range, rows are not finite in the model's dtype,
            normed rows are given for a model without the site "final_norm", or the logits exceed `max_bytes`.
        EngineFailure: the engine has died or was closed.
    """
    require_kind(engine, "unembed", pools=False)
    count, chosen = _checked_request(engine, top, ids)
    normed, full = (truth_of(given, name, wrong=InvalidRequest) for name, given in (("normed", normed), ("full", full)))
    if normed and (reason := engine.refused.get("final_norm")):
        raise InvalidRequest(f"normed=True is for rows of 'final_norm', which this model has none of: {reason}")
    width, vocabulary = engine.vllm.hidden_size, engine.vllm.vocabulary
    rounded = _rounded(rows, width, engine.dtype)
    each = 4 * vocabulary if full else 0
    most = index_of(max_bytes)
    if most is None:
        raise InvalidRequest(f"max_bytes={shown(max_bytes)}; give a whole number of bytes")
    if len(rows) * each > most:
        raise InvalidRequest(
            f"{len(rows)} rows × {vocabulary} logits take {len(rows) * each:,} bytes, more than "
            f"max_bytes={most:,}; choose rows by tokens=, or leave full= out"
        )
    size = max(1, _FRAME_BYTES // max(width * 4, each))
    parts = []
    for some in rounded.split(size) if len(rows) else ():
        found = await engine.unembed(some, None if full else chosen, top=count, normed=normed)
        total = torch.tensor(found.total)[:, None]
        values = _tensor(found.logits, len(some))
        best = _tensor(found.top, len(some), torch.int64)
        parts.append((values - total if not full else values, best, _tensor(found.best, len(some)) - total, total))
    if not parts:
        nothing = torch.empty(0, count)
        every = torch.empty(0, vocabulary) if full else None
        return Lens(torch.empty(0, dtype=torch.int64), nothing.long(), nothing, torch.empty(0, len(chosen)), every)
    values, best, likely, total = (torch.cat(each) for each in zip(*parts, strict=True))
    places = torch.arange(len(rows))
    if full:
        return Lens(places, best, likely, values[:, list(chosen)] - total, values)
    return Lens(places, best, likely, values, None)


def point_of(points: Sequence[Point], num_layers: int, layer: int | None, site: str | None) -> Point:
    """Return the point whose rows a lens reads: the named one, or the last captured one of the residual stream.

    Args:
        points: the captured points.
        num_layers: decoder layers of the model.
        layer, site: layer and site as the user gave them.

    Raises:
        InvalidRequest: the rows were not captured, or are not of the residual stream.
    """
    if site is not None and site not in {*LENS_SITES, BEHIND}:
        raise InvalidRequest(f"lens: site={shown(site)}; rows of the stream are at {', '.join((*LENS_SITES, BEHIND))}")
    (last,) = placed([Point(num_layers - 1, site or BEHIND)], num_layers)
    if layer is not None:
        index = index_of(layer)
        if index is None or not -num_layers <= index < num_layers:
            raise InvalidRequest(f"lens: layer={shown(layer)}; the model has layers 0 to {num_layers - 1}")
        wanted = [*placed([Point(index % num_layers, site or "resid_post")], num_layers)]
    else:
        wanted = [last] if site else [last, last._replace(site="resid_post")]
    found = next((point for point in wanted if point in points), None)
    if found is None:
        raise InvalidRequest(
            f"lens: {' or '.join(map(str, wanted))} was not captured; captured: {', '.join(map(str, points))}"
        )
    return found


def _rounded(rows: torch.Tensor, width: int, dtype: torch.dtype) -> Float[torch.Tensor, "rows hidden"]:
    """Return rows for the logit lens in the model's dtype, on the CPU, detached from their graph.

    Raises:
        InvalidRequest: `rows` is no floating-point tensor [rows, `width`], or not finite in that dtype; the lens would
            name a token even for a row of NaN.
    """
    dense = isinstance(rows, torch.Tensor) and rows.layout == torch.strided and rows.device.type != "meta"
    if not (dense and rows.dim() == 2 and rows.is_floating_point() and rows.shape[1] == width):
        had = f"{tuple(rows.shape)} of {rows.dtype}" if isinstance(rows, torch.Tensor) else shown(rows)
        raise InvalidRequest(f"rows={had}; give a floating-point tensor of torch, [rows, {width}]")
    rounded = rows.detach().to(dtype).cpu()
    stray = ~rounded.isfinite().all(dim=1)
    if stray.any():
        raise InvalidRequest(f"row {int(stray.nonzero()[0])} holds NaN or infinity in {dtype}, so it has no logits")
    return rounded


def _checked_request(engine: Engine, top: int, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    vocabulary = engine.vllm.vocabulary
    count = count_of(top, "top", 0, vocabulary, wrong=InvalidRequest)
    given = parts_of(ids, "ids")
    found = None if given is None else [index_of(token) for token in given]
    if found is None or not all(token is not None and 0 <= token < vocabulary for token in found):
        raise InvalidRequest(f"ids={shown(ids)}; give a list of token ids, 0 to {vocabulary - 1}")
    return count, tuple(token for token in found if token is not None)


def _tensor(values: bytes, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    return found.view(rows, len(found) // rows)
