"""Files of captures are cut off, and changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from steercap.errors import InvalidFile
from steercap.requests.handle import CaptureHandle
from steercap.requests.manifest import Manifest
from steercap.requests.saving import save_run
from steercap.testing.faults.base import Fault, Outcome, fetched, opened, prompts

#: Lengths that a file is cut to, and bits that are changed in it, of each file.
CUTS, BITS = 64, 256


async def inject(folder: Path) -> list[Outcome]:
    """Damage each file of a run of captures."""
    async with opened() as model:
        handles = await fetched(model, prompts(2, 9))
    whole = save_run(folder / "whole", handles).folder
    name = Manifest.load(whole).requests[0].file
    tries: dict[str, tuple[str, Callable[[Path], object], Callable[[bytes], Iterator[bytes]]]] = {
        f"a capture cut off, at {CUTS} lengths": (name, _loaded, cut),
        f"a capture cut off, through its manifest, at {CUTS} lengths": (name, _through_manifest, cut),
        f"a capture with a bit changed, through its manifest, at {BITS} places": (name, _through_manifest, changed),
        f"the manifest cut off, at {CUTS} lengths": ("manifest.json", _through_manifest, cut),
    }
    return [_damaged(who, whole, folder / "damaged", *one) for who, one in tries.items()]


def _damaged(
    who: str,
    whole: Path,
    folder: Path,
    name: str,
    read: Callable[[Path], object],
    damages: Callable[[bytes], Iterator[bytes]],
) -> Outcome:
    """Damage a file in many ways, and read it: each must be found."""
    told = ""
    for content in damages((whole / name).read_bytes()):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
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
        damaged, at = bytearray(content), len(content) * part // BITS
        damaged[at] ^= 1 << part % 8
        yield bytes(damaged)


MEMBER = Fault(
    title="a file of captures cut off or changed",
    how="a saved run whose files are cut to many lengths, and in which single bits are changed",
    must="`InvalidFile`, each time; a bit of a row is found by the SHA-256 in the manifest",
    inject=inject,
)
