"""Error messages of models and specs that translate names of other libraries, and correct misspelt ones.

They add advice on attributes and arguments to errors that Python raises anyway; a valid call takes 1 to 2 us more.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from steercap.core.values import choices, nearest

_READ: Final = "use read(prompts, capture_layers=[...]), or generate with capture_layers="
_EDIT: Final = "give steering=Add(vector, layer=..., scale=...) to a call, or use `model.steered(...)`"
#: Advice by name of an attribute that models of other libraries have.
ATTRIBUTES: Final[Mapping[str, str]] = {
    name: advice
    for names, advice in (
        ("run_with_cache get_activations capture capture_activations forward extract_activations", _READ),
        ("run_with_hooks add_hook add_hooks reset_hooks register_forward_hook register_hook", f"{_READ}; {_EDIT}"),
        ("trace session scan invoke edit intervene", f"{_READ}; {_EDIT}"),
        ("steer set_control add_vector apply_steering steering set_steering", _EDIT),
        ("to_tokens to_single_token", "use tokenize(text), or the tokenizer itself, model.tokenizer"),
        ("decode to_string to_str_tokens detokenize", "use model.tokenizer.decode(ids)"),
        ("logit_lens lens", "use handle.lens() of a fetched handle, or unembed(rows)"),
        ("embed classify score", 'use encode(prompts) of a model opened with runner="pooling"'),
        ("from_pretrained", "give the name or path to the class itself"),
        ("patch ablate extract collect calibrate", "use the function of steercap.lab that takes the model first"),
        ("cfg config", "num_layers, hidden_size, points and origin describe the model"),
        ("device dtype to cuda cpu eval half", "vLLM places the model; origin has its dtype"),
    )
    for name in names.split()
}
#: Names of other libraries' arguments, the corresponding argument here, and the advice, formatted with `name`.
ARGUMENTS: Final[Sequence[tuple[str, str, str]]] = (
    ("n n_samples num_samples", "samples", "give samples="),
    ("vector vectors direction steering_vector", "do", "give probe="),  # of a Monitor
    ("prompt text texts input inputs input_ids prompt_token_ids messages", "prompts", "give prompts="),
    ("prompts prompt text texts conversation conversations", "messages", "give messages="),
    ("layer layers layer_ids", "capture_layers", "give capture_layers="),
    (
        "max_tokens temperature top_p top_k min_p n seed stop logprobs min_tokens ignore_eos repetition_penalty",
        "sampling_params",
        'give sampling_params={{"{name}": ...}}',
    ),
    ("max_new_tokens max_length", "sampling_params", 'give sampling_params={{"max_tokens": ...}}'),
    ("params sampling do_sample generation_config", "sampling_params", "give sampling_params="),
    ("task dimensions use_activation normalize params", "pooling_params", 'give pooling_params={{"{name}": ...}}'),
    (
        "steering_vector steering_vectors vector vectors steer edit edits control spec",
        "steering",
        "give steering=Add(vector, layer=..., scale=...)",
    ),
    (
        "site sites at tokens codec reduce attention before_edits project sae names_filter hooks",
        "capture",
        "give capture=CaptureSpec(...), which has layers=, sites=, at=, tokens= and more",
    ),
    ("coefficient coeff coef strength multiplier alpha factor weight", "scale", "give scale="),
    ("direction steering_vector control_vector activations", "vector", "give vector="),
    ("position positions token_positions pos", "tokens", "give tokens="),
)


class Hinting:
    """Base of open models whose AttributeError and TypeError for an unknown name suggest the right one.

    A subclass may set `_lacking`: advice by name of an attribute that only other subclasses have.
    """

    _lacking: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name, member in tuple(vars(cls).items()):
            # Coroutine functions stay as they are, since `inspect` could not tell that a wrapper of one is one.
            if isinstance(member, FunctionType) and name[0] != "_" and not inspect.iscoroutinefunction(member):
                setattr(cls, name, _hinting(member))

    if not TYPE_CHECKING:  # a type checker knows all attributes without it

        def __getattr__(self, name: str) -> Any:
            kind = type(self)
            if hasattr(kind, name):  # a property whose own code failed: again for its own error
                return object.__getattribute__(self, name)
            # Without name= and obj= Python would add a guess of its own.
            raise AttributeError(_missing(kind, name, self._lacking), name=None, obj=None)


def _missing(kind: type, name: str, lacking: Mapping[str, str]) -> str:
    said = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):  # Python, copy, pickle and IPython ask for many
        return said
    advice = lacking.get(name) or ATTRIBUTES.get(name)
    if advice is None and name.startswith("hook"):
        advice = ATTRIBUTES["add_hook"]
    if advice is None:
        near = nearest(name, (one for one in dir(kind) if one[0] != "_"))
        advice = near and f"did you mean {near!r}?"
    return f"{said}; {advice}" if advice else said


def _hinting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that its TypeError for an unknown argument suggests the right one."""

    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        try:
            return method(*args, **given)
        except TypeError:
            for name in _unknown(method, given):
                raise TypeError(_misnamed(method, name)) from None
            raise

    return call


def _unknown(method: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in `given` that are no parameters of a method; none if it accepts **kwargs."""
    known = inspect.signature(method).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        yield from (name for name in given if name not in known)


def _misnamed(method: Callable[..., Any], name: str) -> str:
    known = [one for one in inspect.signature(method).parameters if one != "self"]
    advice = (text.format(name=name) for names, here, text in ARGUMENTS if here in known and name in names.split())
    called = method.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    return f"{called}() has no argument {name!r}; {next(advice, None) or choices(name, known)}"


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - exported, as mypy wants it
else:

    def dataclass(kind: type | None = None, /, **given: Any) -> Any:
        """Make a dataclass as the standard library does, but its TypeError for an unknown argument suggests one."""
        if kind is None:
            return functools.partial(dataclass, **given)
        made = dataclasses.dataclass(kind, **given)
        made.__init__ = _hinting(made.__init__)
        return made
