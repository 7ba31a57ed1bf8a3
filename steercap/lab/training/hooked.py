"""transformers model whose activations are read or changed at steercap's points, by hooks in each forward pass.

transformers has several implementations of attention, and some ignore features of a model: sdpa the soft cap of Gemma
2. So the chosen implementation is compared with the eager one, which is complete, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steercap.architectures.decoder import Decoder, decoder_of
from steercap.architectures.families import architectures_within, families_of, family_of
from steercap.architectures.families.base import Family
from steercap.architectures.sites import SITES
from steercap.architectures.sites.base import Visit
from steercap.core.extras import extra
from steercap.core.spec import Point
from steercap.errors import InvalidSetting, InvalidSpec, ModelNotLoaded, UnsupportedModel
from steercap.files.fingerprint import nearest_path

#: Number of tokens of the random text on which implementations of attention are compared.
COMPARED: Final = 32
#: Tolerance of the mean absolute difference of a token's loss, in nats; in 16 bits, `UNITS` rounding units.
BOUND, UNITS = 1e-4, 4
EAGER: Final = {"attn_implementation": "eager"}
#: Point, and the function to call with the point's rows.
Visited: TypeAlias = "tuple[Point, Visit]"


class HookedModel:
    """Frozen transformers model with its decoder layers, addressed by steercap's points.

    Attention is computed by the implementation that transformers chooses if its losses on a short text are those of the
    eager one. Otherwise, or if the model caps its scores, which sdpa ignores, the eager one is used.

    Args:
        path: checkpoint, or a name on the hub.
        dtype: dtype to compute in.
        device: torch device; None for transformers' default.
        **loading: further arguments of transformers' `from_pretrained`, such as `device_map="auto"` for a model over
            several devices, by accelerate.

    Raises:
        InvalidSetting: both `device` and `device_map`.
        ModelNotLoaded: there is no such checkpoint.
        UnsupportedModel: the model's layers are not found, or of no known kind; or `attn_implementation` was given, and
            transformers has none of that name for the model, or its losses differ from those of the eager one, or are
            not finite.
    """

    def __init__(
        self, path: str | Path, dtype: torch.dtype = torch.float32, *, device: str | None = None, **loading: Any
    ) -> None:
        if device is not None and loading.get("device_map") is not None:
            raise InvalidSetting(f"device={device!r}, device_map={loading['device_map']!r}; give one of them")
        with extra("cuda", "cpu"):
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        try:
            config = AutoConfig.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            near = nearest_path(str(path)) if Path(path).absolute().parent.is_dir() else ""
            raise ModelNotLoaded(f"no configuration of a model at {str(path)!r}{near}: {error}") from error
        text = config.get_text_config()
        kind = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
        self.path = str(path)
        self.config: Any = config
        try:
            self.model: Any = kind.from_pretrained(str(path), dtype=dtype, **loading)
        except (ValueError, ImportError) as error:
            if loading.get("attn_implementation") is None or "attention" not in str(error).lower():
                raise
            raise UnsupportedModel(
                f"attn_implementation={loading['attn_implementation']!r} of {path}: {error}"
            ) from error
        if device is not None:
            self.model.to(device)
        self.model.eval().requires_grad_(requires_grad=False)
        self._check_attention(loading, lambda: kind.from_pretrained(str(path), dtype=dtype, **{**loading, **EAGER}))
        decoder = self.model if text is config else self.model.get_decoder()
        # LongCat's `num_hidden_layers` counts blocks of attention, two in each layer.
        count = text.num_layers if text.model_type == "longcat_flash" else text.num_hidden_layers
        within = () if text is config else architectures_within(text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        self.decoder: Decoder = decoder_of(decoder, count, range(count))
        self.layers: Mapping[int, nn.Module] = self.decoder.layers
        self.family: Family = _family((*config.architectures, *within), self.layers)
        self.width: int = text.hidden_size
        self.vocabulary: int = self.model.get_input_embeddings().num_embeddings

    def __repr__(self) -> str:
        return f"HookedModel({self.path!r}, {len(self.layers)} layers × {self.width}, {self.dtype} on {self.device})"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the model computes."""
        found: torch.dtype = self.model.dtype
        return found

    @property
    def device(self) -> torch.device:
        """Device for token ids: that of the embedding; the CPU if accelerate has offloaded it."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return torch.device("cpu") if found.type == "meta" else found  # offloaded: accelerate moves the tokens

    def visit(self, hooks: ExitStack, visits: Iterable[Visited]) -> None:
        """Add hooks that call functions with points' rows, [..., width], in each pass; they may change rows in place.

        Args:
            hooks: stack that removes the hooks when it is closed.
            visits: pairs of a point and a function; functions of one module run in the order given.

        Raises:
            InvalidSpec: the model has no such point.
        """
        for point, visit in visits:
            try:
                hook = SITES[point.site].visit(self.decoder.holder(point), self.family, visit)
            except AttributeError as error:
                raise InvalidSpec(f"{point}: the layers of {self.path} have no such site ({error})") from error
            hooks.callback(hook.remove)

    @contextmanager
    def checkpointed(self, layers: Iterable[int]) -> Iterator[None]:
        """In the block, store only these layers' inputs for the backward pass, which recomputes the layers.

        transformers' own checkpointing would call hooks a second time, and only works on a model in training mode.
        """
        with ExitStack() as undo:
            for layer in map(self.layers.__getitem__, layers):
                before = vars(layer).get("forward")  # accelerate places one of its own there
                computed = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                layer.forward = computed
                undo.callback(_restore_forward, layer, before)
            yield

    def _check_attention(self, loading: Mapping[str, Any], load_eager: Callable[[], Any]) -> None:
        """Switch to the eager implementation of attention, unless the chosen one gives the same losses.

        Args:
            loading: further arguments that the model was loaded with.
            load_eager: function that loads the model with the eager implementation, for classes that cannot switch.

        Raises:
            UnsupportedModel: the implementation was given and differs; or losses to compare are not finite.
        """
        with extra("cuda", "cpu"):
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        text = self.model.config.get_text_config()
        chosen = text._attn_implementation  # noqa: SLF001 -- transformers has no public name for it
        computes = ALL_ATTENTION_FUNCTIONS.get(chosen)
        if chosen == "eager" or (
            computes is not None and not computes.__module__.startswith(("transformers.", "steercap."))
        ):
            return  # one that the user registered is meant to differ
        own = self._short_losses(self.model)
        other = self.model
        if self.model._can_set_attn_implementation():  # noqa: SLF001
            self.model.set_attn_implementation("eager")
        else:
            other = load_eager().eval().requires_grad_(requires_grad=False)
            if other.device != self.device and loading.get("device_map") is None:
                other.to(self.device)
        right = self._short_losses(other)
        if not right.isfinite().all():
            raise UnsupportedModel(
                f"{self.path} in {self.dtype}: the losses of a short text are not finite, so {chosen!r} cannot be "
                "compared with the eager implementation; give another dtype, or attn_implementation='eager'"
            )
        bound = max(BOUND, UNITS * torch.finfo(self.dtype).eps)
        is_capped = chosen == "sdpa" and getattr(text, "attn_logit_softcapping", None) is not None
        if float((own - right).abs().mean()) <= bound and not is_capped:
            if other is self.model:
                self.model.set_attn_implementation(chosen)
        elif loading.get("attn_implementation") is None:
            self.model = other
        else:
            raise UnsupportedModel(
                f"attn_implementation={chosen!r} of {self.path}: the loss of a short text is {own.mean():.5f}, "
                f"and {right.mean():.5f} by the eager implementation"
                + (", and it leaves out attn_logit_softcapping" if is_capped else "")
                + "; leave attn_implementation out, or give 'eager'"
            )

    @torch.no_grad()
    def _short_losses(self, model: Any) -> torch.Tensor:
        """Return losses in nats, float32 [COMPARED - 1], of random tokens; none stands for images and the like."""
        text = self.model.config.get_text_config()
        places = {
            value for name, value in vars(self.model.config).items() if name.endswith(("_token_id", "_token_index"))
        }
        ids = [one for one in range(min(text.vocab_size, 1024)) if one not in places]
        drawn = torch.randint(len(ids), (1, COMPARED), generator=torch.Generator().manual_seed(0))
        tokens = torch.tensor(ids)[drawn].to(self.device)
        scores = model(input_ids=tokens, use_cache=False).logits[0, :-1].to(self.device).float()
        return nn.functional.cross_entropy(scores, tokens[0, 1:], reduction="none")


def _restore_forward(layer: nn.Module, before: Any) -> None:
    """Remove a layer instance's `forward`, and put back `before`, that which it had, unless None."""
    del layer.forward
    if before is not None:
        layer.forward = before


def firsts(visits: Sequence[Visited], *, first: bool) -> list[Visited]:
    """Return the visits at sites that must be hooked before others, or all other visits.

    Args:
        visits: points with their functions.
        first: True for sites with `Site.first`, which others take their rows from; False for the rest.
    """
    return [one for one in visits if SITES[one[0].site].first == first]


def _family(architectures: Sequence[str], layers: Mapping[int, nn.Module]) -> Family:
    """Return the family of layers by architecture name or by the layers' classes, else a family derived from them."""
    try:
        return family_of(architectures)
    except UnsupportedModel:
        return families_of(list(layers.values()))[0]
