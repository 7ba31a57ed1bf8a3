"""Pictures that are drawn, not downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from steercap.core.extras import extra


def picture(seed: int, width: int = 56, height: int = 56) -> Any:
    """A picture that no other seed gives: PIL's, RGB.

    Coarse blocks of colour, which survive an image processor's resizing, so that every patch of it is another.

    Args:
        seed: of its colours.
        width, height: in pixels.
    """
    with extra("cuda", "cpu"):
        from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
