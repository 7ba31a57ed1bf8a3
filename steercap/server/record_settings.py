"""Settings of a server that records the rows of its requests: folder, sites and codecs, and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from steercap.captures.recordings import RecordLimits
from steercap.captures.site_codecs import SiteCodecs
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens
from steercap.errors import InvalidSetting

#: Default maximum bytes of rows that wait to be written.
QUEUE_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a `Recorder`.

    Args:
        folder: folder to write recordings to.
        codecs: sites to record, with the codec of each.
        layers, tokens: layers and tokens to record, as for `CaptureSpec`.
        fraction: fraction of the engine's requests to record, drawn at random; see `Recorder`.
        prompts: False to leave the prompts' token ids out; then `tokens` must be "generated".
        limits: limits of the folder.
        queue_bytes: maximum bytes of rows that wait to be written.

    Raises:
        InvalidSetting: a value that does not fit; and the errors of `CaptureSpec`.
    """

    folder: Path
    codecs: SiteCodecs = field(default_factory=lambda: SiteCodecs.parse(["resid_post"]))
    layers: Layers = "all"
    tokens: Tokens = "all"
    fraction: float = 1.0
    prompts: bool = True
    limits: RecordLimits = field(default_factory=RecordLimits)
    queue_bytes: int = QUEUE_BYTES

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise InvalidSetting(f"fraction={self.fraction}; give a number above 0, up to 1")
        generated = self.capture.tokens == CaptureSpec(tokens="generated").tokens
        if not (self.prompts or generated):
            raise InvalidSetting("prompts=False records no row of a prompt; give tokens='generated' beside it")

    @cached_property
    def capture(self) -> CaptureSpec:
        """Capture spec for recorded requests."""
        return self.codecs.spec(layers=self.layers, tokens=self.tokens)
