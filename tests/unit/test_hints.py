"""A wrong name on a model says the right one: attributes of other libraries, misspelt ones, and arguments of calls."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import traceback
from typing import Any

import pytest

from steercap import SteerModel, sync
from steercap.captures.rows import Captures
from steercap.client import RemoteModel
from steercap.core.hints import ATTRIBUTES, Hinting
from steercap.errors import InvalidRequest, InvalidSpec, ModelClosed

URL = "http://127.0.0.1:9"
MODELS = {
    "awaited": lambda: SteerModel("somewhere/model"),
    "blocking": lambda: sync.SteerModel("somewhere/model"),
    "connection": lambda: SteerModel.connect(URL),
    "blocking connection": lambda: sync.SteerModel.connect(URL),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """A model of each public class, not started."""
    return MODELS[request.param]()


@pytest.mark.parametrize("name", [*ATTRIBUTES, "hooked_generate", "hook_points"])
def test_a_name_of_another_library_says_what_it_is_here(model: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}; .*\b(read|steering|use|give|origin)\b"):
        getattr(model, name)


def test_what_is_advised_is_there() -> None:
    """Each call that an advice names is one of every model."""
    for advice in ATTRIBUTES.values():
        for call in ("read(", "generate ", "steered(", "token_ids(", "encode("):
            assert call not in advice or hasattr(SteerModel, call[:-1].strip())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("genrate", "generate"), ("fetch_capture_batch", "fetch_captures_batch"), ("num_layer", "num_layers")],
)
def test_a_misspelt_attribute_says_the_nearest(model: Any, wrong: str, right: str) -> None:
    """Once: Python's own guess is not added to it."""
    with pytest.raises(AttributeError) as raised:
        getattr(model, wrong)
    assert "".join(traceback.format_exception(raised.value)).count("id you mean") == 1
    assert f"did you mean {right!r}?" in str(raised.value)


def test_those_who_probe_find_nothing(model: Any) -> None:
    """IPython, copy, pickle and hasattr; a special name has no advice."""
    for name in ("_repr_html_", "_repr_mimebundle_", "_ipython_display_", "__array__", "__wrapped__", "__deepcopy__"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError) as raised:
            getattr(model, name)
        assert ";" not in str(raised.value)
    assert not hasattr(model, "steer")
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidRequest, match="cannot be copied"):
            attempt(model)
    assert not hasattr(object.__new__(type(model)), "serving")


def test_a_property_that_fails_says_why(model: Any) -> None:
    """Its own error, not that there is no such attribute."""
    with pytest.raises(ModelClosed):
        _ = model.tokenizer

    class Failing(SteerModel, instead=""):
        @property
        def broken(self) -> Any:
            return [].missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'list' object has no attribute 'missing'"):
        _ = Failing("somewhere/model").broken


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        ("generate", {"prompt": "x"}, r"generate\(\) has no argument 'prompt'; give prompts="),
        ("generate", {"layers": [1]}, "'layers'; give capture_layers="),
        ("generate", {"max_tokens": 8}, r"'max_tokens'; give sampling_params=\{\"max_tokens\": \.\.\.\}"),
        ("generate", {"max_new_tokens": 8}, r"'max_new_tokens'; give sampling_params=\{\"max_tokens\": \.\.\.\}"),
        ("generate", {"steering_vector": 1}, r"'steering_vector'; give steering=Add\(vector, layer=\.\.\., scale="),
        ("generate", {"sites": "z"}, r"'sites'; give capture=CaptureSpec\(\.\.\.\)"),
        ("generate", {"capture_layer": [1]}, "'capture_layer'; did you mean 'capture_layers'"),
        ("chat", {"prompts": "x"}, r"chat\(\) has no argument 'prompts'; give messages="),
        ("run", {"monitor": []}, "'monitor'; did you mean 'monitors'"),
        ("read", {"temperature": 0}, r"read\(\) has no argument 'temperature'; known: 'prompts'"),
        ("encode", {"task": "embed"}, r"'task'; give pooling_params=\{\"task\": \.\.\.\}"),
        ("stream", {"prompts": "x"}, r"stream\(\) has no argument 'prompts'; did you mean 'prompt'"),
        ("sketch", {"layer": 1}, r"sketch\(\) has no argument 'layer'; did you mean 'layers'"),
        ("steered", {"steer": 1}, r"steered\(\) has no argument 'steer'; give steering=Add"),
    ],
)
def test_a_misspelt_argument_says_the_right_one(model: Any, call: str, given: dict[str, Any], said: str) -> None:
    """At the call, before anything is awaited."""
    with pytest.raises(TypeError, match=said) as raised:
        getattr(model, call)(**given)
    assert raised.value.__suppress_context__


