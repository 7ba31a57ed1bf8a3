"""Sites of the residual stream, or of several streams (mHC): embedding, before, within and after layers, final norm.

`embed` and `resid_pre` of layer 0 equal transformers' `hidden_states[0]`; `resid_pre` is `hidden_states[layer]` and
`resid_post` is `hidden_states[layer + 1]`, before any final norm. `embed` comes after any scale and position embedding,
`resid_mid` after attention has been added; logits are computed from `final_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.architectures.families.base import arguments_of, located, rows_of
from steercap.architectures.sites.base import (
    RowShape,
    Site,
    Sizes,
    Tap,
    Terms,
    Visit,
    _arguments,
    by_itself,
    output_tap,
    read_by,
    visit_output,
)
from steercap.architectures.sites.streams import HEAD, Coefficients, Streams, operators, tapped

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family
    from steercap.architectures.sites.base import Removable


class ResidPre(Site):
    """Site `resid_pre`: the residual stream at a layer's input, including a separate residual."""

    name: ClassVar[str] = "resid_pre"
    before_keys: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return not family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return stream_tap(layer, self.name, tap, taken_by(layer, family))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_input(layer, visit)


def taken_by(layer: nn.Module, family: Family) -> Terms:
    """Return a function that picks the stream's summands from the arguments of a vLLM layer's `forward`.

    Returns:
        Function of `args` and `kwargs` that returns the hidden states, and the residual or None.
    """
    names = arguments_of(layer)
    hidden_name, residual_name = family.hidden_input, family.residual_input
    hidden_at = names.index(hidden_name)
    residual_at = names.index(residual_name) if residual_name else len(names)

    def terms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name]
        return hidden, args[residual_at] if residual_at < len(args) else kwargs.get(residual_name)

    return terms


class Embed(ResidPre):
    """Site `embed`: the first layer's input, tapped before `resid_pre`; on the first pipeline stage."""

    name: ClassVar[str] = "embed"
    of_model = 0
    first: ClassVar[bool] = True


class ResidMid(Site):
    """Site `resid_mid`: the residual stream between the attention block and the feed-forward block."""

    first: ClassVar[bool] = True

    def known(self, family: Family) -> bool:
        return bool(family.resid_mid)

    def exists(self, family: Family, config: Any, layer: int) -> bool:
        # Layers that norm their sums have no such row: they continue with a norm's output.
        return self.known(family) and (family.varied or family.factor(config) is not None)

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.resid_mid)
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        module = layer.get_submodule(located(layer, family.resid_mid))
        return stream_tap(module, "resid_mid", tap, stream_and_residual(module))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        module = layer.get_submodule(located(layer, family.resid_mid))
        terms = stream_and_residual(module)

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit(terms(args, kwargs)[0])

        return module.register_forward_pre_hook(hook, with_kwargs=True)


class ResidPost(Site):
    """Site `resid_post`: the residual stream at a layer's output, including a separate residual."""

    def known(self, family: Family) -> bool:
        return not family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, "", "resid_post", tap, family.residual_output)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer, visit)


