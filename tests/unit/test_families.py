"""Families: each layer has one, what says so stays short, and a class is known by its name and by its code."""

from __future__ import annotations

import functools
import re
import statistics
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.multimodal import BLIND, WRAPPERS
from support.published import TWINS
from torch import nn

import steercap
from steercap.architectures.decoder import decoder_of
from steercap.architectures.families import FAMILIES, base, families_of, family_of, over_transformers, proved
from steercap.architectures.families.base import Family, located
from steercap.architectures.families.proved import fingerprint_of, is_transformers, name_of, same_code
from steercap.architectures.sites import SITES
from steercap.core.messages import Attached, Loaded
from steercap.core.spec import Point
from steercap.engine.ranks import Rank, loaded_of
from steercap.errors import UnsupportedModel
from steercap.testing.architectures import ARCHITECTURES, ENGINES, FAMILY_CONFIGS
from steercap.worker.install import norm_after

FOLDER = Path(base.__file__).parent


class Pair(nn.Module):
    """A layer that may defer an addition."""

    def forward(self, positions, hidden_states, residual):
        return hidden_states + positions, residual


class Whole(nn.Module):
    """A layer that carries the whole stream."""

    def forward(self, x):
        return x


class Strange(nn.Module):
    """A layer whose arguments say nothing."""

    def forward(self, left, right):
        return left + right


def known(family: str) -> type[nn.Module]:
    """A class that a family knows by its name."""
    module, _, name = FAMILIES[family].classes[0].rpartition(".")
    return type(name, (Pair,), {"__module__": f"vllm.model_executor.models.{module}", "__qualname__": name})


# What the files say


def test_no_class_is_claimed_twice() -> None:
    """Each class of layers has one family, and each family has some."""
    names = [name for family in FAMILIES.values() for name in family.classes]
    assert len(names) == len(set(names))
    assert all(family.classes and family.architectures for family in FAMILIES.values())
    assert len({family.classes for family in FAMILIES.values()}) == len(FAMILIES)


def test_no_architecture_of_a_family_is_listed_twice() -> None:
    """Nor by two families, so the one that is found is the only one."""
    names = [name for family in FAMILIES.values() for name in family.architectures]
    assert len(names) == len(set(names))
    assert all(name in family_of([name]).architectures for name in names)


def test_a_family_is_an_entry_of_a_table() -> None:
    """Each is there once; half of them have fewer than 20 lines, none more than 60."""
    tables = "".join(text for path in FOLDER.glob("*.py") if "\nMEMBERS" in (text := path.read_text()))
    found = re.findall(r'^    "(\w+)": (\w+\(.*?\)),\n(?=    ["#]|\})', tables, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in found) == sorted(FAMILIES)
    lengths = [len(entry.splitlines()) for _, entry in found]
    assert statistics.median(lengths) < 20
    assert max(lengths) < 60


def test_a_tiny_model_has_one_name() -> None:
    """What is not tested in CI by its family's own model is among the architectures that `prove_models.py` tries."""
    assert not set(FAMILY_CONFIGS) & (set(ARCHITECTURES) | set(WRAPPERS))
    assert set(FAMILY_CONFIGS) <= set(FAMILIES)
    assert not set(ARCHITECTURES) & set(WRAPPERS)
    assert set(ENGINES) <= set(ARCHITECTURES)


def test_transformers_modules_carry_the_whole_stream() -> None:
    """Whatever vLLM's own layers of the family do; their attention and routers are past hooks."""
    for family in FAMILIES.values():
        found = over_transformers(family)
        assert (found.residual_output, found.residual_input, found.attention, found.router) == (None, "", "", "")
        assert (found.attn_out, found.mlp_out, found.classes) == (family.attn_out, family.mlp_out, family.classes)


