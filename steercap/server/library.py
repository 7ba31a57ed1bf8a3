"""Library of named vectors and steering, uploaded or the operator's; and presets, model names that steer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from steercap.core.names import require_upload_name
from steercap.core.values import choices, shown
from steercap.errors import CaptureMemoryFull, InvalidFile, InvalidSpec, SteercapError
from steercap.files import native
from steercap.files.fingerprint import warn_of_other_model
from steercap.saes import SAE
from steercap.steering.directions import DirectionSet
from steercap.steering.formats import load_control_vector
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: Content that clients can upload under a name.
Content: TypeAlias = "LayerVectors | DirectionSet | SteeringSpec"
#: Maximum bytes of one file, of an API key's files, and of all keys': without keys, clients are not authenticated.
MOST_BYTES: Final = 256 << 20
MOST_BYTES_OF_A_KEY: Final = 1 << 30
MOST_BYTES_OF_ALL: Final = 4 << 30
#: Minimum bytes that a file counts as, for its Python objects.
LEAST_BYTES: Final = 64 << 10
#: Owner of the operator's content, which all clients may use.
OPERATOR: Final = "operator"

_READERS: Final[Mapping[str, Any]] = {
    "vectors": LayerVectors.load,
    "directions": DirectionSet.load,
    "steering": SteeringSpec.load,
}


@dataclass(frozen=True)
class Named:
    """Uploaded content with its name.

    Args:
        name: name, which `require_upload_name` accepts.
        owner: digest of the uploader's API key, or `OPERATOR`.
        content: vectors, directions or steering.
        size: bytes of its file.
        added: time of the upload, seconds since 1970.
    """

    name: str
    owner: str
    content: Content
    size: int
    added: float

    def described(self) -> dict[str, Any]:
        """Describe the content as JSON values: kind, width, layers and origin."""
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
        known = content.provenance
        origin = {name: getattr(known, name) for name in ("revision", "dtype", "tokens", "reduce", "method", "seed")}
        return found | {"provenance": {**origin, "prompts": dict(known.prompts)}}


class Library:
    """Store in memory of named content; a client can use its own uploads and the operator's.

    Args:
        most_bytes: maximum bytes of one file.
        most_of_a_key: maximum bytes of one owner's files.
        most_of_all: maximum bytes of all owners' files.
        folder: True if the server has a folder that requests can have rows written to.
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
        """Parse a file and store its content under a name, replacing the owner's content of that name.

        Raises:
            InvalidSpec: an invalid name.
            InvalidFile: not a file of vectors, directions or steering, in safetensors or GGUF.
            CaptureMemoryFull: a limit leaves no room.
        """
        with self.receiving(name, owner) as came:
            came(len(data))
            return self.keep(name, owner, read(data), len(data))

    def keep(self, name: str, owner: str, content: Content, size: int) -> Named:
        """Store parsed content, whose room `receiving` has reserved, replacing the owner's content of that name."""
        self._kept[owner, name] = Named(name, owner, content, size, time.time())
        return self._kept[owner, name]

    @contextmanager
    def receiving(self, name: str, owner: str) -> Iterator[Callable[[int], None]]:
        """Reserve room while a file is received; yield a function to call with the number of bytes received so far.

        Raises:
            InvalidSpec: an invalid name.
            CaptureMemoryFull: a limit of the owner or the server leaves no room; the yielded function raises it too.
        """
        require_upload_name(name)
        this = object()

        def came(length: int) -> None:
            self._coming[this] = (owner, max(length, LEAST_BYTES))
            kept = [(key[0], max(one.size, LEAST_BYTES)) for key, one in self._kept.items() if key != (owner, name)]
            taken = [*kept, *self._coming.values()]
            mine, others = (sum(size for whose, size in taken if (whose == owner) is own) for own in (True, False))
            if owner != OPERATOR and mine > self.most_of_a_key:
                raise CaptureMemoryFull(
                    f"your files would take {mine:,} bytes, of at most {self.most_of_a_key:,}; DELETE some"
                )
            if owner != OPERATOR and mine + others > self._most_of_all:
                raise CaptureMemoryFull(
                    f"this server keeps at most {self._most_of_all:,} bytes of files, and has no room for this one"
                )

        try:
            came(0)
            yield came
        finally:
            self._coming.pop(this, None)

    def get(self, name: str, owner: str) -> Named:
        """Return the content of a name, the owner's in preference to the operator's.

        Raises:
            InvalidSpec: the name is unknown.
        """
        for whose in (owner, OPERATOR):
            if (found := self._kept.get((whose, name))) is not None:
                return found
        known = sorted(named.name for named in self.of(owner))
        raise InvalidSpec(f"no vector or steering is called {name[:80]!r}; {choices(name, known)}")

    def sae(self, name: Any) -> SAE:
        """Return one of the operator's SAEs by name.

        Raises:
            InvalidSpec: the name is unknown.
        """
        if not isinstance(name, str) or name not in self.saes:
            raise InvalidSpec(f"no SAE is called {shown(name)}; {choices(name, sorted(self.saes))}")
        return self.saes[name]

    def of(self, owner: str) -> Iterator[Named]:
        """Iterate over the content that an owner can use: its own and the operator's."""
        return (named for named in tuple(self._kept.values()) if named.owner in {owner, OPERATOR})

    def warn_of_other_models(self, names: Collection[str]) -> None:
        """Warn of each of the operator's vectors, specs and SAEs that was made for a model with none of these names."""
        for named in self.of(OPERATOR):
            parts = named.content.of_rows() if isinstance(named.content, SteeringSpec) else [named.content]
            for label in sorted({part.model for part in parts}):
                warn_of_other_model(f"--vectors {named.name}", label, names)
        for name, sae in self.saes.items():
            warn_of_other_model(f"--sae {name}", sae.model, names, tuned=True)

    def remove(self, name: str, owner: str) -> bool:
        """Delete an owner's content of a name; return whether it existed."""
        return self._kept.pop((owner, name), None) is not None


def read(data: bytes) -> Content:
    """Parse the bytes of an uploaded file; no code in it is executed.

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


class Presets:
    """Presets of the operator: model names, "model+preset", whose requests are steered.

    Args:
        names: names under which the model is served.
        steering: steering spec of each preset, by its name.

    Attributes:
        names: all model names that requests may give, those of presets included.
    """

    def __init__(self, names: Iterable[str], steering: Mapping[str, SteeringSpec]) -> None:
        served = tuple(names)
        self._steering = {f"{name}+{preset}": spec for name in served for preset, spec in steering.items()}
        self.names: tuple[str, ...] = (*served, *self._steering)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Model names of the presets, "model+preset"."""
        return tuple(self._steering)

    @property
    def variants(self) -> dict[str, str]:
        """SHA-256 of the steering that each alias stands for."""
        return {name: spec.sha256 for name, spec in self._steering.items()}

    def of(self, model: Any) -> SteeringSpec | None:
        """Return the steering of a request's model name, None if it is not a preset's."""
        return self._steering.get(model) if isinstance(model, str) else None