def norm_tap(norm: Any, tap: Tap) -> None:
    """Make vLLM's norm behind a layer tap `resid_post`, the sum of the norm's input and its residual.

    On CUDA, tap, sum and norm are one kernel. A call without a residual is not tapped, and the pass is then refused.

    Args:
        norm: vLLM's `RMSNorm`; its `_forward_method` is replaced.
        tap: parameters of the tap.
    """
    from steercap.kernels.tap import tap_norm

    norm.register_buffer("steercap_resid_post", tap.point, persistent=False)
    plain, kind = norm._forward_method, tap.kind  # noqa: SLF001 -- the one place that vLLM leaves to replace it

    def forward(module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return plain(x)
        x, residual = by_itself(x), by_itself(residual)
        point, epsilon = module.steercap_resid_post, module.variance_epsilon
        tap_norm(x, residual, module.weight.data, point, epsilon, kind)
        return x, residual

    norm._forward_method = MethodType(forward, norm)  # noqa: SLF001


class FinalNorm(Site):
    """Site `final_norm`: output of the norm after the last layer, once in a model, on the last pipeline stage."""

    of_model = -1
    within = "decoder"

    def known(self, family: Family) -> bool:
        return bool(family.norm) and not family.norms_embeddings and not family.norms_late

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        located(layer, family.norm)
        return RowShape((sizes.hidden,))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return output_tap(layer, family.norm, "final_norm", tap)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return visit_output(layer.get_submodule(located(layer, family.norm)), visit)


class BeforeAttention(Streams):
    """Site of the streams before the attention block, from which keys and values are computed."""

    before_keys: ClassVar[bool] = True


class FinalStreams(Site):
    """Site of the streams after the last layer, which the model collapses to one; on the last pipeline stage."""

    of_model = -1
    within = "decoder"

    def known(self, family: Family) -> bool:
        return family.mhc

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        operators(layer, HEAD)
        streams: Any = layer.hc_mult
        return RowShape((int(streams), sizes.hidden))

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> Removable:
        (head,) = operators(layer, HEAD)
        see = tapped(head.module, "mhc_streams_final", tap)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            see(args[0] if args else kwargs["hidden_states"])

        return head.module.register_forward_pre_hook(before, with_kwargs=True)

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> Removable:
        return visit_input(layer.get_submodule("hc_head"), visit)


#: By name.
MEMBERS: Final[Mapping[str, Site]] = {
    "embed": Embed(),
    "final_norm": FinalNorm(),
    "resid_mid": ResidMid(),
    "resid_post": ResidPost(),
    "resid_pre": ResidPre(),
    # Streams are [streams, hidden]; before layer 0's attention block they are the embedding, repeated. Factors by which
    # a block's output is added to each stream are [streams], 0 to 2. Matrices that mix the streams after a block are
    # [from, to], rows and columns of sum 1. Both are float32.
    "mhc_streams_pre_attn": BeforeAttention("mhc_streams_pre_attn", "attn"),
    "mhc_attn_post_mix": Coefficients("mhc_attn_post_mix", "attn", output=0, axes=1),
    "mhc_attn_res_mix": Coefficients("mhc_attn_res_mix", "attn", output=1, axes=2),
    "mhc_streams_pre_mlp": Streams("mhc_streams_pre_mlp", "ffn"),
    "mhc_ffn_post_mix": Coefficients("mhc_ffn_post_mix", "ffn", output=0, axes=1),
    "mhc_ffn_res_mix": Coefficients("mhc_ffn_res_mix", "ffn", output=1, axes=2),
    "mhc_streams_final": FinalStreams(),
}


def stream_tap(module: nn.Module, name: str, tap: Tap, terms: Terms) -> RemovableHandle:
    """Tap the residual stream at a module's input.

    Args:
        module: module to tap.
        name: name of the site, used in the name of the buffer.
        tap: parameters of the tap.
        terms: function from the module's `args` and `kwargs` to the stream, and the residual to add to it or None.
    """
    from steercap.kernels.tap import tap as operator

    buffer = f"steercap_{name}"
    module.register_buffer(buffer, tap.point, persistent=False)
    kind = tap.kind

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, residual = terms(args, kwargs)
        operator(rows_of(hidden), None if residual is None else rows_of(residual), getattr(module, buffer), kind)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def stream_and_residual(module: nn.Module) -> Terms:
    """Return a function that picks the stream, and the residual or None, from the arguments of a norm or block."""
    names = _arguments(module)
    at, name = read_by(module)
    beside = names.index("residual") if "residual" in names else 0 if names else 1

    def terms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        residual = args[beside] if 0 < beside < len(args) else kwargs.get("residual")
        return args[at] if at < len(args) else kwargs[name], residual

    return terms


def visit_input(module: nn.Module, visit: Visit) -> RemovableHandle:
    """Call `visit` with the first argument of a transformers module in each pass; return the hook's handle."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visit(args[0] if args else kwargs["hidden_states"])

    return module.register_forward_pre_hook(hook, with_kwargs=True)
