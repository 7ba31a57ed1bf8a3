"""Objects show themselves in a short text, whatever state they are in, and in HTML that is escaped and bounded."""

from __future__ import annotations

import dataclasses
import gc
import html.parser
import importlib
import inspect
import math
import pkgutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

import steercap
from steercap.captures.rows import Captures
from steercap.core.display import (
    FEW,
    MOST_LETTERS,
    MOST_ROWS,
    brief,
    described,
    html_table,
    layers_by_site,
    sites_by_layers,
    span,
)
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import EngineDied
from steercap.lab.mechanism.patching.results import Effects, PatchEffect
from steercap.model import SteerModel
from steercap.requests.call_types import Generation
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.sync import SteerModel as BlockingModel

#: Longest `repr` of an object that holds much.
LONG = 700

#: Records with arrays that no public call returns.
INTERNAL = {
    *("Attending", "Batch", "Blocks", "ByProbe", "Calibrated", "CodecJudge", "Columns", "Doses", "Expected", "Fill"),
    *("Padded", "Part", "RecordedAttention", "TraitInTraining", "TraitState", "Window"),
}


class Raises:
    """Value whose repr fails, as that of a closed handle of another library may."""

    def __repr__(self) -> str:
        raise RuntimeError("closed")


@dataclass(frozen=True, eq=False)
class Measured:
    """A record with every kind of field."""

    rows: Any
    numbers: Any
    name: str = ""
    flag: bool = False
    known: dict[str, Any] = field(default_factory=dict)
    _hidden: int = 3

    __repr__ = brief


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: int = 2

    def __repr__(self) -> str:
        return brief(self)


class Told(msgspec.Struct):
    """A struct."""

    first: Any
    second: int = 2

    __repr__ = brief


def test_a_record_shows_shapes_counts_and_what_was_set() -> None:
    """Tensors and long lists are described, defaults and private fields left out."""
    one = Measured(torch.zeros(3, 4, dtype=torch.bfloat16), list(range(1000)), name="kind")
    assert repr(one) == "Measured(rows=bfloat16 [3, 4], numbers=<1,000 × int>, name='kind', known={})"
    assert repr(Measured(np.zeros((2, 0)), [1, "a"])) == "Measured(rows=float64 [2, 0], numbers=[1, 'a'], known={})"
    assert repr(Pair([torch.zeros(2)])) == "Pair(first=[float32 [2]])"
    assert repr(Told((1,), 3)) == "Told(first=(1,), second=3)"
    assert repr(Told(True, True)) == "Told(first=True, second=True)", "True is not the default 1 or 2"


class Lazy:
    """Value like a tensor whose data are gone."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("released")

    dtype = shape


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "value",
    [
        *(Raises(), [Raises()], {"a": Raises()}, (Raises(),) * 20, Lazy(), ITSELF, float("nan"), "x" * 10**6),
        *(torch.zeros(2, device="meta"), np.float32(3), torch.Size([3]), Point(3, "z"), {1, 2}, range(10**9)),
    ],
)
def test_no_value_makes_a_repr_raise_or_grow(value: Any) -> None:
    """A value whose own repr fails, or is long, is shown all the same."""
    for one in (Measured(value, None), Pair(value), Told(value)):
        assert len(repr(one)) < LONG


def test_a_mapping_shows_its_first_names_and_their_number() -> None:
    """A dict of many entries is not written out."""
    told = described({f"name {number}": torch.zeros(10**4) for number in range(100)})
    assert told.startswith("<100 by name: 'name 0', ")
    assert told.endswith(f"'name {FEW - 1}', ...>")


def test_layers_are_described_as_runs() -> None:
    """Neighbours are one run; many with gaps are counted."""
    assert [span(given) for given in ([3], [1, 2], range(30), [8, 16])] == ["3", "1, 2", "0 to 29", "8, 16"]
    assert span(range(0, 100, 2)) == "50 from 0 to 98"
    assert layers_by_site([Point(0, "z"), Point(1, "z"), Point(2, "z"), Point(4, "q")]) == "z: 0 to 2; q: 4"
    assert layers_by_site([]) == sites_by_layers([]) == ""
    points = [(0, "embed"), *((layer, site) for site in ("z", "q") for layer in (0, 1, 2)), (2, "final_norm")]
    wanted = "layer 0 of embed; layers 0 to 2 of z, q; layer 2 of final_norm"
    assert sites_by_layers(points) == wanted


def test_a_few_long_records_are_counted() -> None:
    """As many are: a sweep of eight answers is not written out; short items are, and one long item is."""
    few, long = [{"n": 1}, 2, "three"], "x" * 100
    assert described([long] * FEW) == f"<{FEW} × str>"
    assert described([long] * 3) == f"[{', '.join([repr(long)] * 3)}]"
    assert described(few) == "[<1 by name: 'n'>, 2, 'three']"
    assert described([[long] * FEW]) == f"[<{FEW} × str>]"


class Cells(html.parser.HTMLParser):
    """Reads the texts of a table's cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, _attrs: Any) -> None:
        """Begin a cell."""
        self.tags.append(tag)
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        """Add to it."""
        if self.cells:
            self.cells[-1] += data


