"""Rows as other programs publish them: an `.npz` of `q`, `scale`, `zero` and `meta`, with `row = (q - zero) * scale`.

`q` is uint8 [tokens, width]; `scale` and `zero` are float32, one for each token, or one for each element; `meta` is a
JSON text with `mode` and `dim`. A folder has a file for each layer and rank, `seqS_layerL_rankR.npz`. `zero` is any
number: a writer that clips it to 0 to 255 saturates rows of one sign, whose elements exceed the codes.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from jaxtyping import Float, UInt8

from steercap.captures.npz import PUBLISHED, arrays_in
from steercap.core.display import brief
from steercap.core.schema import Coding
from steercap.core.values import count_of, shown, warn
from steercap.errors import InvalidFile, InvalidSpec
from steercap.files.base import SHOWN, blame, check_extension, write_whole
from steercap.kernels.codecs.coded import CodedRows, coding_of, encoded

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle

#: Codec whose rows have this form, and its greatest code.
MODE: Final = "full8"
GREATEST: Final = 255
_NAME: Final = re.compile(r"seq(\d+)_layer(\d+)_rank(\d+)\.npz")


class PublishedMeta(msgspec.Struct, frozen=True):
    """Content of the array `meta` in a file; unknown fields are ignored.

    Args:
        mode: name of the codec, as the writer of the file calls it.
        dim: number of elements of a row before coding.
    """

    mode: str
    dim: int


@dataclass(frozen=True, eq=False)
class PublishedRows:
    """Rows as 8-bit codes: `row = (q - zero) * scale`.

    Args:
        q: codes, uint8 [tokens, width].
        scale, zero: step between codes, and code of the value 0, float [tokens, 1] or [1, width].
        mode, dim: see `PublishedMeta`.
    """

    q: UInt8[torch.Tensor, "tokens width"]
    scale: Float[torch.Tensor, "tokens width"]
    zero: Float[torch.Tensor, "tokens width"]
    mode: str
    dim: int

    __repr__ = brief

    @staticmethod
    def load(path: str | Path, *, per_element: bool | None = None) -> PublishedRows:
        """Read an `.npz` of this form; warn if rows are saturated.

        Args:
            path: the file.
            per_element: True if `scale` and `zero` have a number for each element, False for each token; None to infer
                this from their lengths.

        Raises:
            InvalidFile: the file is missing, damaged, of another form, or of `CaptureHandle.save_npz`; or it has as
                many tokens as elements, so that `per_element` is needed.
        """
        path = Path(path)
        arrays = arrays_in(path)
        if "about" in arrays:
            raise InvalidFile(
                f"{path} is a file of save_npz, whose names differ; read it by steercap.captures.npz.read"
            )
        if missing := [name for name in PUBLISHED if name not in arrays]:
            raise InvalidFile(f"{path} has no {', '.join(missing)}; it has {', '.join(sorted(arrays)[:SHOWN])}")
        q = arrays["q"]
        if q.dtype != np.uint8 or q.ndim != 2:
            raise InvalidFile(f"{path}: q is {q.shape} of {q.dtype}; it must be uint8 [tokens, width]")
        with blame(path):
            meta = msgspec.json.decode(_text(arrays["meta"]), type=PublishedMeta)
            scale, zero = (_spread(name, arrays[name], q.shape, per_element) for name in ("scale", "zero"))
            if scale.shape != zero.shape:
                raise ValueError(f"scale is {scale.shape} and zero {zero.shape}; they must be alike")
        found = PublishedRows(torch.from_numpy(q), scale, zero, meta.mode, meta.dim)
        if count := int(found.saturated().sum()):
            warn(
                f"{path}: {count:,} of {len(q):,} rows are saturated: zero was cut off at 0 or {GREATEST}, so that "
                "codes end before their elements do; what is beyond is lost"
            )
        return found

    @staticmethod
    def of(rows: torch.Tensor | CodedRows) -> PublishedRows:
        """Convert rows to this form: floats [tokens, ...], or codes of full8 from one rank.

        Raises:
            InvalidSpec: `rows` is something else, has another codec or several ranks, or holds NaN or infinity.
        """
        if not isinstance(rows, CodedRows) and not (
            isinstance(rows, torch.Tensor) and rows.dim() > 1 and rows.is_floating_point()
        ):
            raise InvalidSpec(f"rows={shown(rows)}; give floats, [tokens, ...], or CodedRows")
        kept = rows if isinstance(rows, CodedRows) else encoded(rows, Coding(MODE))
        assert isinstance(kept, CodedRows)
        codec, _ = coding_of(kept)
        if codec != MODE or kept.parts["q"].dim() != 2:
            raise InvalidSpec(f"{kept!r}; the published form has raw rows or codec={MODE!r}: give one of these")
        scale, zero = (kept.parts[name].double()[:, None] for name in ("scale", "zero"))
        if not bool(scale.isfinite().all()):
            raise InvalidSpec("these rows hold NaN or infinity, which codes cannot express")
        scale = torch.where(scale == 0, 1.0, scale)
        q = kept.parts["q"]
        return PublishedRows(q, scale.float(), (-zero / scale).float(), MODE, q.shape[1])

    def decoded(self) -> Float[torch.Tensor, "tokens width"]:
        """Return the rows, computed in float64 and rounded once: float32 [tokens, width]."""
        return ((self.q.double() - self.zero.double()) * self.scale.double()).float()

    def saturated(self) -> torch.Tensor:
        """Return a mask of the rows that are saturated: bool [tokens].

        The codes of an unsaturated row reach from 0 to 255. If its `zero` was clipped to 0, they reach 255 but not 0;
        if to 255, they reach 0 but not 255. With numbers for each element instead of each token, this is checked for
        each element over all rows.
        """
        along = 1 if self.zero.shape[1] == 1 else 0
        if not self.q.numel():
            return torch.zeros(len(self.q), dtype=torch.bool)
        least, most = self.q.amin(dim=along, keepdim=True), self.q.amax(dim=along, keepdim=True)
        above = (self.zero == 0) & (least > 0) & (most == GREATEST)
        below = (self.zero == GREATEST) & (most < GREATEST) & (least == 0)
        return ((above & (self.q == GREATEST)) | (below & (self.q == 0))).any(dim=1)

    def save(self, path: str | Path) -> Path:
        """Write an `.npz`, whole or not at all, and return its path.

        Raises:
            InvalidFile: the name ends in something other than .npz.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_extension(path, ".npz")
        with write_whole(path) as scratch:
            _write(self, scratch)
        return path


