"""Steering specs: edits of rows and biases of logits, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch

from steercap.core.biases import Bias
from steercap.core.hints import dataclass
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, parts_of, shown, truth_of, warn
from steercap.errors import InvalidEdit, InvalidSpec, InvalidVector
from steercap.files import native
from steercap.files.native import FileKind
from steercap.steering.edits import EDITS, Edit
from steercap.steering.edits.add import Add
from steercap.steering.edits.inputs import Vector, float32_copy, layers_among, models_of
from steercap.steering.layers import LayerVectors

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
        tokens: positions, as for `Edit`; logits must be made at one of them at least.

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
        """Name of the operation, "LogitBias"."""
        return type(self).__name__

    @property
    def selection(self) -> TokenSelection:
        """Selection of positions, parsed from `tokens`."""
        return cast("TokenSelection", self.tokens)

    @property
    def vocabulary(self) -> int | None:
        """Required size of the vocabulary, if `bias` is an array; None if it is a mapping."""
        return len(self.bias) if isinstance(self.bias, torch.Tensor) else None

    def lower(self, edit: int, scope: int) -> Bias:
        """Return the bias in the form that is sent to workers.

        Args:
            edit: index of this bias among the spec's edits.
            scope: index of its token selection among those of the spec's biases.
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
    """Return the biases as floats by token id, ascending, after checking ids and values."""
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


@dataclass(frozen=True, eq=False)
class SteeringSpec:
    """Edits of rows, applied in the order given, and biases of logits.

    Args:
        edits: edits and `LogitBias`; a nested spec stands for its edits.
        preserve_norm: True to rescale each row, at each point, to the norm it had before these edits.

    Raises:
        InvalidSpec: no edit, something that is not an edit, `preserve_norm` inside `preserve_norm`, or around biases of
            logits alone.

    `a + b` is a spec with the edits of a, then those of b.
    """

    edits: Sequence[Edit | LogitBias | SteeringSpec]
    preserve_norm: bool = False

    def __post_init__(self) -> None:
        alone = isinstance(self.edits, (Edit, LogitBias, SteeringSpec))
        edits = [self.edits] if alone else parts_of(self.edits, "SteeringSpec: edits")
        if edits is None:
            raise InvalidSpec(f"SteeringSpec({shown(self.edits)}); give a list of edits")
        object.__setattr__(self, "edits", tuple(edits))
        object.__setattr__(self, "preserve_norm", truth_of(self.preserve_norm, "SteeringSpec: preserve_norm"))
        for edit in self.edits:
            if not isinstance(edit, (Edit, LogitBias, SteeringSpec)):
                raise InvalidSpec(f"SteeringSpec: {shown(edit)} is not an edit; give steercap's Add, Cap, Ablate, ...")
            if self.preserve_norm and isinstance(edit, SteeringSpec) and edit.keeps_norm:
                raise InvalidSpec("SteeringSpec: preserve_norm inside preserve_norm; set it once, outside or inside")
        if not self.edits:
            raise InvalidSpec("SteeringSpec([]) changes nothing; give at least one edit, or steering=None")
        if self.preserve_norm and not self.of_rows():
            raise InvalidSpec(
                "SteeringSpec: preserve_norm= is for rows, which a LogitBias does not change; leave it out"
            )

    @classmethod
    def by_layer(cls, edit: type[Edit], /, *given: Any, **named: Any) -> SteeringSpec:
        """Return a spec with an edit for each layer of vectors: `SteeringSpec.by_layer(Add, vectors, scale=4.0)`.

        Args:
            edit: class of the edits.
            given, named: its arguments, with LayerVectors, or dicts by layer, for its vectors. `site` is by
                default theirs. `layer` or `layers` selects some of their layers; by default all that each of them has.

        Raises:
            InvalidVector: no argument is by layer, or one has no vector for a layer.
            The errors of the edit.
        """
        vectors = [value for value in (*given, *named.values()) if isinstance(value, Mapping)]
        layer, layers = (named.pop(name, None) for name in ("layer", "layers"))
        if layer is not None and layers is not None:
            raise InvalidEdit(f"{edit.__name__}: give layer= for one layer, or layers= for several (and not both)")
        common = [
            layer
            for layer in (vectors or [{}])[0]
            if index_of(layer) is not None and all(layer in one for one in vectors)
        ]
        asked = layers if layer is None else layer
        wanted = common if asked is None else layers_among(asked, common)
        if not common:
            raise InvalidVector(
                f"{edit.__name__}: no vectors by layer, or for no layer in common; give LayerVectors, such as "
                "directions['name']"
            )
        if not wanted or any(index_of(one) is None for one in wanted):
            raise InvalidVector(f"{edit.__name__}: layers={shown(asked)}; give some of {common}")
        named = {"site": getattr(vectors[0], "site", "resid_post")} | named
        named |= {name: tuple(value) for name, value in named.items() if isinstance(value, Iterator)}  # read once
        named |= {name: TokenSelection.parse(named[name]) for name in {"tokens"} & named.keys()}
        once = [layer for place, layer in enumerate(wanted) if layer not in wanted[:place]]
        return cls([edit(*given, **named, layer=layer) for layer in once])

    def __add__(self, other: SteeringSpec) -> SteeringSpec:
        return SteeringSpec([self, other])

    def flat(self) -> tuple[Edit | LogitBias, ...]:
        """Return all edits and biases in order, those of nested specs included."""
        return tuple(edit for edit, _ in self.segments())

    def of_rows(self) -> tuple[Edit, ...]:
        """Return the edits of rows in order, those of nested specs included, without biases of logits."""
        return tuple(edit for edit in self.flat() if isinstance(edit, Edit))

    def save(self, path: str | Path, *, model: str = "", provenance: Mapping[str, Any] | None = None) -> Path:
        """Write the spec to one safetensors file, and return its path; see `steercap.files.native`.

        Args:
            path: the file, which appears as a whole or not at all.
            model: model that the spec was made for; "" for that of the edits' vectors.
            provenance: origin of the spec as JSON-compatible data, stored in the header.
        """
        known = models_of(edit.model for edit in self.of_rows())
        if len(known) > 1 and not model:
            warn(f"{path} names no model: its edits are of {known}; give model= to say which")
        model = model or (known[0] if len(known) == 1 else "")
        return native.save(self, path, _kind(), model=model, provenance=provenance)

    @staticmethod
    def load(path: str | Path) -> SteeringSpec:
        """Read a file that `save` wrote; each edit's `model` is the one in the file's header.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        spec, model = native.load(path, _kind(), SteeringSpec), native.read_header(path).model
        for edit in spec.of_rows():
            object.__setattr__(edit, "model", model)
        return spec

    @property
    def sha256(self) -> str:
        """SHA-256 of the spec's content, in hexadecimal; specs with the same digest have the same edits."""
        return native.sha256_of(self, _kind())

    @property
    def keeps_norm(self) -> bool:
        """True if the spec, or one nested in it, has `preserve_norm`."""
        return self.preserve_norm or any(isinstance(edit, SteeringSpec) and edit.keeps_norm for edit in self.edits)

    def segments(self, path: tuple[int, ...] = ()) -> Iterator[tuple[Edit | LogitBias, tuple[int, ...] | None]]:
        """Yield all edits and biases in order, each with the outermost spec around it that preserves norms.

        Args:
            path: indices that lead from the outermost spec to this one, () if it is the outermost.

        Yields:
            The edit, and the indices that lead to that spec, None if there is none; a spec that occurs twice has two
            paths.
        """
        for place, edit in enumerate(self.edits):
            if not isinstance(edit, SteeringSpec):
                yield edit, path if self.preserve_norm else None
            else:
                for inner, keeper in edit.segments((*path, place)):
                    yield inner, path if self.preserve_norm else keeper