def test_a_table_is_escaped_and_bounded() -> None:
    """No text of a model becomes markup; the rows that are left out are counted."""
    evil = "<script>alert('&')</script>"
    read = Cells(html_table(evil, [evil, "b"], [(evil, 0.123456), (None, math.nan), ("y" * 10**5, 3)]))
    assert "script" not in read.tags
    assert read.cells[:6] == [evil, "b", evil, "0.1235", "", ""]
    assert len(read.cells[6]) == MOST_LETTERS
    long = html_table("", ["n"], [[number] for number in range(10**4)])
    assert long.count("<tr>") == MOST_ROWS + 1
    assert f"and {10**4 - MOST_ROWS:,} rows more" in long


@lru_cache
def _classes() -> dict[str, type]:
    found = dict[str, type]()
    for module in pkgutil.walk_packages(steercap.__path__, "steercap."):
        if module.name.split(".")[1] not in {"adapters", "worker", "cli", "server", "__main__"}:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, type) and value.__module__ == module.name:
                    found[f"{module.name}.{name}"] = value
    return found


def test_no_brief_object_that_was_never_filled_raises() -> None:
    """A debugger shows objects before `__init__` has ended."""
    ours = {name: kind for name, kind in _classes().items() if vars(kind).get("__repr__") is brief}
    assert len(ours) >= 40
    for name, kind in ours.items():
        if issubclass(kind, msgspec.Struct):
            continue  # is made whole or not at all
        empty = kind(*[None] * len(kind._fields)) if issubclass(kind, tuple) else object.__new__(kind)
        assert repr(empty).startswith(f"{kind.__name__}("), name


def test_results_with_arrays_or_records_do_not_write_them_out() -> None:
    """A dataclass of tensors, or of sequences of records, in a public room has a `repr` of its own."""
    much = ("Tensor", "Float[", "Int[", "NDArray", "Sequence[Record]", "Sequence[Answer]", "Sequence[PatchEffect]")
    rooms = ("captures", "lab", "requests.call_types", "saes", "steering", "kernels.attention", "core.receipt")
    left = set()
    for name, kind in _classes().items():
        fields = getattr(kind, "__dataclass_fields__", {}).values()
        heavy = any(part in str(one.type) for one in fields for part in much)
        plain = dataclasses.is_dataclass(kind) and "__repr__" not in inspect.getsource(kind)
        if heavy and plain and name.removeprefix("steercap.").startswith(rooms) and not kind.__name__.startswith("_"):
            left.add(kind.__name__)
    assert left <= INTERNAL, left - INTERNAL


