"""Settings of a server that records: where to, which rows, in which codecs, and how many."""

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

#: Maximum bytes of rows that wait to be written.
QUEUE_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recorder.

    Args:
        folder: folder to record to.
        codecs: sites that are recorded, with the codec of each.
        layers, tokens: layers and tokens that are recorded, as for `CaptureSpec`.
        fraction: fraction of the engine's requests that are recorded, drawn at random; see `Recorder`.
        prompts: False to leave out the prompts' token ids; then `tokens` must be "generated".
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
        """Spec of each recorded request's capture."""
        return self.codecs.spec(layers=self.layers, tokens=self.tokens)
