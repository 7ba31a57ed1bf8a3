"""A codec for each site of a capture: raw rows are captured, and encoded on the client, one handle for each codec.

A request's own capture has one codec, which the workers apply. Several are therefore applied on the client, where rows
are written to files. Their codes equal those of workers on CPU, and each file has one codec, as all capture files do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.captures.handle import CaptureHandle, holding
from steercap.captures.rows import Captures, Found, Rows
from steercap.captures.spilled import GatheredRows
from steercap.core.schema import ATTENTION, RAW, Coding
from steercap.core.spec import MOST_TARGETS, QUERIES_AND_KEYS, CaptureSpec, Point, name_of_site, require_start
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidSpec, UnknownName
from steercap.files.base import require_file, write_whole
from steercap.kernels.attention import RecordedAttention
from steercap.kernels.codecs import codec_of
from steercap.kernels.codecs.coded import encoded

_PARAMETERS: Final = ("k", "seed")
#: Prefix of a text that names a file of `SiteCodecs.save` in place of a site.
FROM_FILE: Final = "@"


class SiteCodecsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a settings file that `SiteCodecs.save` writes, in JSON.

    Args:
        sites: texts that `SiteCodecs.parse` reads.
        about: facts about the file: the model, and the measurements by which the codecs were chosen.
        kind: kind of the file.
        version: version of the format.
    """

    sites: tuple[str, ...]
    about: dict[str, Any] = {}
    kind: str = "site codecs"
    version: int = 1


