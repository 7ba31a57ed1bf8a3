"""The settings of steercap's own, checked once; everything else is an engine argument of vLLM.

Number 1 in the life of a request, once for all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from steercap.core.spec import Layers, Point, resolve_layers
from steercap.errors import InvalidSetting
from steercap.sites import SITES

Overflow = Literal["wait", "error"]
Transport = Literal["auto", "shared", "wire"]

#: Rows of 113,000 tokens of an 8B model at one layer, or of 3,800 at all 36; resident only when used.
DEFAULT_CAPTURE_BYTES: Final = 4 << 30

#: 900 requests of an 8B model that reduce at all layers; where fewer can run at once, less is taken.
DEFAULT_REDUCE_BYTES: Final = 1 << 30

#: 16,384 vectors of an 8B model; resident only when used.
DEFAULT_VECTOR_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine captures and steers.

    Args:
        sites: sites to arm. Each armed point costs a little time in every pass.
        layers: layers to arm them at.
        capture_bytes: most shared memory that rows may take on each capturing worker, in bytes.
        overflow: what a request does that finds no room: "wait" for its turn, or "error" (`CaptureMemoryFull`).
        overflow_timeout: seconds that requests wait while no request runs that could make room; then they fail.
        transport: how rows reach the client: "shared" memory, the "wire" (bytes over RPC), or "auto", which
            shares where it can.
        steering_slots: different steering configurations that can be in use at once; requests beyond wait.
        vector_bytes: memory of the vector bank on each worker, float32, in bytes.
        edits_per_point: rank-one edits that one configuration can have at one point.
        arena_bytes: device memory on each capturing worker for rows on their way to shared memory; None for twice
            what the largest pass can need at all armed points, or once, if that is more than a tenth of the
            device. Not used on CPU.
        reduce_bytes: most memory on each capturing worker's device for reductions that run along with their requests,
            in bytes; requests beyond wait, whatever `overflow` says. 0: rows are kept until their request ends, and
            reduced then.

    Raises:
        InvalidSetting: a value that does not fit.
        UnknownName: an unknown site.
    """

    sites: str | Sequence[str] = ("resid_post",)
    layers: Layers = "all"
    capture_bytes: int = DEFAULT_CAPTURE_BYTES
    overflow: Overflow = "wait"
    overflow_timeout: float = 60.0
    transport: Transport = "auto"
    steering_slots: int = 256
    vector_bytes: int = DEFAULT_VECTOR_BYTES
    edits_per_point: int = 16
    arena_bytes: int | None = None
    reduce_bytes: int = DEFAULT_REDUCE_BYTES

    def __post_init__(self) -> None:
        sites = (self.sites,) if isinstance(self.sites, str) else tuple(dict.fromkeys(self.sites))
        for site in sites:
            SITES[site]
        object.__setattr__(self, "sites", sites)
        for name, allowed in (("overflow", get_args(Overflow)), ("transport", get_args(Transport))):
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidSetting(f"{name}={value!r}; use one of {', '.join(map(repr, allowed))}")
        for name in ("capture_bytes", "steering_slots", "vector_bytes", "edits_per_point"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidSetting(f"{name}={value!r}; give a whole number above 0")
        if isinstance(self.reduce_bytes, bool) or not isinstance(self.reduce_bytes, int) or self.reduce_bytes < 0:
            raise InvalidSetting(f"reduce_bytes={self.reduce_bytes!r}; give a whole number, 0 or above")
        if self.arena_bytes is not None and (not isinstance(self.arena_bytes, int) or self.arena_bytes < 1):
            raise InvalidSetting(f"arena_bytes={self.arena_bytes!r}; give a whole number above 0, or None")
        if self.overflow_timeout <= 0:
            raise InvalidSetting(f"overflow_timeout={self.overflow_timeout}; give seconds above 0")

    def armed(self, num_layers: int) -> tuple[Point, ...]:
        """Every point to arm, layer by layer.

        Raises:
            LayerOutOfRange: a layer the model does not have.
        """
        return tuple(Point(layer, site) for layer in resolve_layers(self.layers, num_layers) for site in self.sites)
