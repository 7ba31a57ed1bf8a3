"""Settings of steercap itself, validated at construction; all other arguments of SteerModel are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from steercap.architectures.families.derived import SITES as DERIVED_SITES
from steercap.architectures.families.derived import proving
from steercap.architectures.sites import SITES, placed
from steercap.core.names import Name
from steercap.core.spec import (
    MOST_NUMBERS,
    MOST_SEED,
    Layers,
    Point,
    parse_layers,
    parse_names,
    points_of,
    resolve_layers,
)
from steercap.core.values import choices, index_of, number_of, shown
from steercap.errors import InvalidSetting, UnsupportedModel
from steercap.kernels.codecs import codec_of

Overflow = Literal["wait", "error", "spill"]
Transport = Literal["auto", "shared", "wire"]
Preset = Literal["cpu"]

#: vLLM's engine arguments for a small model on a CPU: nothing is compiled, rows are float32, and keys and values of
#: 5,000 tokens of SmolLM2-135M, or 1,100 of a model of 0.6B, have room.
CPU: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 256 << 20,
        "use_tqdm_on_load": False,
    }
)
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"cpu": CPU})

#: Upper bound on all whole-number settings: an exbibyte.
MOST: Final = 1 << 60

#: Default `capture_bytes`: rows of 113,000 tokens of an 8B model at one layer; resident only when used.
DEFAULT_CAPTURE_BYTES: Final = 4 << 30

#: Default `spill_bytes`, eight times `DEFAULT_CAPTURE_BYTES`; allocated on disk when rows are spilled.
DEFAULT_SPILL_BYTES: Final = 32 << 30

#: Default `reduce_bytes`: 450 requests of an 8B model that reduce at all layers; less if fewer can run. With
#: `device_ring_bytes` and the tables of edits it is less than 4 GB, with every site of such a model armed.
DEFAULT_REDUCE_BYTES: Final = 1 << 29

#: Default `vector_bytes`: 16,384 vectors of an 8B model; resident only when used.
DEFAULT_VECTOR_BYTES: Final = 256 << 20


#: Sites of the block outputs that are added to the residual stream.
ADDED: Final = frozenset({"attn_out", "mlp_out"})
#: Sites of the terms that streams are mixed from, in a layer with several streams.
MIXED: Final = ADDED | {
    "mhc_streams_pre_attn",
    "mhc_attn_post_mix",
    "mhc_attn_res_mix",
    "mhc_streams_pre_mlp",
    "mhc_ffn_post_mix",
    "mhc_ffn_res_mix",
}
#: Value of `Settings.sites` for every site that the model has.
ALL: Final = "all"
#: Site of the residual stream at the end of a layer.
LAYER_END: Final = "resid_post"


#: Hint in the error for a model that carries several streams and lacks a requested site.
_SEVERAL: Final = (
    "; it carries several streams, see sites='mhc_streams_pre_attn', 'mhc_streams_pre_mlp' and 'mhc_streams_final'"
)

#: Default `sketch_bytes`: mean and covariance at 32 points of an 8B model; allocated when a sketch begins.
DEFAULT_SKETCH_BYTES: Final = 4 << 30

#: Default `sae_bytes`: encoders of six SAEs of 65,536 features of a 2B model; allocated at first use.
DEFAULT_SAE_BYTES: Final = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Capture and steering settings of one engine.

    Args:
        sites: sites to arm, or "all" that the model has. Each armed point costs a little time in every pass. The input
            or output of a module is a site too, by its path: "model.layers.*.mlp.down_proj.input" at `layers`,
            "model.layers.5.input_layernorm.output" at one layer, "model.norm.output". TransformerLens's names are
            accepted as well.
        layers: layers at which to arm the sites. `resid_post` of the last layer is always armed (`mhc_streams_final`,
            where the model carries several streams): the proof at start reads it. The other terms of its sum are armed
            too where `attn_out` or `mlp_out` is armed anywhere. In float16, `resid_post` of every layer from the first
            armed one on is armed as well, since edited rows can overflow there.
        codec: name of the codec that stores rows where a `CaptureSpec` names none.
        codec_k, codec_seed: default `k` and `seed` of codecs that have them, where a `CaptureSpec` gives none; None for
            the codec's own defaults.
        capture_bytes: maximum shared memory for rows on each capturing worker, in bytes.
        overflow: policy for a request whose rows have no room: "wait" for its turn; "error" (`CaptureMemoryFull`); or
            "spill", which waits while unfetched rows of finished requests are moved to disk, the oldest first.
        overflow_timeout: maximum seconds that requests wait for room while no running request can make room; then they
            fail.
        spill_folder: folder of the spill file; None for `TMPDIR`, or /var/tmp. The file is unnamed, and vanishes with
            this process.
        spill_bytes: maximum bytes of rows on disk, of all workers together.
        transport: transport of rows to the client: "shared" memory, "wire" (bytes over RPC), or "auto": shared where
            possible.
        steering_slots: maximum number of different steering configurations in use at once; further requests wait.
        vector_bytes: memory of the vector bank on each worker, float32, in bytes.
        edits_per_point: maximum number of rank-one edits of one configuration at one point.
        device_ring_bytes: device memory on each capturing worker for rows on their way to shared memory, in bytes; None
            for at most 2.5 GiB and a tenth of the device, or more if a pass in a CUDA graph or the rows of one layer
            need it. Rows of larger passes are copied out while the pass runs. Not used on CPU.
        reduce_bytes: maximum memory on each capturing worker's device for reductions that are updated in each pass, in
            bytes; further requests wait, whatever `overflow` says. 0: rows are kept until their request ends, and
            reduced then.
        sketch_bytes: maximum memory on each capturing worker's device for sketches, in bytes. 0: no sketches.
        sae_bytes: maximum memory on each capturing worker's device for SAEs that read rows, in bytes. 0: no SAEs.
        restart: True to restart a dead engine when it is next needed. Requests whose texts have not been returned are
            run again; rows not yet fetched are recomputed from their tokens, and their receipt says so. A stream that
            has begun, and a sketch, fail as without a restart.

    Raises:
        InvalidSetting, InvalidSpec: a value is out of range or of another type.
        UnknownName: a site or codec does not exist.
    """

    sites: str | Sequence[str] = ("resid_post",)
    layers: Layers = "all"
    codec: str = "raw"
    codec_k: int | None = None
    codec_seed: int | None = None
    capture_bytes: int = DEFAULT_CAPTURE_BYTES
    overflow: Overflow = "wait"
    overflow_timeout: float = 60.0
    spill_folder: str | os.PathLike[str] | None = None
    spill_bytes: int = DEFAULT_SPILL_BYTES
    transport: Transport = "auto"
    steering_slots: int = 256
    vector_bytes: int = DEFAULT_VECTOR_BYTES
    edits_per_point: int = 16
    device_ring_bytes: int | None = None
    reduce_bytes: int = DEFAULT_REDUCE_BYTES
    sketch_bytes: int = DEFAULT_SKETCH_BYTES
    sae_bytes: int = DEFAULT_SAE_BYTES
    restart: bool = False

    def __post_init__(self) -> None:
        keep = object.__setattr__
        keep(self, "_every_site", isinstance(self.sites, str) and self.sites == ALL)
        keep(self, "_named", tuple(map(Name, SITES)) if self.every_site else parse_names(self.sites))
        keep(self, "sites", tuple(dict.fromkeys(name.site for name in self.named)))
        keep(self, "layers", parse_layers(self.layers))
        for site in self.sites:
            SITES[site]
        codec_of(self.codec)
        for name, least, most in (("codec_k", 1, MOST_NUMBERS), ("codec_seed", 0, MOST_SEED)):
            if getattr(self, name) is not None:
                keep(self, name, _whole(name, getattr(self, name), least=least, most=most, otherwise=", or None"))
        for name, allowed in (("overflow", get_args(Overflow)), ("transport", get_args(Transport))):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in allowed):
                raise InvalidSetting(f"{name}={shown(value)}; {choices(value, allowed)}")
        keep(self, "spill_folder", _path("spill_folder", self.spill_folder))
        for name in ("capture_bytes", "spill_bytes", "steering_slots", "vector_bytes", "edits_per_point"):
            keep(self, name, _whole(name, getattr(self, name), least=1))
        for name in ("reduce_bytes", "sketch_bytes", "sae_bytes"):
            keep(self, name, _whole(name, getattr(self, name), least=0))
        if self.device_ring_bytes is not None:
            keep(
                self,
                "device_ring_bytes",
                _whole("device_ring_bytes", self.device_ring_bytes, least=1, otherwise=", or None"),
            )
        keep(self, "overflow_timeout", _seconds("overflow_timeout", self.overflow_timeout))
        if not isinstance(self.restart, bool):
            raise InvalidSetting(f"restart={shown(self.restart)}; give True or False")

    @property
    def every_site(self) -> bool:
        """True if `sites` was "all"; then sites that the model lacks are skipped."""
        return bool(self.__dict__["_every_site"])

    @property
    def named(self) -> tuple[Name, ...]:
        """Parsed names of the sites to arm; some have a layer of their own."""
        found: tuple[Name, ...] = self.__dict__["_named"]
        return found

    def armed(
        self,
        num_layers: int,
        *,
        overflows_later: bool = False,
        exists: Callable[[Point], bool] = lambda _: True,
        derived: bool = False,
        end: str = LAYER_END,
        within: Sequence[str] = (),
    ) -> tuple[Point, ...]:
        """Return every point to arm, ordered by layer: those of the settings, and those that the proof at start needs.

        Args:
            num_layers: number of layers of the model.
            overflows_later: True if an edited row can overflow in a later layer, as in float16. Then `resid_post` of
                every layer from the first armed one on is armed too, so that no key or value is computed from such a
                row.
            exists: predicate that says if the model has a point: a layer with experts has no `neurons`, a dense layer
                no `router`.
            derived: True if the layers' family may have to be derived, since none has its architecture; then
                the stream is armed at every layer, and at each requested point the sites of its proof.
            end: name of the last layer's site from which the model computes its logits.
            within: names of further sites of the last layer that the proof of the residual sum needs.

        Raises:
            LayerOutOfRange: a layer index is outside the model.
            UnsupportedModel: none of the layers has a site of the settings.
        """
        layers = resolve_layers(self.layers, num_layers)
        asked = [point for name in self.named for point in points_of(name, self.layers, num_layers)]
        points = list(filter(exists, placed(asked, num_layers)))
        missing = set(self.sites) - {point.site for point in points}
        if missing and not self.every_site:
            raise UnsupportedModel(
                f"this model has no {', '.join(sorted(missing))} at any of the layers {list(layers)}; leave it out of "
                "SteerModel(..., sites=)" + ("" if end == LAYER_END else _SEVERAL)
            )
        if overflows_later:
            points += [Point(layer, LAYER_END) for layer in range(layers[0], num_layers)]
        points.append(Point(num_layers - 1, end))  # read by the proof at start
        if not (ADDED if end == LAYER_END else MIXED).isdisjoint(self.sites):
            terms = ("resid_pre", *sorted(ADDED), *within) if end == LAYER_END else sorted(MIXED)
            points += filter(exists, (Point(num_layers - 1, site) for site in terms))
        if derived:
            points += [Point(layer, site) for layer in range(num_layers) for site in DERIVED_SITES]
            points += [Point(point.layer, term) for point in tuple(points) for term in proving(point.site)]
        return tuple(sorted(dict.fromkeys(points), key=lambda point: point.layer))


