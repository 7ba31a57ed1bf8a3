"""What the folders and files of `tests/stored` hold, as arguments: for `scripts/make_stored.py`, and for what reads them again.

All numbers are small multiples of powers of two, so that no processor rounds them otherwise.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from steercap import (
    Ablate,
    Add,
    AddIf,
    Calibration,
    Cap,
    CaptureSpec,
    LogitBias,
    LowRank,
    Replace,
    SAEFeature,
    SetProjection,
    Sketch,
    SteeringSpec,
    SteerModel,
)
from steercap.captures.quantisation import Codes, Quantiser
from steercap.cli.captured import capture_to
from steercap.cli.prompts import Prompt
from steercap.cli.terminal import Output, Terminal
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.files.fingerprint import tokenizer_digest, weights_digest
from steercap.kernels.sketches import SKETCHES
from steercap.lab.datasets.collecting import OneIn, collect
from steercap.lab.datasets.definition import DATASET
from steercap.lab.measures.scores import Examples
from steercap.lab.measures.texts import Repetition
from steercap.lab.personas import PersonaSettings, Trait, run_persona
from steercap.lab.personas.roles import AssistantAxis, Role, RoleSet, RoleSettings, run_roles
from steercap.lab.personas.roles.settings import digests_of
from steercap.lab.personas.settings import stage_hashes, trait_hashes
from steercap.lab.studies.evaluation import Choice, Choices, Evaluation, Method, Passages, evaluate
from steercap.lab.studies.sweeps import Sweep, run_sweep
from steercap.lab.training import Example, train
from steercap.steering import DirectionSet, LayerVectors, Provenance

#: Where the files and folders are.
STORED: Final = Path(__file__).parent / "stored"
#: Of the tiny model, which has none of its own.
TEMPLATE: Final = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
GREEDY: Final[Mapping[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}


def line(first: int, count: int = 4) -> torch.Tensor:
    """Eighths from `first`: float32 [count]."""
    return torch.arange(first, first + count, dtype=torch.float32) / 8


def wide() -> torch.Tensor:
    """A vector of the tiny model's stream: float32 [128]."""
    return (torch.arange(128, dtype=torch.float32) % 7 - 3) / 4


# Files


def steering() -> SteeringSpec:
    """Every edit, and biases of both kinds."""
    return SteeringSpec(
        [
            Add(line(1), layer=1, scale=2.0, tokens="generated"),
            AddIf(line(2), line(3), threshold=0.5, scale=-1.0, bias=0.25, layers=[1, 2], tokens=[0, -1]),
            Cap(line(4), low=-1.0, high=2.0, layers=slice(1, 3), site="mlp_out"),
            LowRank(line(1, 8).view(2, 4), line(3, 8).view(2, 4), bias=line(1, 2), scale=0.5, layer=0),
            Replace(line(5, 8).view(2, 4), positions=[0, -1], elements=[0, 1, 2, 3], layer=1),
            SAEFeature(line(1), line(2), 3.0, bias=0.5, decoder_bias=line(7), threshold=0.25, layer=2),
            SetProjection(line(5), 1.5, layer=-1, part=1, site="z"),
            SteeringSpec([Ablate(line(6), keep=0.5, layers="all", tokens=slice(2, None))], preserve_norm=True),
            LogitBias({3: 1.5, 7: -2.0}, tokens="generated"),
            LogitBias(line(-2, 8)),
        ]
    )


def vectors() -> LayerVectors:
    return LayerVectors({0: line(1), 2: line(2)}, name="warm", model="m", site="mlp_out")


def directions() -> DirectionSet:
    """Two, with all that is known of where they come from."""
    return DirectionSet(
        {name: LayerVectors({1: line(place), 2: line(place + 1)}, model="m") for place, name in enumerate(("a", "b"))},
        Provenance(
            revision="r",
            dtype="float32",
            prompts={"a": "0f", "b": "1f"},
            tokens="all",
            reduce="mean",
            method="difference",
            seed=3,
            rows={"a": (4, 5), "b": (6, 7)},
            held_out={"a": (1, 2), "b": (2, 1)},
            auc={"a": {1: 0.5, 2: 0.75}, "b": {1: 1.0, 2: 0.25}},
            row_norms={"a": {1: 2.5, 2: 3.5}, "b": {1: 4.5, 2: 5.5}},
        ),
    )


def calibration() -> Calibration:
    points = Point(0, "resid_post"), Point(1, "z")
    return Calibration(
        {point: line(place) for place, point in enumerate(points)},
        {point: line(place + 1) for place, point in enumerate(points)},
        model="m",
        revision="r",
        dtype="bfloat16",
        tokens="slice(1, None, 1)",
        prompts="2f",
        texts=3,
        rows=12,
    )


def quantiser() -> Quantiser:
    return Quantiser(Point(1, "resid_post"), line(0, 16).view(2, 4, 2), model="m", rows=9, seed=5)


