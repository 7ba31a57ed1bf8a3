"""Product quantisation of saved rows with faiss: each row becomes a few bytes, by codebooks trained on similar rows.

It is applied after the capture, to files that `CaptureHandle.save` wrote, because codebooks are trained on rows.
Source: Jégou, Douze and Schmid, Product quantization for nearest neighbor search (2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float, Integer, UInt8

from steercap.captures.handle import CaptureHandle
from steercap.core.display import brief
from steercap.core.extras import extra
from steercap.core.spec import Point, resolve_layers
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.files import native

#: Default maximum number of training rows: 256 for each of 256 codebook entries, faiss' own maximum.
TRAINED_ON: Final = 1 << 16
#: Limits of faiss: bits of a codebook index, and the greatest seed, a signed 32-bit integer.
MOST_BITS: Final = 16
MOST_NUMBER: Final = (1 << 31) - 1

Files: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True, eq=False)
class Codes:
    """Product-quantisation codes of one handle's rows at one point.

    For a reduction there is one row, and the labels are those of the rows that were reduced.

    Args:
        quantiser: SHA-256 of the codebooks, in hexadecimal; see `Quantiser.digest`.
        point: point of the rows.
        codes: uint8 [rows, bytes].
        positions, token_ids: labels of the rows, int64 [rows]; of a reduction, those of the reduced rows, [labels].
        request_id: id of the handle.

    Raises:
        InvalidSpec: the codes are not uint8 [rows, bytes], or their number differs from that of the labels.
    """

    quantiser: str
    point: Point
    codes: UInt8[torch.Tensor, "rows bytes"]
    positions: Integer[torch.Tensor, " labels"]
    token_ids: Integer[torch.Tensor, " labels"]
    request_id: str

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "point", Point(*self.point))
        codes, labels = self.codes, {len(self.positions), len(self.token_ids)}
        if codes.dim() != 2 or codes.dtype != torch.uint8 or len(labels) > 1 or len(codes) not in labels | {1}:
            raise InvalidSpec(
                f"codes of {tuple(codes.shape)}, {codes.dtype}, with {len(self.positions)} positions and "
                f"{len(self.token_ids)} token ids; give uint8 [rows, bytes], and a label of each row"
            )

    def save(self, path: str | Path) -> Path:
        """Write the codes to one safetensors file and return its path; see `steercap.files.native`."""
        return native.save(self, path, _codes_kind())

    @staticmethod
    def load(path: str | Path) -> Codes:
        """Read a file that `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _codes_kind(), Codes)


@dataclass(frozen=True, eq=False)
class Quantiser:
    """Codebooks for the rows of one point: a row is cut into parts, and each part is coded by its nearest entry.

    Args:
        point: point of the rows.
        codebooks: float32 [parts, 2**bits, width / parts].
        model: name of the model whose rows the codebooks were trained on.
        rows: number of training rows.
        seed: seed of the training.

    Raises:
        InvalidSpec: the codebooks have another shape or dtype.
    """

    point: Point
    codebooks: Float[torch.Tensor, "parts entries part_width"]
    model: str = ""
    rows: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "point", Point(*self.point))
        books = self.codebooks
        if books.dim() != 3 or books.dtype != torch.float32 or not _is_power(books.shape[1]):
            raise InvalidSpec(f"codebooks of {tuple(books.shape)}, {books.dtype}; give float32 [parts, 2**bits, width]")

    @staticmethod
    def train(
        files: Files,
        layer: int,
        *,
        site: str = "resid_post",
        parts: int = 64,
        bits: int = 8,
        most_rows: int = TRAINED_ON,
        seed: int = 0,
    ) -> Quantiser:
        """Train codebooks on the rows of a point in files that `CaptureHandle.save` wrote.

        Args:
            files: one path or several; if the files have more than `most_rows` rows, a random sample of all is used.
            layer: layer of the rows; negative counts from the model's last.
            site: site of the rows.
            parts: number of parts that a row is cut into; it must divide the width.
            bits: bits of the code of each part: `parts * bits / 8` bytes a row.
            most_rows: maximum number of rows to train on.
            seed: seed of the sample and of the training.

        Raises:
            MissingExtra: faiss is not installed.
            InvalidSpec: an argument is out of range, several layers are given, or the files have different models or
                reductions, or hold projections on directions.
            InvalidRequest: there are fewer rows than entries of a codebook, or rows are not finite.
            LayerOutOfRange, InvalidFile: a file lacks the point, or is no capture.
        """
        handles = [CaptureHandle.load(path) for path in _paths(files)]
        models = {handle.model for handle in handles}
        if len(models) != 1:
            raise InvalidSpec(f"files of models {sorted(models)}; train on the rows of one")
        if len(reductions := {str(handle.receipt.reduce) for handle in handles}) != 1:
            raise InvalidSpec(f"files of reductions {sorted(reductions)}; train on rows that were reduced alike")
        layers = resolve_layers(layer, handles[0].num_layers)
        if len(layers) != 1:
            raise InvalidSpec(f"layer={shown(layer)}; give one layer, and train codebooks for each layer separately")
        point = Point(layers[0], site)
        most_rows = count_of(most_rows, "most_rows", 1, MOST_NUMBER)
        seed = count_of(seed, "seed", 0, MOST_NUMBER)
        rows = _drawn((_rows(_elements(handle, point)) for handle in handles), most_rows, seed)
        parts, bits = _sizes(rows.shape[1], parts, bits)
        if len(rows) < 1 << bits:
            raise InvalidRequest(f"{len(rows)} rows for codebooks of {1 << bits} entries; give more, or fewer bits")
        index = _pq_index(rows.shape[1], parts, bits)
        index.pq.cp.seed, index.pq.cp.min_points_per_centroid = seed, 1
        index.train(rows)
        return Quantiser(point, _books(index), models.pop(), len(rows), seed)

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self.codebooks.shape[0] * self.codebooks.shape[2]

    @property
    def bits(self) -> int:
        """Number of bits of each part's code."""
        return int(self.codebooks.shape[1]).bit_length() - 1

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row's code."""
        return -(-self.codebooks.shape[0] * self.bits // 8)

    @property
    def digest(self) -> str:
        """SHA-256 of the codebooks, in hexadecimal, by which codes name them."""
        return hashlib.sha256(self.codebooks.contiguous().numpy().tobytes()).hexdigest()

    def encode(self, rows: Float[torch.Tensor, "rows ..."]) -> UInt8[torch.Tensor, "rows bytes"]:
        """Return the codes of rows: uint8 [rows, bytes].

        Raises:
            MissingExtra: faiss is not installed.
            InvalidRequest: the rows have another width, or are not finite.
        """
        return torch.from_numpy(self._index().sa_encode(self._own(rows)))

    def decode(self, codes: UInt8[torch.Tensor, "rows bytes"] | Codes) -> Float[torch.Tensor, "rows width"]:
        """Return the approximate rows that codes stand for: float32 [rows, width].

        Raises:
            MissingExtra: faiss is not installed.
            InvalidRequest: the codes are of other codebooks.
        """
        return torch.from_numpy(self._index().sa_decode(self._codes(codes)))

    def encode_file(self, source: str | Path, target: str | Path) -> Codes:
        """Encode the rows of a capture file, write the codes with their labels to `target`, and return them.

        Raises:
            MissingExtra: faiss is not installed.
            InvalidRequest, LayerOutOfRange, InvalidFile: the source is no capture, is of another model, lacks the
                point, has rows of another width, or holds projections on directions.
        """
        handle = CaptureHandle.load(source)
        if handle.model != self.model:
            raise InvalidRequest(f"{source} holds rows of {handle.model!r}, and the codebooks are for {self.model!r}")
        codes = self.encode(_elements(handle, self.point))
        found = Codes(self.digest, self.point, codes, handle.positions, handle.token_ids, handle.request_id)
        found.save(target)
        return found

    def search(
        self,
        queries: Float[torch.Tensor, "queries ..."],
        codes: Codes | Sequence[Codes],
        k: int,
        *,
        metric: Literal["distance", "inner"] = "distance",
    ) -> tuple[Float[torch.Tensor, "queries k"], Integer[torch.Tensor, "queries k"]]:
        """Find the k coded rows that are nearest to each query.

        Args:
            queries: uncompressed rows.
            codes: codes to search; several are searched as one sequence.
            k: number of rows to return, at most as many as were coded.
            metric: "distance" for squared distance, ascending, or "inner" for inner product, descending.

        Returns:
            Distances or products, float32 [queries, k], and each row's index among all coded rows, int64 [queries, k].

        Raises:
            MissingExtra: faiss is not installed.
            InvalidRequest: queries have another width, codes other codebooks, or `k` or `metric` is not possible.
        """
        if metric not in {"distance", "inner"}:
            raise InvalidRequest(f"metric={shown(metric)}; use 'distance' or 'inner'")
        everything = [codes] if isinstance(codes, Codes) else list(codes)
        index = self._index(metric)
        for one in everything:
            index.add_sa_codes(self._codes(one))
        asked = count_of(k, "k", 1, index.ntotal, wrong=InvalidRequest)
        try:
            values, numbers = index.search(self._own(queries), asked)
        except RuntimeError as error:  # such as codebooks of two entries for parts of two elements
            raise InvalidRequest(f"faiss cannot search codes of {self}: {error}; train with more bits") from error
        return torch.from_numpy(values), torch.from_numpy(numbers)

    def save(self, path: str | Path) -> Path:
        """Write codebooks and provenance to one safetensors file and return its path; see `steercap.files.native`."""
        return native.save(self, path, _kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> Quantiser:
        """Read a file that `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), Quantiser)

    def __repr__(self) -> str:
        books = f"{self.codebooks.shape[0]} parts of {self.bits} bits"
        return f"Quantiser({self.point}, {books}, {self.rows} rows, model={self.model!r})"

    def _index(self, metric: str = "distance") -> Any:
        """Return an empty faiss index with these codebooks."""
        index = _pq_index(self.width, self.codebooks.shape[0], self.bits, metric)
        with extra("quantisation"):
            import faiss
        faiss.copy_array_to_vector(self.codebooks.contiguous().numpy().ravel(), index.pq.centroids)
        index.is_trained = True
        return index

    def _own(self, rows: torch.Tensor) -> np.ndarray[Any, Any]:
        found = _rows(rows)
        if found.shape[1] != self.width:
            raise InvalidRequest(f"rows are {found.shape[1]} wide, and the codebooks are for {self.width}")
        return found

    def _codes(self, codes: torch.Tensor | Codes) -> np.ndarray[Any, Any]:
        if isinstance(codes, Codes):
            if codes.quantiser != self.digest:
                raise InvalidRequest(f"these are codes of other codebooks, {codes.quantiser[:12]}...; load those")
            codes = codes.codes
        if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] != self.row_bytes:
            raise InvalidRequest(f"codes are {tuple(codes.shape)}, {codes.dtype}; give uint8 [rows, {self.row_bytes}]")
        return codes.contiguous().numpy()