def with_preset(preset: str | None, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the engine arguments of a preset with explicit ones, which take precedence.

    Raises:
        InvalidSetting: there is no preset of this name.
    """
    if preset is not None and not (isinstance(preset, str) and preset in PRESETS):
        raise InvalidSetting(f"preset={shown(preset)}; {choices(preset, PRESETS)}, or leave it out")
    return {**PRESETS.get(preset or "", {}), **engine_args}


def _seconds(name: str, value: object) -> float:
    """Parse a setting in seconds, above 0.

    Raises:
        InvalidSetting: not a number, or not above 0.
    """
    seconds = number_of(value)
    if seconds is None or not seconds > 0:
        raise InvalidSetting(f"{name}={shown(value)}; give seconds above 0")
    return seconds


def _path(name: str, value: object) -> str | None:
    """Return the path setting `name` as a string; None for None.

    Raises:
        InvalidSetting: the value is no path, or empty.
    """
    if value is None:
        return None
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str) or not found or "\0" in found:
        raise InvalidSetting(f"{name}={shown(value)}; give the path of a folder, or None")
    return found


def _whole(name: str, value: object, *, least: int, most: int = MOST - 1, otherwise: str = "") -> int:
    """Return a setting as an int, from `least` to `most`; `otherwise` is added to the error message.

    Raises:
        InvalidSetting: the value is no whole number, or out of range.
    """
    found = index_of(value)
    if found is None or not least <= found <= most:
        bound = f"{least} to {most:,}" if most < MOST - 1 else "above 0" if least else "0 or above"
        raise InvalidSetting(f"{name}={shown(value)}; give a whole number, {bound}{otherwise}")
    return found