def test_what_varies_is_asked_for_everywhere() -> None:
    """Layers may have experts or be dense where nothing but the loaded model says which; otherwise it is known."""
    there = {site: SITES[site].exists(FAMILIES["moe"], None, 0) for site in ("router", "neurons", "resid_post")}
    assert there == {"router": True, "neurons": True, "resid_post": True}
    assert not SITES["router"].exists(FAMILIES["llama"], None, 0)
    assert SITES["neurons"].exists(FAMILIES["llama"], None, 0)
    assert not SITES["neurons"].exists(FAMILIES["mixtral"], None, 0)


# Names


def test_classes_are_named_alike_in_vllm_and_in_transformers() -> None:
    """By the file that holds them: vLLM's old and new folders, transformers' `modeling_` files, and anybody else's."""

    def named(module: str, qualname: str) -> str:
        return name_of(type("Any", (), {"__module__": module, "__qualname__": qualname}))

    assert named("vllm.model_executor.models.llama", "LlamaDecoderLayer") == "llama.LlamaDecoderLayer"
    assert named("transformers.models.llama.modeling_llama", "LlamaDecoderLayer") == "llama.LlamaDecoderLayer"
    assert named("vllm.models.step5.nvidia.model", "Layer") == "step5.nvidia.model.Layer"
    assert named("transformers_modules.some.modeling_own", "Own") == "transformers_modules.some.Own"
    assert named("mine", "Outer.Inner") == "mine.Outer.Inner"


def test_transformers_own_layer_is_known() -> None:
    """A real class of it, by the same name as vLLM's."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    assert name_of(LlamaDecoderLayer) == "llama.LlamaDecoderLayer"
    assert is_transformers(LlamaDecoderLayer)
    assert not is_transformers(Pair)


def test_the_first_path_that_a_layer_has_is_taken() -> None:
    """Libraries and layers of hybrids have other names; none is an error that says all."""
    layer = nn.Module()
    layer.mixer = nn.Module()
    layer.mixer.out_proj = nn.Linear(1, 1)
    assert located(layer, "self_attn|mixer.out_proj") == "mixer.out_proj"
    with pytest.raises(AttributeError, match=r"no module self_attn or mixer\.o_proj"):
        located(layer, "self_attn|mixer.o_proj")


def test_a_path_may_need_another_module_of_the_layer() -> None:
    """Layers of one class may use one name for different modules, as OLMo Hybrid's do."""
    layer = nn.ModuleDict({"norm": nn.Linear(1, 1), "mlp": nn.Linear(1, 1)})
    assert located(layer, "linear_attn?norm|mlp") == "mlp"
    layer["linear_attn"] = nn.Linear(1, 1)
    assert located(layer, "linear_attn?norm|mlp") == "norm"


# Families of layers


def test_layers_of_a_known_class_have_its_family() -> None:
    """All of them, or what is known of some is not used for the others."""
    cohere, llama = known("cohere"), known("llama")
    assert families_of([cohere(), cohere()]) == (FAMILIES["cohere"],)
    assert families_of([llama()]) == (FAMILIES["llama"],)
    assert all(family.derived for family in families_of([cohere(), llama()]))


