"""Length of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.lab.measures import Answered, Measure

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Length(Measure):
    """Number of generated tokens, the one that ended the answer included."""

    axis = "generated tokens"

    @property
    def label(self) -> str:
        return "length"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [float(len(record.output_token_ids)) for record in records]


MEMBER = Length