#: Calls specs with wrong arguments, in a process without the checks of shapes, which read arguments before them.
MISNAMING = """
import dataclasses, inspect
from steercap import Add, CaptureSpec, LogitBias, Monitor, SteeringSpec
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.studies.evaluation import Method
from steercap.lab.studies.sweeps import Sweep
from steercap.lab.training import TrainingSettings
from steercap.steering.edits import EDITS

def said(call, *given, **named):
    try:
        return call(*given, **named)
    except TypeError as error:
        return str(error)

for kind in (*EDITS.values(), CaptureSpec, SteeringSpec, LogitBias, Monitor, Sweep, Method, TrainingSettings, Judge):
    known = list(inspect.signature(kind).parameters)
    for name in known:
        hint = f"{kind.__name__}() has no argument '{name}z'; did you mean {name!r}? known: {known[0]!r}"
        assert said(kind, **{name + "z": 1}).startswith(hint), said(kind, **{name + "z": 1})
    assert "positional argument" in said(kind, *range(99))
for name, here in (("coefficient", "scale"), ("strength", "scale"), ("direction", "vector"), ("positions", "tokens")):
    assert said(Add, [1.0], layer=1, **{name: 1}) == f"Add() has no argument {name!r}; give {here}="
edit = Add([1.0], layer=1)
assert "did you mean 'scale'" in said(dataclasses.replace, edit, scal=2)
assert dataclasses.replace(edit, scale=2).scale == 2
"""


def test_a_misspelt_argument_of_a_spec_says_the_right_one() -> None:
    """Each argument with a letter too many, those of other libraries, and of a copy."""
    subprocess.run([sys.executable, "-c", MISNAMING], check=True)


def test_other_type_errors_are_pythons_own(model: Any) -> None:
    """Of missing arguments, and those that the call's own code raises."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompts'"):
        model.generate()

    class Failing(SteerModel, instead=""):
        def of_its_own(self, **given: Any) -> Any:
            return given["one"] + "one"

    with pytest.raises(TypeError, match="unsupported operand"):
        Failing("somewhere/model").of_its_own(one=1)


def test_calls_look_as_they_are_written() -> None:
    """Signatures, names and documentation are those of the source, and coroutine functions stay ones."""
    for kind in (SteerModel, RemoteModel, sync.SteerModel):
        assert list(inspect.signature(kind.generate).parameters)[:3] == ["self", "prompts", "sampling_params"]
        assert kind.generate.__name__ == "generate"
        assert "Generate text" in str(kind.generate.__doc__)
    assert inspect.iscoroutinefunction(SteerModel.tokenize)


def test_a_subclass_may_have_a_base_that_takes_keywords() -> None:
    """It gets what the class is given."""

    class Named:
        said: str

        def __init_subclass__(cls, said: str, **given: Any) -> None:
            super().__init_subclass__(**given)
            cls.said = said

    class Mixed(Hinting, Named, said="here"):
        pass

    assert Mixed.said == "here"
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        type("Wrong", (Hinting,), {}, wrong=1)


def test_captures_keyed_the_other_way_round() -> None:
    with pytest.raises(InvalidSpec, match=r"the layer comes first: captures\[3, 'resid_post'\]"):
        _ = Captures({}, num_layers=4)["resid_post", 3]  # type: ignore[index]
