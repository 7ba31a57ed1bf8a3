"""Names of models that stand for steering: `model: "qwen3-8b+calm"` for clients that know nothing of steercap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steercap.steering.spec import SteeringSpec


class Presets:
    """The operator's presets.

    Args:
        names: of the model itself.
        steering: by the names of the presets.
    """

    def __init__(self, names: Iterable[str], steering: Mapping[str, SteeringSpec]) -> None:
        self._steering = {f"{name}+{preset}": spec for name in names for preset, spec in steering.items()}

    @property
    def aliases(self) -> tuple[str, ...]:
        """All names that stand for steering."""
        return tuple(self._steering)

    def of(self, model: Any) -> SteeringSpec | None:
        """What a model is steered by, None if it is not."""
        return self._steering.get(model) if isinstance(model, str) else None