class PublishedFile(NamedTuple):
    """File in a folder of published rows: its path, and the sequence, layer and rank in its name."""

    seq: int
    layer: int
    rank: int
    path: Path


def published_files(folder: str | Path) -> list[PublishedFile]:
    """Return the files `seqS_layerL_rankR.npz` of a folder, in the order of their numbers; warn of other `.npz`.

    Raises:
        InvalidFile: there are no such files, two have equal numbers, or a layer lacks a rank that others have.
    """
    there = sorted(Path(folder).glob("*.npz"))
    matched = [(one, _NAME.fullmatch(one.name)) for one in there]
    found = sorted(PublishedFile(int(name[1]), int(name[2]), int(name[3]), path) for path, name in matched if name)
    if not found:
        raise InvalidFile(f"{folder} has no file seqS_layerL_rankR.npz, such as seq0_layer12_rank0.npz")
    if others := [one.name for one, name in matched if not name]:
        warn(f"{folder}: {len(others)} files of other names are left out, {', '.join(others[:SHOWN])}")
    for one, other in pairwise(found):
        if one[:3] == other[:3]:
            raise InvalidFile(f"{one.path} and {other.path.name} have the same sequence, layer and rank; keep one")
    places = {(one.seq, one.layer, one.rank) for one in found}
    for seq, layer, rank in sorted({(one.seq, one.layer, other.rank) for one in found for other in found}):
        if (seq, layer, rank) not in places:
            raise InvalidFile(f"{folder} has no seq{seq}_layer{layer}_rank{rank}.npz; other layers have this rank")
    return found


