"""A codec for each site of a capture: rows are captured as they are, and encoded here, one handle for each codec.

A request's own capture has one codec, which the workers apply. So several are applied where the rows are written: their
codes are those of the workers on the host, and a file has one codec, as any file of captures.
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
#: Start of a text that names a file of `SiteCodecs.save` in place of a site.
FROM_FILE: Final = "@"


class SiteCodecsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a file of settings, as JSON.

    Args:
        sites: texts that `SiteCodecs.parse` reads.
        about: facts about the file: the model, and the measurements by which the codecs were chosen.
        kind: kind of the file.
        version: version of its form.
    """

    sites: tuple[str, ...]
    about: dict[str, Any] = {}
    kind: str = "site codecs"
    version: int = 1


@dataclass(frozen=True)
class SiteCodecs:
    """Codec of each site.

    Args:
        codings: codec of each site, by the site's name.
        attention: number of attended tokens of highest weight to keep for each head and token, 0 for none. Without
            sites beside it the workers compute them; else queries and keys are captured, and dropped here.
    """

    codings: Mapping[str, Coding]
    attention: int = 0

    @staticmethod
    def parse(texts: Sequence[str]) -> SiteCodecs:
        """Parse texts "SITE" or "SITE=CODEC,k=N,seed=N", and "attention=N"; a site without a codec is kept as it is.
        "@FILE" stands for all texts in a file of `save`.

        Raises:
            InvalidSpec: a text of another form, parameters that the codec does not have, or a site that comes twice.
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
        """Read a file of `save`.

        Raises:
            InvalidFile: it is missing, of another kind or version, or holds settings that do not fit.
        """
        try:
            return SiteCodecs.parse(read_settings(path).sites)
        except (InvalidSpec, UnknownName) as error:
            raise InvalidFile(f"{path} holds settings that do not fit: {error}") from error

    def save(self, path: str | Path, **about: Any) -> Path:
        """Write the codecs to a JSON file, which appears whole or not at all; `about` is kept in it.

        Raises:
            OSError: it cannot be written.
        """
        content = msgspec.json.encode(SiteCodecsFile(self.texts, about))
        with write_whole(Path(path)) as scratch:
            scratch.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        return Path(path)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that `parse` reads."""
        own = (
            ",".join([f"{site}={one.encoding}", *(f"{name}={number}" for name, number in _parameters(one).items())])
            for site, one in self.codings.items()
        )
        return (*own, *([f"{ATTENTION}={self.attention}"] if self.attention else ()))

    def coding_of(self, sites: Sequence[str]) -> Coding:
        """Return the codec that all of these sites share.

        Raises:
            UnknownName: a site without a codec.
            InvalidSpec: sites of different codecs.
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
        """True if all sites have one codec, or attention is all that is kept: the workers can make these."""
        return len(set(self.codings.values())) + bool(self.attention) == 1

    def spec(self, **others: Any) -> CaptureSpec:
        """Return the spec of a capture of these sites, in their codec if it is one, else as they are.

        Raises:
            The errors of `CaptureSpec`.
        """
        if self.attention and self.alike:
            return CaptureSpec(attention=self.attention, **others)
        spec = _spec(self.sites, next(iter(self.codings.values())) if self.alike else RAW, others)
        if self.attention:
            require_start(spec.selection)
        return spec

    def specs(self, **others: Any) -> Iterator[CaptureSpec]:
        """Iterate over specs of the sites of each codec, in that codec; attention is left out."""
        for coding in dict.fromkeys(self.codings.values()):
            yield _spec(tuple(site for site, own in self.codings.items() if own == coding), coding, others)

    def parted(self, handle: CaptureHandle, *, prompts: bool = True) -> list[CaptureHandle]:
        """Encode the rows of a handle, fetched and gathered, and return a handle for each codec.

        Args:
            handle: a handle of a capture by `spec`.
            prompts: False for handles without the prompt's token ids, -1 in place of each; none of its rows may be
                there.

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
        """Encode the rows of a handle that come in chunks, and gather them in nameless files, mapped into memory.

        Args:
            chunks: handles of `CaptureHandle.chunks`, of a capture by `spec`.
            rows: number of rows of all chunks together.
            folder: folder of the files.
            prompts: as for `parted`.

        Returns:
            What `parted` returns for all rows at once.

        Raises:
            CaptureIncomplete: fewer or more rows came.
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
        """Return a handle for each codec, or this one if all sites share a codec; without attention."""
        if self.alike:
            whole = Found(handle.captures, handle.receipt)
            return [handle if prompts else holding(handle, whole, prompts=False)]
        found = []
        for coding in dict.fromkeys(self.codings.values()):
            points = [point for point in handle.points if self.codings.get(point.site) == coding]
            found.append(_with_points(handle, points, coding, prompts=prompts))
        return found

    def _summaries(self, handle: CaptureHandle) -> dict[int, RecordedAttention]:
        """Compute the strongest targets of each head by layer, from the queries and keys of a handle."""
        layers = sorted({point.layer for point in handle.points if point.site == QUERIES_AND_KEYS[0]})
        return {layer: RecordedAttention.of(handle.attention(layer, top=self.attention)) for layer in layers}


def _with_points(
    handle: CaptureHandle, points: Sequence[Point], coding: Coding = RAW, *, prompts: bool = True
) -> CaptureHandle:
    """Return a handle with the rows of some points, encoded."""
    rows: dict[Point, Rows] = {point: encoded(handle.captures[point], coding) for point in points}
    found = Found(Captures(rows, handle.num_layers), replace(handle.receipt, points=tuple(points)))
    return holding(handle, found, prompts=prompts)


def _parameters(coding: Coding) -> dict[str, Any]:
    return {name: number for name in _PARAMETERS if (number := getattr(coding, name))}


def _spec(sites: tuple[str, ...], coding: Coding, others: Mapping[str, Any]) -> CaptureSpec:
    return CaptureSpec(sites=sites, codec=coding.encoding, **_parameters(coding), **others)


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
        if parameter in numbers:
            raise InvalidSpec(f"{whole!r} gives {parameter} twice; give it once")
        numbers[parameter] = int(number)
    CaptureSpec(codec=name, **numbers)  # bounds of the numbers
    return codec_of(name, numbers.get("k"), numbers.get("seed"))


def read_settings(path: str | Path) -> SiteCodecsFile:
    """Read the content of a file of `SiteCodecs.save`, with what it says about the choice.

    Raises:
        InvalidFile: it is missing, or of another kind or version.
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