@dataclass(frozen=True)
class SiteCodecs:
    """Codec of each site of a capture.

    Args:
        codings: codec of each site, by the site's name.
        attention: number of attended tokens of highest weight to keep for each head and token, 0 for none. Without
            codings the workers compute the summary; else queries and keys are captured, and dropped here.
    """

    codings: Mapping[str, Coding]
    attention: int = 0

    @staticmethod
    def parse(texts: Sequence[str]) -> SiteCodecs:
        """Parse texts "SITE" (raw), "SITE=CODEC,k=N,seed=N", "attention=N" or "@FILE", all texts of a saved file.

        Raises:
            InvalidSpec: a text has another form, the codec has no such parameter, or a site comes twice.
            UnknownName: an unknown codec.
            InvalidFile: see `load`.
        """
        found: dict[str, Coding] = {}
        attention = 0
        for text in (one for given in texts for one in _from_file(given)):
            site, _, codec = text.partition("=")
            name = site if site == ATTENTION else name_of_site(site)
            if name in found or (name == ATTENTION and attention):
                raise InvalidSpec(f"{text!r}: the codec of {name!r} is given already; give each site once")
            if name == ATTENTION:
                attention = _targets(codec, text)
            else:
                found[name] = _coding(codec, text) if codec else RAW
        if not found and not attention:
            raise InvalidSpec("no site is given; give one, such as 'resid_post=rp8,k=512'")
        return SiteCodecs(found, attention)

    @staticmethod
    def load(path: str | Path) -> SiteCodecs:
        """Read a file that `save` wrote.

        Raises:
            InvalidFile: the file is missing, of another kind or version, or its settings are not valid.
        """
        try:
            return SiteCodecs.parse(read_settings(path).sites)
        except (InvalidSpec, UnknownName) as error:
            raise InvalidFile(f"{path} holds settings that do not fit: {error}") from error

    def save(self, path: str | Path, **about: Any) -> Path:
        """Write the codecs and the facts `about` them to a JSON file, whole or not at all; return its path.

        Raises:
            OSError: the file cannot be written.
        """
        content = msgspec.json.encode(SiteCodecsFile(self.texts, about))
        with write_whole(Path(path)) as scratch:
            scratch.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        return Path(path)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that `parse` reads back to an equal object."""
        own = (
            ",".join([f"{site}={one.encoding}", *(f"{name}={number}" for name, number in _parameters(one).items())])
            for site, one in self.codings.items()
        )
        return (*own, *([f"{ATTENTION}={self.attention}"] if self.attention else ()))

    def coding_of(self, sites: Sequence[str]) -> Coding:
        """Return the codec that all of these sites share.

        Raises:
            UnknownName: a site has no codec.
            InvalidSpec: the sites have different codecs.
        """
        names = [name_of_site(site) for site in sites]
        for name in names:
            if name not in self.codings:
                raise UnknownName(f"no codec is chosen for {name!r}; {choices(name, self.codings)}")
        if len({self.codings[name] for name in names}) > 1:
            known = "; ".join(f"{name}: {self.codings[name]}" for name in names)
            raise InvalidSpec(
                f"these sites have different codecs, {known}, and a capture has one codec; capture the sites of each "
                "codec separately"
            )
        return self.codings[names[0]]

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites to capture: those with a codec, and those that `attention` is computed from."""
        return tuple(dict.fromkeys([*self.codings, *(QUERIES_AND_KEYS if self.attention else ())]))

    @property
    def alike(self) -> bool:
        """True if all sites share a codec, or attention alone is kept, so that the workers can encode."""
        return len(set(self.codings.values())) + bool(self.attention) == 1

    def spec(self, **others: Any) -> CaptureSpec:
        """Return the spec that captures these sites: in their codec if they share one, else raw.

        Raises:
            The errors of `CaptureSpec`, whose further arguments are `others`.
        """
        if self.attention and self.alike:
            return CaptureSpec(attention=self.attention, **others)
        spec = _spec(self.sites, next(iter(self.codings.values())) if self.alike else RAW, others)
        if self.attention:
            require_start(spec.selection)
        return spec

    def specs(self, **others: Any) -> Iterator[CaptureSpec]:
        """Yield a `CaptureSpec` for each codec, with the sites that have it; attention is left out."""
        for coding in dict.fromkeys(self.codings.values()):
            yield _spec(tuple(site for site, own in self.codings.items() if own == coding), coding, others)

    def parted(self, handle: CaptureHandle, *, prompts: bool = True) -> list[CaptureHandle]:
        """Encode the rows of a fetched, gathered handle; return a handle for each codec.

        Args:
            handle: a handle of a capture by `spec`.
            prompts: False to replace the prompt's token ids by -1; then no row may be of the prompt.

        Raises:
            CaptureNotFetched, CaptureReleased: as for `handle.captures`.
        """
        found = self._coded(handle, prompts=prompts)
        if self.attention and not self.alike:
            found[0].recorded_attention |= self._summaries(handle)
        return found

    def parted_chunks(
        self, chunks: Iterable[CaptureHandle], rows: int, folder: Path, *, prompts: bool = True
    ) -> list[CaptureHandle]:
        """Encode rows that arrive in chunks, and gather the codes in nameless files, mapped into memory.

        Args:
            chunks: handles of `CaptureHandle.chunks`, of a capture by `spec`.
            rows: number of rows of all chunks together.
            folder: folder of the files.
            prompts: as for `parted`.

        Returns:
            A handle for each codec, as `parted` returns for all rows at once.

        Raises:
            CaptureIncomplete: the chunks have fewer or more than `rows` rows.
            OSError: the disk has no room.
        """
        gathered: list[GatheredRows] = []
        parts: list[CaptureHandle] = []
        for chunk in chunks:
            parts = self._coded(chunk, prompts=prompts)
            if self.attention and not self.alike:
                parts.append(_with_points(chunk, [one for one in chunk.points if one.site in QUERIES_AND_KEYS]))
            gathered = gathered or [GatheredRows(folder, part.captures, rows) for part in parts]
            for one, part in zip(gathered, parts, strict=True):
                one.add(Found(part.captures, part.receipt))
        found = [holding(part, one.found()) for one, part in zip(gathered, parts, strict=True)]
        if self.attention and not self.alike:
            found[0].recorded_attention |= self._summaries(found.pop())
        return found

    def _coded(self, handle: CaptureHandle, *, prompts: bool) -> list[CaptureHandle]:
        """Return a handle for each codec, or the given one if all sites share a codec; attention is left out."""
        if self.alike:
            whole = Found(handle.captures, handle.receipt)
            return [handle if prompts else holding(handle, whole, prompts=False)]
        found = []
        for coding in dict.fromkeys(self.codings.values()):
            points = [point for point in handle.points if self.codings.get(point.site) == coding]
            found.append(_with_points(handle, points, coding, prompts=prompts))
        return found

    def _summaries(self, handle: CaptureHandle) -> dict[int, RecordedAttention]:
        """Return the most strongly attended tokens by layer, computed from the queries and keys of a handle."""
        layers = sorted({point.layer for point in handle.points if point.site == QUERIES_AND_KEYS[0]})
        return {layer: RecordedAttention.of(handle.attention(layer, top=self.attention)) for layer in layers}