def test_transformers_layers_have_the_family_with_the_whole_stream() -> None:
    """The same class name means another way to carry it."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layer = LlamaDecoderLayer.__new__(LlamaDecoderLayer)
    nn.Module.__init__(layer)
    assert families_of([layer]) == (over_transformers(FAMILIES["llama"]),)


def test_unknown_layers_are_derived_from_what_they_take() -> None:
    """A residual may be deferred or be left over, in that order; without one the stream is whole."""
    first, second = families_of([Pair()])
    assert (first.hidden_input, first.residual_input, first.residual_output) == ("hidden_states", "residual", 1)
    assert (second.hidden_input, second.residual_input, second.residual_output) == ("hidden_states", "", None)
    (whole,) = families_of([Whole(), Whole()])
    assert (whole.hidden_input, whole.residual_input, whole.residual_output) == ("x", "", None)
    for family in (first, second, whole):
        assert family.derived
        assert {name for name, site in SITES.items() if site.known(family)} == {
            "embed",
            "resid_pre",
            "resid_post",
            "final_norm",
        }


def test_what_cannot_be_derived_is_refused() -> None:
    """Arguments that say nothing, and layers that do not agree."""
    with pytest.raises(UnsupportedModel, match=r"Strange\(left, right\)"):
        families_of([Strange()])
    with pytest.raises(UnsupportedModel, match=r"Pair\(.*\); Whole\(x\)"):
        families_of([Pair(), Whole()])


# The code of a layer


class Plain:
    def forward(self, x):
        return x + 1


class Typed:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """It says what it does."""
        return x + 1  # and why


class Wrapped:
    @torch.no_grad()
    def forward(self, x):
        return x + 1


class Other:
    def forward(self, x):
        return x + 2


class Swapped:
    def forward(self, x):
        return 1 + x


def test_a_fingerprint_is_of_what_is_computed() -> None:
    """Comments, types and docstrings change nothing; a number or an order does."""
    found = fingerprint_of(Plain)
    assert len(found) == 12
    assert set(found) <= set("0123456789abcdef")
    assert fingerprint_of(Typed) == found
    assert len({found, fingerprint_of(Other), fingerprint_of(Swapped)}) == 3


def test_a_decorator_is_code() -> None:
    """What is put around `forward` may change what it computes."""
    assert fingerprint_of(Wrapped) not in {"", fingerprint_of(Plain)}


def replaced(layer: type[Plain], forward: Callable[..., Any]) -> object:
    """A layer whose `forward` was put in place of its class's."""
    made = layer()
    made.forward = forward
    return made


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return 2 * forward(*args)

    return wrapper


def test_a_forward_that_was_replaced_is_another() -> None:
    """Of one layer or of its class, by another function or by one around it, whatever it says that it wraps."""
    known = fingerprint_of(Plain)
    assert fingerprint_of(Plain()) == known
    assert fingerprint_of(replaced(Plain, Plain().forward)) == known
    changed = {
        "of a layer": replaced(Plain, types.MethodType(Other.forward, Plain())),
        "around a layer's": replaced(Plain, doubling(Plain().forward)),
        "of a class": type("Patched", (Plain,), {"forward": Other.forward}),
        "around a class's": type("Patched", (Plain,), {"forward": doubling(Plain.forward)}),
        "around one that was around it": type("Patched", (Plain,), {"forward": doubling(doubling(Plain.forward))}),
    }
    found = {how: fingerprint_of(layer) for how, layer in changed.items()}
    assert known not in found.values()
    assert "" not in found.values()
    assert found["of a layer"] == fingerprint_of(Other)
    assert len(set(found.values())) == 3  # what is around a layer's `forward` is around its class's
    assert fingerprint_of(replaced(Plain, functools.partial(Plain.forward, Plain()))) == ""
    endless = doubling(Plain.forward)
    endless.__wrapped__ = endless
    assert fingerprint_of(type("Patched", (Plain,), {"forward": endless})) == ""


def test_layers_that_do_not_all_run_the_same_code_are_not_verified() -> None:
    """One layer whose `forward` was replaced makes its class unknown, on whichever rank it is."""
    name, known = name_of(Whole), fingerprint_of(Whole)
    layers = nn.ModuleList(Whole() for _ in range(3))
    layers[1].forward = doubling(layers[1].forward)
    model = nn.Module()
    model.layers = layers
    assert decoder_of(model, 3, range(3)).code == {name: ""}
    assert decoder_of(model, 3, range(2, 3)).code == {name: known}
    assert same_code([{name: known, "other": "1"}, {"other": "1"}, {name: "2"}, {name: known}]) == {
        name: "",
        "other": "1",
    }


