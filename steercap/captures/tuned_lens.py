"""Tuned lenses in the format of the package tuned-lens: an affine translator of the stream for each layer.

A folder of `config.json` and `params.pt`, or `params.safetensors` with the same names: `<layer>.weight` [hidden,
hidden] and `<layer>.bias` [hidden], which may be missing under `bias: false` alone. Translator i takes transformers'
`hidden_states[i]` (our `resid_pre` of layer i, `resid_post` of the one before) to `h + W h + b`. `params.pt` is read
without unpickling objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file

from steercap.core.spec import Point
from steercap.errors import InvalidFile, InvalidRequest

CONFIG: Final = "config.json"
PARAMS: Final = ("params.safetensors", "params.pt")
#: Index of the translator of a site's rows, relative to the layer's index.
_OFFSETS: Final = {"embed": 0, "resid_pre": 0, "resid_post": 1}


class TunedLens:
    """Affine translators of the stream, by the layer whose input they take.

    Attributes:
        model: the model that they were made for, as the file names it.
        width: number of elements of a row.
    """

    def __init__(self, translators: Mapping[int, tuple[torch.Tensor, torch.Tensor]], *, model: str, width: int) -> None:
        self._translators = dict(translators)
        self.model = model
        self.width = width

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TunedLens:
        """Read a tuned lens from a folder.

        Raises:
            InvalidFile: no such files, of another kind, or tensors that are not what the configuration says.
        """
        path = Path(folder)
        try:
            config = json.loads((path / CONFIG).read_text())
            width, layers, kind = config["d_model"], config["num_hidden_layers"], config.get("lens_type", "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidFile(f"{path / CONFIG} does not describe a tuned lens: {error!r}") from error
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
        return cls(found, model=str(config.get("base_model_name_or_path", "")), width=width)

    def translate(self, rows: Float[torch.Tensor, "rows hidden"], point: Point) -> Float[torch.Tensor, "rows hidden"]:
        """Return estimates of the last layer's rows, float32.

        Args:
            rows: rows of the stream.
            point: their point; rows of the end of the last layer are returned unchanged.

        Raises:
            InvalidRequest: rows of another width, or of a place that no translator takes.
        """
        if rows.shape[-1] != self.width:
            raise InvalidRequest(f"rows have width {rows.shape[-1]}, and this tuned lens takes {self.width}")
        if point.site not in _OFFSETS:
            raise InvalidRequest(f"a tuned lens takes rows of {', '.join(_OFFSETS)}, not of {point.site}")
        index = point.layer + _OFFSETS[point.site]
        if index == len(self._translators):
            return rows.float()
        if index not in self._translators:
            raise InvalidRequest(f"this tuned lens has translators for {len(self)} layers, and none for {point}")
        weight, bias = self._translators[index]
        return rows.float() + rows.float() @ weight.T + bias

    def __len__(self) -> int:
        return len(self._translators)

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
