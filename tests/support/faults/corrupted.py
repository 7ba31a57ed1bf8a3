"""Files of captures are cut off, and changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import Manifest
from steercap.captures.saving import save_run
from steercap.errors import InvalidFile
from support.faults.base import Fault, Outcome, fetched, opened, prompts

#: Lengths that a file is cut to, and bits that are changed in it, of each file.
CUTS, BITS = 64, 256


Read: TypeAlias = Callable[[Path], object]
Damages: TypeAlias = Callable[[bytes], Iterator[bytes]]
Try: TypeAlias = tuple[str, Read, Damages]


async def inject(folder: Path) -> list[Outcome]:
    """Damage each file of a run of captures."""
    async with opened() as model:
        handles = await fetched(model, prompts(2, 9))
    whole = save_run(folder / "whole", handles).folder
    name = Manifest.load(whole).requests[0].file
    tries: dict[str, Try] = {
        f"a capture cut off, at {CUTS} lengths": (name, _loaded, cut),
        f"a capture cut off, through its manifest, at {CUTS} lengths": (name, _through_manifest, cut),
        f"a capture with a bit changed, through its manifest, at {BITS} places": (name, _through_manifest, changed),
        f"the manifest cut off, at {CUTS} lengths": ("manifest.json", _through_manifest, cut),
    }
    return damaged(whole, folder / "damaged", tries)


def damaged(whole: Path, folder: Path, tries: Mapping[str, Try]) -> list[Outcome]:
    """Damage files in many ways, and read what they belong to: each damage must be found, as `InvalidFile`.

    Args:
        whole: a folder that is right.
        folder: where it is copied to, and damaged.
        tries: by who reads: the file's name, what reads the folder, and what a file's content becomes.
    """
    return [_found(who, whole, folder, *one) for who, one in tries.items()]


def _found(who: str, whole: Path, folder: Path, name: str, read: Read, damages: Damages) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    told = ""
    for content in damages((whole / name).read_bytes()):
        (folder / name).write_bytes(content)
        try:
            read(folder)
        except InvalidFile as error:
            told = str(error).replace(str(folder), "...").splitlines()[0]
            continue
        raise AssertionError(f"{who}: damage was not found")
    return Outcome(who, f"all found, the last as InvalidFile: {told}")


def _loaded(folder: Path) -> object:
    (first, *_) = sorted(folder.glob("*.safetensors"))
    return CaptureHandle.load(first)


def _through_manifest(folder: Path) -> object:
    return [*Manifest.load(folder).handles()]


def cut(content: bytes) -> Iterator[bytes]:
    """A file cut off at `CUTS` lengths."""
    for part in range(CUTS):
        yield content[: len(content) * part // CUTS]


def changed(content: bytes) -> Iterator[bytes]:
    """A file with a bit changed, at `BITS` places."""
    for part in range(BITS):
        other, at = bytearray(content), len(content) * part // BITS
        other[at] ^= 1 << part % 8
        yield bytes(other)


MEMBER = Fault(
    title="a file of captures cut off or changed",
    how="a saved run whose files are cut to many lengths, and in which single bits are changed",
    must="`InvalidFile`, each time; a bit of a row is found by the SHA-256 in the manifest",
    inject=inject,
)