def save_published(handle: CaptureHandle, folder: str | Path, *, seq: int = 0) -> list[Path]:
    """Write the rows of a handle, of one site, raw or in full8, to a file for each layer and rank; return the paths.

    Args:
        handle: a fetched handle.
        folder: the folder; files of this sequence and these layers are replaced once all new ones are written.
        seq: number of the sequence in the file names.

    Raises:
        CaptureNotFetched: before `fetch()`.
        InvalidSpec: the handle has several sites, another codec or non-finite rows; or `seq` is no number from 0.
        OSError: a file cannot be written.
    """
    number, sites = count_of(seq, "seq", 0), {point.site for point in handle.points}
    if len(sites) != 1:
        raise InvalidSpec(
            f"{handle.request_id} has rows of {sorted(sites)}; file names in this form do not tell the site: capture "
            "one site"
        )
    parts = {point.layer: _by_rank(rows) for point, rows in handle.as_saved().rows.items()}
    published = {(layer, rank): PublishedRows.of(rows) for layer, ranks in parts.items() for rank, rows in ranks}
    paths = [Path(folder) / f"seq{number}_layer{layer}_rank{rank}.npz" for layer, rank in published]
    with ExitStack() as whole:
        for path, rows in zip(paths, published.values(), strict=True):
            _write(rows, whole.enter_context(write_whole(path)))
        # Before the new ones have their names: layers, or ranks, of two captures would be read as one after a kill.
        for path in [path for layer in parts for path in Path(folder).glob(f"seq{number}_layer{layer}_rank*.npz")]:
            path.unlink()
    return paths


def _write(rows: PublishedRows, path: Path) -> None:
    numbers = {name: getattr(rows, name).float().flatten().numpy() for name in ("scale", "zero")}
    meta = np.array(msgspec.json.encode(PublishedMeta(rows.mode, rows.dim)).decode())
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, q=rows.q.numpy(), meta=meta, **numbers)


def _by_rank(rows: Any) -> list[tuple[int, torch.Tensor | CodedRows]]:
    """Return the rows of each rank, as (rank, rows): shards, or indices of the second axis of joined codes."""
    if isinstance(rows, CodedRows) and rows.schema.shards > 1 and rows.shard is None:
        parts = [{name: part[:, rank] for name, part in rows.parts.items()} for rank in range(rows.schema.shards)]
        return [(rank, CodedRows(rows.coding, rows.schema, own, rank)) for rank, own in enumerate(parts)]
    return list(enumerate(rows if isinstance(rows, tuple) else (rows,)))


def _text(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind != "U" or array.size != 1:
        raise ValueError(f"meta is {array.shape} of {array.dtype}; it must be a JSON text")
    return str(array.reshape(())[()])


def _spread(name: str, array: np.ndarray[Any, Any], shape: tuple[int, ...], per_element: bool | None) -> torch.Tensor:
    """Return an array of numbers per token as [tokens, 1], or per element as [1, width].

    Raises:
        ValueError: the array has another dtype or shape, is not finite, or could be either.
    """
    tokens, width = shape
    by_token, by_element = array.shape in {(tokens,), (tokens, 1)}, array.shape in {(width,), (1, width)}
    if array.dtype.kind != "f" or not (by_token or by_element) or not np.isfinite(array).all():
        raise ValueError(f"{name} is {array.shape} of {array.dtype}; it must be finite floats, [{tokens}] or [{width}]")
    if by_token and by_element and per_element is None:
        raise ValueError(
            f"{name} is {array.shape}, which fits {tokens} tokens and {width} elements; give per_element=True or False"
        )
    of_elements = by_element if per_element is None else per_element
    if not (by_element if of_elements else by_token):
        raise ValueError(
            f"{name} is {array.shape}, but per_element={per_element} needs {width if of_elements else tokens} numbers"
        )
    return torch.from_numpy(array).reshape((1, width) if of_elements else (tokens, 1))