def test_what_ranks_have_loaded_is_joined() -> None:
    """Stages of a pipeline hold other layers: what one of them can still try is tried, and code that differs is unknown."""

    def rank(candidates: int, **code: str) -> Rank:
        loaded = Loaded("", code, candidates)
        return Rank(0, Attached((), (), 0, 1, 1, 1, 1, 0, 0, "", b"", loaded), None, 0)

    assert loaded_of([[rank(1, a="1"), rank(2, b="2")]]) == Loaded("", {"a": "1", "b": "2"}, 2)
    assert loaded_of([[rank(1, a="1")], [rank(1, a="3")]]) == Loaded("", {"a": ""}, 1)


def test_code_that_cannot_be_read_has_no_fingerprint() -> None:
    """Compiled classes, and those that have no `forward` of their own."""
    assert fingerprint_of(type("Made", (), {"forward": eval("lambda self, x: x")})) == ""
    assert fingerprint_of(type("Compiled", (), {"forward": len})) == ""
    assert fingerprint_of(int) == ""


# Where layers are


def test_layers_listed_twice_are_found_once() -> None:
    """Gemma 4 keeps its layers in the model, and again in a module within it; the norm is beside the outer list."""
    layers = nn.ModuleList(Whole() for _ in range(3))
    model = nn.Module()
    model.model = nn.Module()
    model.model.inner = nn.Module()
    model.model.inner.decoder_layers = nn.ModuleList(layers)
    model.model.layers = layers
    found = decoder_of(model, 3, range(3))
    assert found.parent is model.model
    assert [found.layers[index] for index in range(3)] == list(layers)
    assert found.code == {name_of(Whole): fingerprint_of(Whole)}
    model.model.others = nn.ModuleList(Whole() for _ in range(3))
    with pytest.raises(UnsupportedModel, match=r"model\.layers, model\.others"):
        decoder_of(model, 3, range(3))
    with pytest.raises(UnsupportedModel, match="has none"):
        decoder_of(model, 4, range(4))


def test_a_module_that_holds_the_layers_alone_is_not_where_the_norm_is_looked_for() -> None:
    """As in PLaMo 3 and in encoders: the embedding and the norm are in the module above."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.Module()
    model.model.layers.layers = nn.ModuleList(Whole() for _ in range(3))
    model.model.norm = nn.LayerNorm(4)
    found = decoder_of(model, 3, range(3))
    assert (found.parent, found.path) == (model.model, "model.layers.layers")


class Standing(nn.Module):
    """What vLLM's transformers backend gives for a wrapper's language model: `model` of the wrapper's modules is the
    wrapper's, and by its name the language model.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self.__dict__.update(wrapper.__dict__)


