"""Bias of logits: an addition to the logits that tokens are sampled from, at chosen positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from steercap.core.biases import Bias
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, shown
from steercap.errors import InvalidEdit
from steercap.steering.edits.inputs import Vector, float32_copy

_FLOAT32: Final = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class LogitBias:
    """Bias added to logits at some positions: logit[token] <- logit[token] + bias[token].

    The logits made at position `p` predict the token at `p + 1`. vLLM makes them at the last token of the prompt and at
    each generated one, so only these positions of `tokens` count: the first generated token comes from `"last_prompt"`,
    the second from the first of `"generated"`. Biases are added before vLLM's own processing, so `logprobs` include
    them, although they do not include vLLM's own `logit_bias`. Several biases of one token add up.

    Args:
        bias: number added to the logit of each token, in nats, by its id; or an array [vocabulary], whose zeros are
            left out. Any finite numbers, kept as float32.
        tokens: positions, as for `Edit`; at least one of them must have logits.

    Raises:
        InvalidEdit: no token, an id that is not a whole number from 0, or a number that float32 cannot hold.
        InvalidVector: an array that is not one vector of finite numbers.
        InvalidSelection: a malformed `tokens`.
    """

    bias: Mapping[int, float] | Vector
    tokens: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        given: Any = self.bias
        kept = _by_id(given) if isinstance(given, Mapping) else float32_copy(given, "LogitBias: bias", "vocabulary")
        if not (kept if isinstance(kept, dict) else kept.any()):
            raise InvalidEdit(f"LogitBias({shown(given)}) changes nothing; give at least one token")
        object.__setattr__(self, "bias", kept)

    if not TYPE_CHECKING:  # every access returns a copy, as for an edit's vectors

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if isinstance(value, torch.Tensor):
                return value.clone()
            return dict(value) if name == "bias" and isinstance(value, dict) else value

    @property
    def name(self) -> str:
        """Name of the operation."""
        return type(self).__name__

    @property
    def selection(self) -> TokenSelection:
        """Positions, parsed."""
        return cast("TokenSelection", self.tokens)

    @property
    def vocabulary(self) -> int | None:
        """Required size of the vocabulary; None if single tokens were given."""
        return len(self.bias) if isinstance(self.bias, torch.Tensor) else None

    def lower(self, edit: int, scope: int) -> Bias:
        """Return the bias in the workers' form.

        Args:
            edit: its index in the spec.
            scope: index of its positions among those of the spec's biases.
        """
        if isinstance(self.bias, torch.Tensor):
            ids = self.bias.nonzero()[:, 0]
            return Bias.of(edit, scope, ids.tolist(), self.bias[ids].tolist())
        assert isinstance(self.bias, Mapping)
        return Bias.of(edit, scope, list(self.bias), [float(add) for add in self.bias.values()])

    def __repr__(self) -> str:
        said = f"<{self.vocabulary}>" if self.vocabulary else shown(self.bias)
        return f"{self.name}({said}, tokens={self.selection})"


def _by_id(given: Mapping[Any, Any]) -> dict[int, float]:
    """Return the biases by token id, ascending, checked."""
    found: dict[int, float] = {}
    for key, value in given.items():
        token, number = index_of(key), number_of(value)
        if token is None or not 0 <= token < 1 << 31:
            raise InvalidEdit(f"LogitBias: {shown(key)} is not the id of a token; give whole numbers from 0")
        if number is None or not abs(number) <= _FLOAT32.max:
            raise InvalidEdit(f"LogitBias: the bias of token {token} is {shown(value)}; give a number of float32")
        if token in found:
            raise InvalidEdit(f"LogitBias: token {token} has two biases; give one")
        found[token] = number
    return dict(sorted(found.items()))