def _with_points(
    handle: CaptureHandle, points: Sequence[Point], coding: Coding = RAW, *, prompts: bool = True
) -> CaptureHandle:
    """Return a handle with the rows of some points alone, encoded."""
    rows: dict[Point, Rows] = {point: encoded(handle.captures[point], coding) for point in points}
    found = Found(Captures(rows, handle.num_layers), replace(handle.receipt, points=tuple(points)))
    return holding(handle, found, prompts=prompts)


def _parameters(coding: Coding) -> dict[str, Any]:
    return {name: number for name in _PARAMETERS if (number := getattr(coding, name))}


def _spec(sites: tuple[str, ...], coding: Coding, others: Mapping[str, Any]) -> CaptureSpec:
    parameters: dict[str, Any] = {f"codec_{name}": number for name, number in _parameters(coding).items()}
    return CaptureSpec(sites=sites, codec=coding.encoding, **parameters, **others)


def _targets(text: str, whole: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TARGETS:
        raise InvalidSpec(f"{whole!r}: give a number of targets from 1 to {MOST_TARGETS}, such as attention=8")
    return int(text)


def _coding(text: str, whole: str) -> Coding:
    name, *given = text.split(",")
    numbers: dict[str, Any] = {}
    for one in given:
        parameter, _, number = one.partition("=")
        if parameter not in _PARAMETERS or not number.isdecimal():
            raise InvalidSpec(
                f"{whole!r}: {shown(one)} is not a parameter of a codec; {choices(parameter, _PARAMETERS)}, such as "
                "k=512"
            )
        if f"codec_{parameter}" in numbers:
            raise InvalidSpec(f"{whole!r} gives {parameter} twice; give it once")
        numbers[f"codec_{parameter}"] = int(number)
    spec = CaptureSpec(codec=name, **numbers)  # checks their bounds
    return codec_of(name, spec.codec_k, spec.codec_seed)


def read_settings(path: str | Path) -> SiteCodecsFile:
    """Read a file that `SiteCodecs.save` wrote, with the facts about the choice of codecs.

    Raises:
        InvalidFile: the file is missing, of another kind or version, or names another file.
    """
    require_file(Path(path))
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=SiteCodecsFile)
    except (msgspec.MsgspecError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFile(f"{path} cannot be read as settings of codecs, a JSON object: {error}") from error
    if nested := [text for text in found.sites if text.startswith(FROM_FILE)]:
        raise InvalidFile(f"{path} names another file, {shown(nested[0])}; write the sites of that file into this one")
    own = SiteCodecsFile(())
    if (found.kind, found.version) != (own.kind, own.version):
        raise InvalidFile(
            f"{path} is of kind {found.kind!r}, version {found.version}; this reads {own.kind!r}, version {own.version}"
        )
    return found


def _from_file(text: str) -> Sequence[str]:
    return SiteCodecs.load(text.removeprefix(FROM_FILE)).texts if text.startswith(FROM_FILE) else [text]