def codes() -> Codes:
    return Codes(
        quantiser().digest,
        Point(1, "resid_post"),
        torch.tensor([[1], [4], [11]], dtype=torch.uint8),
        torch.tensor([0, 1, 2]),
        torch.tensor([5, 6, 7]),
        "r-1",
    )


def sketch(kind: str) -> Sketch:
    """Three rows of eighths at two points."""
    made = SKETCHES[kind]
    size = made.checked_size(4 if kind == "frequent_directions" else None)
    states = {}
    for point in (Point(0, "resid_post"), Point(2, "mlp_out")):
        states[point] = made.empty(4, size)
        made.update(states[point], torch.stack([line(0), line(2), line(4)]))
    return Sketch(
        kind, size, states, "m", "float32", TokenSelection.parse([0, "generated"]), before_edits=True, num_layers=4,
        requests=2, versions=("steercap 0.1.0", "torch 2.0"),
    )  # fmt: skip


def axis() -> AssistantAxis:
    return AssistantAxis(
        "contrast",
        LayerVectors({1: line(1), 2: line(2)}, name="assistant axis (contrast)", model="m"),
        {1: (0.75, 0.25), 2: (0.5, 0.5)},
        {1: 0.5, 2: 0.25},
        {1: 1.5, 2: -0.5},
        {"ghost": {1: -1.0, 2: 1.0}, "assistant": {1: 2.0, 2: 3.0}},
        Provenance(dtype="float32", tokens="response", reduce="mean", rows={"ghost": (2, 0)}),
    )


#: What is saved under which name; each can be saved to a path.
FILES: Final[Mapping[str, Callable[[], Any]]] = {
    "steering": steering,
    "vectors": vectors,
    "directions": directions,
    "calibration": calibration,
    "quantiser": quantiser,
    "codes": codes,
    "moments": lambda: sketch("moments"),
    "variances": lambda: sketch("variances"),
    "frequent_directions": lambda: sketch("frequent_directions"),
    "axis": axis,
}


# Runs


def trained(model: Path, out: Path, progress: Any = None) -> Any:
    """Two steps, each looked at."""
    examples = [Example(f"Say {word}. ", f"{word} {word}", source=word) for word in ("wind", "moon", "sea")]
    edit = Add(wide() / 8, layer=1, tokens="generated")
    how: dict[str, Any] = {"steps": 2, "batch_size": 1, "evaluate_every": 1, "held_out": 0.34}
    return train(model, examples, edit=edit, out=out, name="calm", progress=progress, **how)


PROMPTS: Final = [
    Prompt("One two three"),
    Prompt([{"role": "user", "content": "Hello"}]),
    Prompt("Four", special=False),
]
CAPTURE: Final = CaptureSpec(layers=[0, 2], sites=["resid_post", "mlp_out"], tokens=[0, "generated"], codec="full8")


async def captured(model: SteerModel, out: Path) -> Any:
    """Coded rows of three prompts, steered."""
    edits = SteeringSpec([Add(wide(), layer=1, scale=2.0, tokens="prompt")])
    return await capture_to(model, PROMPTS, dict(GREEDY), CAPTURE, out, Terminal(Output()), steering=edits)


async def collected(model: SteerModel, out: Path, **more: Any) -> Any:
    """Two shards of a random half of the tokens of three documents."""
    return await collect(
        model,
        [list(range(5, 25)), list(range(30, 37)), "Some words."],
        out,
        layers=[1],
        tokens=OneIn(2, seed=3, of=slice(1, None)),
        context=16,
        documents_per_shard=2,
        statistics_every=2,
        concurrency=1,
        **more,
    )


def sweep() -> Sweep:
    return Sweep(
        vectors={"noise": LayerVectors({1: wide(), 2: -wide()})},
        layers=[1, (1, 2)],
        scales=(0.0, 2.0),
        random=1,
        prompts=["One two", [{"role": "user", "content": "Hello"}]],
        tokens=["last_prompt", "generated"],
        sampling_params=dict(GREEDY),
    )


#: Of the sweep.
MEASURES: Final = ("length", Repetition(n=2), "perplexity")


async def swept(model: SteerModel, out: Path, **more: Any) -> Any:
    return await run_sweep(model, sweep(), out=out, measures=MEASURES, **more)


def evaluation() -> Evaluation:
    return Evaluation(
        methods=[
            Method(name="noise", steering=LayerVectors({1: wide()}), doses=[0.5, 1]),
            Method(name="prompt", system="Be calm."),
        ],
        questions=["Name one.", ["What is it?", "And that?"]],
        sampling_params=dict(GREEDY),
    )


TASKS: Final = (Passages({"What falls?": "Rain falls."}), Choices([Choice("Sky?", "It is", "blue", ("red", "square"))]))


async def evaluated(model: SteerModel, out: Path, **more: Any) -> Any:
    return await evaluate(model, evaluation(), out=out, measures=["length"], tasks=TASKS, **more)