#: Values of `steering=`: LayerVectors are added, each at its layer, to all tokens.
Steering: TypeAlias = SteeringSpec | Edit | LogitBias | LayerVectors


def spec_of(steering: Any, what: str = "steering") -> SteeringSpec:
    """Return a user's steering as a spec; a single edit or bias becomes a spec of one.

    Args:
        steering: one of the types of `Steering`.
        what: name of the argument in messages.

    Raises:
        InvalidSpec: it is of another type.
    """
    if isinstance(steering, SteeringSpec):
        return steering
    if isinstance(steering, (Edit, LogitBias)):
        return SteeringSpec([steering])
    if isinstance(steering, LayerVectors):
        return SteeringSpec.by_layer(Add, steering)
    hint = next((hint for kinds, hint in _HINTS if isinstance(steering, kinds)), "")
    raise InvalidSpec(
        f"{what}={shown(steering)} is of type {type(steering).__name__}; give a SteeringSpec, an edit, a LogitBias or "
        f"LayerVectors{hint}"
    )


#: Advice on values of other types; a list is one value for each prompt where a call takes it, so never several edits.
_HINTS: Final = (
    ((list, tuple), ", and several edits as SteeringSpec([...])"),
    (
        (str, Path),
        ", which SteeringSpec.load or LayerVectors.load read from a file; only calls to a server take a name",
    ),
    ((Mapping,), ", such as one direction of a set, directions['name']"),
)


def _kind() -> FileKind:
    """Return the file format of steering: edits without `model`, which the header has, `Replace` without `tokens`."""

    def left_out(value: object) -> tuple[str, ...]:
        if not isinstance(value, Edit):
            return ()
        return ("model", "tokens") if value.replaced else ("model",)

    return FileKind(
        "steering", {"SteeringSpec": SteeringSpec, "LogitBias": LogitBias, **EDITS}, left_out=left_out, noun="edit"
    )