class Seeing(nn.Module):
    """A vision tower and a language model of as many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.vision_tower = nn.Module()
        self.model.vision_tower.layers = nn.ModuleList(Whole() for _ in range(3))
        self.model.language_model = nn.Module()
        self.model.language_model.layers = nn.ModuleList(Whole() for _ in range(3))
        self.model.language_model.norm = nn.LayerNorm(4)

    def get_language_model(self) -> nn.Module:
        """As vLLM does."""
        return type("LanguageModel", (Standing,), {"model": self.model.language_model})(self)


def test_layers_within_a_wrapper_are_those_of_its_language_model() -> None:
    """Also where its vision tower has as many, and its modules have another name than the one they are reached by."""
    wrapper = Seeing()
    found = decoder_of(wrapper, 3, range(3))
    assert found.parent is wrapper.model.language_model
    assert list(found.layers.values()) == list(wrapper.model.language_model.layers)
    wrapper.model.vision_tower.layers.append(Whole())
    assert decoder_of(wrapper, 3, range(3)).parent is wrapper.model.language_model


def test_a_norm_that_the_head_applies_is_applied_once() -> None:
    """MiMo and Step 3.5 norm the rows of sampled tokens as they make logits of them; then `final_norm` is no site."""
    model, head, rows = nn.Module(), torch.randn(4, 5), torch.randn(2, 4)
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(Whole() for _ in range(3))
    model.model.norm = nn.LayerNorm(4)
    family, decoder = FAMILIES["qwen2"], decoder_of(model, 3, range(3))
    late = replace(family, norms_late=True)

    def plain(rows: torch.Tensor) -> torch.Tensor:
        return rows @ head

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return model.model.norm(rows) @ head

    assert not decoder.norms_late(family, decoder.unembedding(family, plain), rows)
    assert decoder.norms_late(family, decoder.unembedding(family, normed), rows)
    for known, made in ((family, plain), (late, normed)):
        (found,) = decoder.unembedding(known, made).logits(rows, normed=False)
        assert torch.equal(found, normed(rows))
    assert SITES["final_norm"].known(family)
    assert not SITES["final_norm"].known(late)
    here = (name_of(type(model.model)),)
    last = [norm_after(Point(2, "resid_post"), decoder, replace(one, loops=here), [], 3) for one in (family, late)]
    assert last == [model.model.norm, None]


def test_a_head_that_fails_ends_no_start(caplog) -> None:
    """Nothing is proved of it: what uses it says so."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers, model.model.norm = nn.ModuleList(Whole() for _ in range(3)), nn.LayerNorm(4)
    family, decoder = FAMILIES["qwen2"], decoder_of(model, 3, range(3))
    unembedding = decoder.unembedding(family, lambda rows: rows @ torch.zeros(5, 5))
    assert not decoder.norms_late(family, unembedding, torch.zeros(1, 4))
    assert "cannot tell if making logits applies the final norm" in caplog.text


def test_a_family_multiplies_by_one_unless_it_says_otherwise() -> None:
    """What blocks give, and logits."""
    assert (Family().factor(None), Family().logits(None)) == (1.0, 1.0)


def test_the_page_has_the_tables_of_the_last_run() -> None:
    """docs/models.md is written from the records, and says what they say; README.md has their number."""
    root = Path(steercap.__file__).parent.parent
    page = (root / "docs" / "models.md").read_text()
    assert f"<!-- proved -->\n{proved.markdown(proved.records())}<!-- /proved -->" in page
    count = len({one.architecture for one in proved.records() if not one.refused})
    assert f"{count} [architectures](docs/models.md)" in (root / "README.md").read_text()


def test_forty_architectures_are_proved_by_a_family_that_is_there() -> None:
    """Each record is of a known configuration and family, and holds the bounds; none is of a guess."""
    served = [one for one in proved.records() if not one.refused]
    assert len({one.architecture for one in served}) >= 40
    for one in served:
        assert one.name in {*ARCHITECTURES, *TWINS, *WRAPPERS, *FAMILY_CONFIGS}
        assert one.code
        assert all(len(digest) == 12 for digest in one.code.values())
        assert one.family == "" or set(one.code) <= set(FAMILIES[one.family].classes)
        blind = one.name not in WRAPPERS or one.name in BLIND
        blind = blind or (WRAPPERS[one.name].torchvision and "resid_post image" not in one.rows)
        parts = ("prompt", "generated", *([] if blind else ["image"]))
        assert {f"{site} {part}" for site in one.sites for part in parts} == set(one.rows)
        if one.dtype == "float32":
            assert one.worst.cosine > 0.99999
            assert max(one.worst.error, *one.edits.values()) < 1e-4


def test_verified_is_this_code_and_no_other() -> None:
    """A class that is known with another fingerprint is not."""
    code = next(one.code for one in proved.records() if one.architecture == "LlamaForCausalLM")
    assert proved.verified(code)
    assert not proved.verified(dict.fromkeys(code, "0" * 12))
    assert not proved.verified({**code, "strange.Layer": "0" * 12})
    assert not proved.verified({})
    assert not proved.verified(dict.fromkeys(code, ""))