def _effects(runs: int) -> Effects:
    return Effects(
        [
            PatchEffect(
                pair=0, layer=at, site="z", head=0, position=0, token="<b>", value=float(at), base=0.0, source=9
            )
            for at in range(runs)
        ],
        [["<b>"]],
    )


def test_patching_shows_the_strongest_runs() -> None:
    """Of many runs a notebook shows those that changed the metric most."""
    read = Cells(_effects(500)._repr_html_())
    rows = read.cells[11:]
    assert rows[8::11][:3] == ["499", "498", "497"]
    assert rows[6] == "<b>"
    assert "b" not in read.tags
    assert len(repr(_effects(500))) < LONG


def test_captures_and_handles_say_points_dtype_and_bytes() -> None:
    """Thirty layers of one form are one entry."""
    rows = {Point(layer, "resid_post"): torch.zeros(13, 576) for layer in range(30)}
    assert repr(Captures(rows, 30)) == (
        f"Captures(resid_post: 0 to 29: (13, 576) torch.float32; {30 * 13 * 576 * 4:,} bytes)"
    )


def test_a_generation_leaves_vllms_output_out() -> None:
    """vLLM's RequestOutput fills pages."""
    made = Generation(Raises(), ("a" * 10**4,))
    assert repr(made).startswith("Generation(texts=('aaa")
    assert len(repr(made)) < LONG
    assert isinstance(made.output, Raises), "the object itself is as it was"


def test_a_capture_spec_shows_what_was_asked() -> None:
    """Fifteen arguments, two of them given."""
    assert "reduce='mean'" in repr(CaptureSpec(layers=3, reduce="mean"))
    assert "calibration" not in repr(CaptureSpec(layers=3, reduce="mean"))


def test_directions_have_a_table() -> None:
    """A row for each direction and layer."""
    found = DirectionSet({"<i>kind": LayerVectors({1: torch.ones(4), 3: torch.ones(4)})})
    read = Cells(found._repr_html_())
    assert read.cells[5:8] == ["<i>kind", "1", "2"]
    assert "i" not in read.tags


class _Engine:
    """Stands for a started engine; any call of it would fail."""

    schemas = dict.fromkeys(Point(layer, "resid_post") for layer in range(3))
    vllm = SimpleNamespace(
        num_layers=3,
        hidden_size=8,
        llm=SimpleNamespace(model_config=SimpleNamespace(revision=None, dtype=torch.float32)),
    )

    def __init__(self, death: str = "") -> None:
        self.death, self.died = death, bool(death)


@pytest.mark.parametrize("kind", [SteerModel, BlockingModel])
def test_a_model_says_its_state(kind: Any) -> None:
    """Not started, open, dead, closed: each is shown without a call to the engine."""
    model = kind("some/model", sites=["resid_post", "z"], layers=[0, 2])
    serving = getattr(model, "awaited", model).serving
    assert repr(model) == "SteerModel('some/model', not started; sites: resid_post, z, layers: (0, 2))"
    serving.engine = _Engine()
    assert repr(model) == "SteerModel('some/model', open: 3 layers × 8, float32; taps at layers 0 to 2 of resid_post)"
    serving.engine = _Engine(str(EngineDied("worker killed")))
    assert "dead: worker killed" in repr(model)
    serving._closed = True  # its engine is on its way out
    assert repr(model) == "SteerModel('some/model', closed; sites: resid_post, z, layers: (0, 2))"
    serving.engine = None
    assert "closed" in repr(model)
    del model
    gc.collect()


def test_a_repr_imports_nothing_heavy() -> None:
    """pandas, pyarrow and matplotlib stay unloaded."""
    code = (
        "import sys, torch; from steercap.steering.directions import DirectionSet; "
        "from steercap.steering.layers import LayerVectors; "
        "d = DirectionSet({'a': LayerVectors({1: torch.ones(4)})}); repr(d); d._repr_html_(); "
        "print([name for name in ('pandas', 'pyarrow', 'matplotlib', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
