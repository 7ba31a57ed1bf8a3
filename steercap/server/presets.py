"""Presets: model names that stand for steering, such as "qwen3-8b+calm", for clients unaware of steercap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steercap.steering.spec import SteeringSpec


class Presets:
    """Presets of the operator.

    Args:
        names: served names of the model itself.
        steering: steering by preset name.
    """

    def __init__(self, names: Iterable[str], steering: Mapping[str, SteeringSpec]) -> None:
        self._steering = {f"{name}+{preset}": spec for name in names for preset, spec in steering.items()}

    @property
    def aliases(self) -> tuple[str, ...]:
        """All model names that stand for steering."""
        return tuple(self._steering)

    def of(self, model: Any) -> SteeringSpec | None:
        """Return the steering of a model name, None if it is no preset."""
        return self._steering.get(model) if isinstance(model, str) else None