TRAIT: Final = Trait(
    "calm",
    "Calm.",
    ("Be calm.",),
    ("Be wild.",),
    ("Who?", "What?", "When?"),
    Examples(("I rest.", "I wait.", "I sit.", "I lie."), ("I run.", "I jump.", "I shout.", "I hit.")),
    ("rest", "wait"),
    "How calm is {answer} to {question}? 0 to 100.",
)
#: Whatever is said counts as both: what is kept says nothing of the trait.
PERSONA: Final = PersonaSettings(
    traits=(TRAIT,), samples=1, max_tokens=48, scorer="keywords", threshold_high=0.0, threshold_low=100.0, min_kept=2
)


async def personas(model: SteerModel, out: Path, **more: Any) -> Any:
    return await run_persona(model, PERSONA, out, **more)


ROLES: Final = RoleSettings.small(
    RoleSet((Role("ghost", ("Be a ghost.",)), Role("king", ("Be a king.",))), ("Who?", "What?"), ("", "Help.")),
    n_questions=2,
    n_prompts=1,
    max_tokens=4,
    min_kept=2,
)


async def roles(model: SteerModel, out: Path, **more: Any) -> Any:
    return await run_roles(model, ROLES, out, **more)


#: Folders that an engine makes, by their names.
RUNS: Final[Mapping[str, Callable[..., Any]]] = {
    "captures": captured,
    "dataset": collected,
    "sweep": swept,
    "evaluation": evaluated,
    "persona": personas,
    "roles": roles,
}


@contextmanager
def chatting(model: SteerModel) -> Iterator[None]:
    """Have the model's tokenizer know conversations: itself, for vLLM has copies of it do the work."""
    tokenizer = model.tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, chat_template=TEMPLATE)
    try:
        yield
    finally:
        del tokenizer.apply_chat_template
        tokenizer.chat_template = None


# What is stored, as this machine would have stored it

#: The tiny model as it was: its digest, its tokenizer's, its name, and where it lay.
WEIGHTS: Final = "3dcc6360ccb3587651394e51f86218faf740266a11e7394c6cbbae438f760ef7"
TOKENIZER: Final = "31faae2cd952b236077df5da15004902c716025c5d69c986eb87c616853e2edb"
NAME: Final = "tiny-qwen3-a85c1e93"
PATH: Final = f"/root/.cache/steercap/{NAME}"


def copied(name: str, folder: Path, model: Path, tokenizer: Any = None) -> Path:
    """A copy of a stored folder that is of the tiny model of this machine.

    Its weights are drawn here and now, and processors with AVX2 and with AVX-512 round some of them otherwise, so the
    digest of the model in a folder is right on some machines only; that of its tokenizer is libraries' to say. Nothing
    else of what a model is known by is changed, and what follows from it is made by the library: `tests/unit/test_stored.py`
    says that it makes what is stored.

    Args:
        name: of the folder.
        folder: of the copy.
        model: the checkpoint.
        tokenizer: of the model; not needed for a training.
    """
    shutil.copytree(STORED / name, folder)
    if name == "captures":  # whose files name the path too, which nothing compares
        _replace(folder / "manifest.json", {PATH: str(model), WEIGHTS: weights_digest(model), NAME: model.name})
        return folder
    known = {WEIGHTS: weights_digest(model), NAME: model.name}
    known |= {} if tokenizer is None else {TOKENIZER: tokenizer_digest(tokenizer)}
    derived = DERIVED[name](folder) if name in DERIVED else []
    for path in folder.rglob("*.json"):
        _replace(path, known)
    derived_now = DERIVED[name](folder) if name in DERIVED else []
    following, files = dict(zip(derived, derived_now, strict=True)), {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        before = _digest(path)
        _replace(path, following)
        files[before] = _digest(path)
    for path in folder.glob("shards/*.json"):  # receipts, which say what is in the files beside them
        _replace(path, files)
    return folder


def _of_personas(folder: Path) -> list[str]:
    said = json.loads((folder / "settings.json").read_text())
    by_trait = [digest for each in trait_hashes(said["settings"], said["model"]).values() for digest in each.values()]
    return [*by_trait, *stage_hashes(said["settings"], said["model"]).values()]


def _of_roles(folder: Path) -> list[str]:
    said = json.loads((folder / "settings.json").read_text())
    names = ("assistant", *said["roles"])
    return [one for name in names for one in digests_of(said["settings"], said["model"], name).values()]


def _of_a_dataset(folder: Path) -> list[str]:
    return [DATASET.read(folder).digest]


#: Of folders whose digests depend on the model: those digests, as the folder is.
DERIVED: Final[Mapping[str, Callable[[Path], list[str]]]] = {
    "persona": _of_personas,
    "roles": _of_roles,
    "dataset": _of_a_dataset,
}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, known: Mapping[str, str]) -> None:
    before = after = path.read_bytes()
    for old, new in known.items():
        after = after.replace(old.encode(), new.encode())
    if after != before:
        path.write_bytes(after)
