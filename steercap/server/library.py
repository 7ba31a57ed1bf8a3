"""Vectors and steering by name: what clients upload, and what the operator loads at the start."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from steercap.core.values import choices, shown
from steercap.errors import CaptureMemoryFull, InvalidFile, InvalidSpec, SteercapError
from steercap.files import native
from steercap.saes import SAE
from steercap.steering.directions import DirectionSet
from steercap.steering.formats import load_control_vector
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: What can be named.
Content: TypeAlias = "LayerVectors | DirectionSet | SteeringSpec"
#: What a name may be: it stands in addresses and, behind "+", in names of models.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Bytes of one file, of all files of one key, and of all keys: without API keys, whoever asks says whose it is.
MOST_BYTES: Final = 256 << 20
MOST_BYTES_OF_A_KEY: Final = 1 << 30
MOST_BYTES_OF_ALL: Final = 4 << 30
#: What a file counts at least, for what Python makes of it.
LEAST_BYTES: Final = 64 << 10
#: Whose the operator's own are: everybody reads them.
OPERATOR: Final = "operator"

_READERS: Final[Mapping[str, Any]] = {
    "vectors": LayerVectors.load,
    "directions": DirectionSet.load,
    "steering": SteeringSpec.load,
}


@dataclass(frozen=True)
class Named:
    """Something with a name.

    Args:
        name: see `NAME`.
        owner: whose it is.
        content: what it is.
        size: bytes of its file.
        added: when it came, seconds since 1970.
    """

    name: str
    owner: str
    content: Content
    size: int
    added: float

    def described(self) -> dict[str, Any]:
        """As JSON: what it is, how wide, of which layers, and where it comes from."""
        found: dict[str, Any] = {"name": self.name, "bytes": self.size, "created": int(self.added)}
        found["owner"] = "operator" if self.owner == OPERATOR else "you"
        content = self.content
        if isinstance(content, SteeringSpec):
            edits = content.flat()
            return found | {"kind": "steering", "edits": [type(edit).__name__ for edit in edits]}
        found |= {"model": content.model, "site": content.site, "width": content.width}
        if isinstance(content, LayerVectors):
            norms = {str(layer): norm for layer, norm in content.norms().items()}
            return found | {"kind": "vectors", "label": content.name, "layers": list(content), "norms": norms}
        layers = list(next(iter(content.values())))
        found |= {"kind": "directions", "directions": list(content), "layers": layers}
        return found | {"provenance": repr(content.provenance)}


class Library:
    """What has names on a server: each key sees its own, and the operator's.

    Args:
        most_bytes: of one file.
        most_of_a_key: of all files of a key.
        most_of_all: of all files of all keys.
        folder: whether the operator gave a folder to write rows to.
        saes: the operator's SAEs, by name.
    """

    def __init__(
        self,
        *,
        most_bytes: int = MOST_BYTES,
        most_of_a_key: int = MOST_BYTES_OF_A_KEY,
        most_of_all: int = MOST_BYTES_OF_ALL,
        folder: bool = False,
        saes: Mapping[str, SAE] | None = None,
    ) -> None:
        self.saes = saes or {}
        self.folder = folder
        self.most_bytes = most_bytes
        self.most_of_a_key = most_of_a_key
        self._most_of_all = most_of_all
        self._kept: dict[tuple[str, str], Named] = {}
        self._coming: dict[object, tuple[str, int]] = {}

    def add(self, name: str, owner: str, data: bytes) -> Named:
        """Keep what a file holds, in place of what had the name.

        Raises:
            InvalidSpec: not a name.
            InvalidFile: not a file of vectors, directions or steering, in safetensors or GGUF.
            CaptureMemoryFull: beyond what a key may keep.
        """
        with self.receiving(name, owner) as came:
            came(len(data))
            return self.keep(name, owner, read(data), len(data))

    def keep(self, name: str, owner: str, content: Content, size: int) -> Named:
        """Keep what was read of a file that came by `receiving`, in place of what had the name."""
        self._kept[owner, name] = Named(name, owner, content, size, time.time())
        return self._kept[owner, name]

    @contextmanager
    def receiving(self, name: str, owner: str) -> Iterator[Callable[[int], None]]:
        """While a file comes. What is given is called with the bytes so far, and counts them with what is kept.

        Raises:
            InvalidSpec: not a name.
            CaptureMemoryFull: beyond what a key may keep, or the server; also by what is given.
        """
        if not NAME.fullmatch(name):
            raise InvalidSpec(f"name={name[:80]!r}; give letters, digits, dots, dashes and underscores, 64 at most")
        this = object()

        def came(length: int) -> None:
            self._coming[this] = (owner, max(length, LEAST_BYTES))
            kept = [(key[0], max(one.size, LEAST_BYTES)) for key, one in self._kept.items() if key != (owner, name)]
            taken = [*kept, *self._coming.values()]
            mine, others = (sum(size for whose, size in taken if (whose == owner) is own) for own in (True, False))
            if owner != OPERATOR and mine > self.most_of_a_key:
                raise CaptureMemoryFull(
                    f"your files would take {mine:,} bytes, and {self.most_of_a_key:,} may be kept; DELETE some"
                )
            if owner != OPERATOR and mine + others > self._most_of_all:
                raise CaptureMemoryFull(f"this server keeps {self._most_of_all:,} bytes of files, and no more")

        try:
            came(0)
            yield came
        finally:
            self._coming.pop(this, None)

    def get(self, name: str, owner: str) -> Named:
        """What an owner calls so: their own before the operator's.

        Raises:
            InvalidSpec: nothing has the name.
        """
        for whose in (owner, OPERATOR):
            if (found := self._kept.get((whose, name))) is not None:
                return found
        known = sorted(one.name for one in self.of(owner))
        raise InvalidSpec(f"no vector or steering is called {name[:80]!r}; {choices(name, known)}")

    def sae(self, name: Any) -> SAE:
        """Find an SAE by name.

        Raises:
            InvalidSpec: the operator gave none of the name.
        """
        if not isinstance(name, str) or name not in self.saes:
            raise InvalidSpec(f"no SAE is called {shown(name)}; {choices(name, sorted(self.saes))}")
        return self.saes[name]

    def of(self, owner: str) -> Iterator[Named]:
        """What an owner sees."""
        return (one for one in tuple(self._kept.values()) if one.owner in {owner, OPERATOR})

    def remove(self, name: str, owner: str) -> bool:
        """Let go of one of an owner's own; whether it was there."""
        return self._kept.pop((owner, name), None) is not None


def read(data: bytes) -> Content:
    """What the bytes of a file hold; nothing in them is run.

    Raises:
        InvalidFile: not vectors, directions or steering, in safetensors or GGUF.
    """
    with tempfile.TemporaryDirectory(prefix="steercap-upload-") as folder:
        path = Path(folder, "upload.gguf" if data[:4] == b"GGUF" else "upload.safetensors")
        path.write_bytes(data)
        try:
            if path.suffix == ".gguf":
                return load_control_vector(path)
            kind = native.read_header(path).kind
            if kind not in _READERS:
                raise InvalidFile(f"it holds {kind}, not vectors, directions or steering")
            content: Content = _READERS[kind](path)
        except SteercapError as error:
            raise InvalidFile(f"the file cannot be used: {str(error).replace(str(path), 'it')}") from error
        return content