def _pq_index(width: int, parts: int, bits: int, metric: str = "distance") -> Any:
    with extra("quantisation"):
        import faiss
    return faiss.IndexPQ(width, parts, bits, faiss.METRIC_L2 if metric == "distance" else faiss.METRIC_INNER_PRODUCT)


def _books(index: Any) -> torch.Tensor:
    with extra("quantisation"):
        import faiss
    found = faiss.vector_to_array(index.pq.centroids)
    return torch.from_numpy(found.copy()).view(index.pq.M, index.pq.ksub, index.pq.dsub)


def _rows(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return rows as an array for faiss, flattened to float32 [rows, width].

    Raises:
        InvalidRequest: `rows` is no tensor of floats with two axes or more, or holds NaN or infinity.
    """
    if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or not rows.is_floating_point():
        raise InvalidRequest(f"rows={shown(rows)}; give a tensor of floats, [rows, width]")
    found = rows.detach().flatten(1).float().cpu().contiguous()
    if not found.isfinite().all():
        raise InvalidRequest("these rows hold NaN or infinity, which no codebook has")
    return cast("np.ndarray[Any, Any]", found.numpy())


def _elements(handle: CaptureHandle, point: Point) -> torch.Tensor:
    """Return the decoded rows of a handle at a point.

    Raises:
        InvalidSpec: the handle holds projections instead; or as for `captures[layer, site]`.
        LayerOutOfRange: the handle lacks the point.
    """
    if handle.directions:
        raise InvalidSpec(f"{handle.request_id} holds projections on directions, and no rows; capture without project=")
    return handle.captures.elements(point)


def _drawn(groups: Iterator[np.ndarray[Any, Any]], most: int, seed: int) -> np.ndarray[Any, Any]:
    """Return a uniform random sample of at most `most` rows from all groups, in random order: [rows, width]."""
    rng = np.random.default_rng(seed)
    kept = next(groups)
    keys = rng.random(len(kept))
    for rows in groups:
        kept, keys = np.concatenate([kept, rows]), np.concatenate([keys, rng.random(len(rows))])
        if len(kept) > 2 * most:
            chosen = np.argsort(keys)[:most]
            kept, keys = kept[chosen], keys[chosen]
    return np.ascontiguousarray(kept[np.argsort(keys)[:most]])


def _is_power(entries: int) -> bool:
    """Return whether a codebook can have this number of entries: a power of two from 2 to 2**16."""
    return entries in {1 << bits for bits in range(1, MOST_BITS + 1)}


def _sizes(width: int, parts: object, bits: object) -> tuple[int, int]:
    """Return numbers of parts and bits as ints, checked.

    Raises:
        InvalidSpec: `parts` does not divide the width, or `bits` is out of range.
    """
    found = index_of(parts)
    if found is None or found < 1 or width % found:
        raise InvalidSpec(f"parts={shown(parts)} does not divide rows of {width} elements")
    return found, count_of(bits, "bits", 1, MOST_BITS)


def _paths(files: Any) -> Iterable[Path]:
    found = [files] if isinstance(files, (str, Path)) else list(files)
    if not found:
        raise InvalidSpec("files=[]; give one at least")
    return map(Path, found)


def _kind() -> native.FileKind:
    return native.FileKind("quantiser", {"Quantiser": Quantiser})


def _codes_kind() -> native.FileKind:
    return native.FileKind("codes", {"Codes": Codes})
