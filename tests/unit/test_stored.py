"""What is stored and sent keeps its names: files, folders and frames of today are read and written alike by what comes.

Classes and modules may have other names and other places; then the imports here change, and nothing else. Messages are
sent under the names of their classes. A literal here changes only with a new version of the format that it is of, or
where something new is added.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import make_stored
import msgspec
import numpy as np
import pytest
import torch
from msgspec import inspect
from pyarrow import parquet
from stored_runs import (
    CAPTURE,
    FILES,
    GREEDY,
    MEASURES,
    PERSONA,
    PROMPTS,
    ROLES,
    RUNS,
    STORED,
    TASKS,
    TRAIT,
    copied,
    evaluation,
    line,
    steering,
    sweep,
    trained,
    vectors,
    wide,
)

from steercap import Add, Calibration, CaptureHandle, LowRank, Manifest, Sketch, SteeringSpec, errors
from steercap.adapters.process_exit import STARTUP_ERROR
from steercap.architectures.sites import SITES
from steercap.captures import files, manifest
from steercap.captures import sketch as sketches
from steercap.captures.quantisation import Codes, Quantiser, _codes_kind
from steercap.captures.quantisation import _kind as _quantiser_kind
from steercap.cli.captured import arguments_of_call
from steercap.client.connection import ERROR_HEADER
from steercap.core.biases import Bias
from steercap.core.framing import HEADER
from steercap.core.messages import (
    Answer,
    Call,
    EncoderShape,
    Joining,
    LineRange,
    Loaded,
    Owner,
    Placed,
    Question,
    TableBytes,
    Vectors,
    Wanted,
    decode_answer,
    decode_call,
    encode,
)
from steercap.core.plan import EXTRA_ARGS_KEY, InSlot, Plan
from steercap.core.program import Blob, Configuration, Entry, Response
from steercap.core.schema import Coding, PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.files import native
from steercap.files.native import READERS
from steercap.files.tables import read_table
from steercap.kernels.codecs import ENCODINGS
from steercap.kernels.sketches import SKETCHES
from steercap.lab.datasets import ActivationDataset, verify
from steercap.lab.datasets.collecting.documents import Cutting
from steercap.lab.datasets.collecting.readers import READERS as SOURCES
from steercap.lab.datasets.collecting.samples import ByPredicate, ByProbe, OneIn, Selected, TokenSample
from steercap.lab.datasets.collecting.samples import seed_of as seed_of_document
from steercap.lab.datasets.definition import DATASET
from steercap.lab.datasets.folder import Totals
from steercap.lab.datasets.shards import ShardReceipt
from steercap.lab.datasets.storage import FileReceipt
from steercap.lab.directions.contrast import derived_seed
from steercap.lab.directions.methods import METHODS
from steercap.lab.measures.score import Classifier, Score
from steercap.lab.measures.scores import SCORERS
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.measures.texts import Matches
from steercap.lab.personas import folder as persona_folder
from steercap.lab.personas import records, shipped_traits
from steercap.lab.personas import settings as persona_settings
from steercap.lab.personas.capture import AnswerRowsHeader, load_rows
from steercap.lab.personas.roles import AssistantAxis, load_roles_run
from steercap.lab.personas.roles import axis as roles_axis
from steercap.lab.personas.roles import folder as roles_folder
from steercap.lab.personas.roles import rows as roles_rows
from steercap.lab.personas.roles import settings as roles_settings
from steercap.lab.studies import Value, folder_of
from steercap.lab.studies.evaluation import TASKS as KNOWN_TASKS
from steercap.lab.studies.evaluation import Choices, Passages, read_results
from steercap.lab.studies.evaluation.definition import FOLDER as EVALUATION
from steercap.lab.studies.evaluation.store import Answer as EvaluationAnswer
from steercap.lab.studies.sweeps import MEASURES as KNOWN_MEASURES
from steercap.lab.studies.sweeps import OPERATIONS, Measure
from steercap.lab.studies.sweeps.grid import SWEEP
from steercap.lab.studies.sweeps.summaries import Record
from steercap.lab.training import OBJECTIVES, TrainingSettings
from steercap.lab.training import folder as training_folder
from steercap.lab.training.examples import ExampleTokens
from steercap.lab.training.training import _digest as digest_of_start
from steercap.steering import DirectionSet, LayerVectors, calibration, directions, layers
from steercap.steering import spec as specs
from steercap.steering.edits import EDITS
from steercap.testing import tiny_checkpoint

# Frames

#: Tag, names of the fields, and the first digits of the SHA-256 of a frame whose fields are filled by their types alone.
QUESTIONS = {
    "Attach": (("capture_bytes", "spill_folder", "spill_bytes"), "b83138f057e608ef"),
    "Listen": ((), "f86fd8fe74aa0509"),
    "Collect": (("wanted",), "1774d9f79a97603e"),
    "Read": (("nonce", "lines"), "7f3981547ede7abc"),
    "GetStats": ((), "03011cdbcff1a4e1"),
    "Configure": (("vectors", "configurations"), "cdd48b604c506709"),
    "GetSteeringRecord": (("wanted", "ended"), "515e4f07d4ffb86a"),
    "Engage": (("owners",), "8409dd3d1ca66bba"),
    "Unembed": (("rows", "count", "dtype", "tokens", "top", "normed"), "c33e4789f93461eb"),
    "Project": (("layer", "site", "rows", "count", "dtype"), "fdc8bef2699e21fb"),
    "Choose": (("layer", "rows", "count", "dtype"), "f929b3231b55b0a8"),
    "OpenSketch": (("name", "kind", "size", "points", "most_bytes"), "cb8e2bbf1c11caa5"),
    "PrepareSketch": (("joining",), "f5041172f69cfc37"),
    "CommitSketch": (("joining",), "888e58d10911b2e0"),
    "ReadSketch": (("name", "point", "start", "stop"), "170a18ba9089b1c9"),
    "CloseSketch": (("name",), "7a18ed6098c301a7"),
    "OpenSAE": (("digest", "point", "shape", "path", "nonce", "most_bytes"), "d756b09f6f590915"),
    "CloseSAE": (("digest", "point"), "1777fec842fb4f08"),
}
ANSWERS = {
    "NotCapturing": ((), "c72f6a4c9a551c4e"),
    "Listening": (("address",), "a20a9bc7dcee6ef5"),
    "Attached": (
        (
            "points",
            "schemas",
            "shard",
            "page_lines",
            "pages",
            "bank_rows",
            "bank_width",
            "reductions",
            "held",
            "path",
            "nonce",
            "loaded",
            "attention",
            "file",
            "file_lines",
        ),
        "acc1618c552cb3c4",
    ),
    "Collected": (("shares", "unfinished"), "b24d503a2a23bdc4"),
    "Lines": (("data",), "f672bf2e258c046c"),
    "Counted": (
        (
            "requests",
            "steered",
            "pages_in_use",
            "pages_touched",
            "pages",
            "page_bytes",
            "rows_written",
            "steps",
            "sketches",
            "sketch_bytes",
            "saes",
            "sae_bytes",
            "tables",
            "arena_pinned",
        ),
        "7a23bf845306e39e",
    ),
    "Configured": (("refused",), "78f3a89c02d5baad"),
    "SteeringRecords": (("records",), "3d9d87a01e1a9d74"),
    "Engaged": (("positions",), "7f20faf6c1554d3d"),
    "SketchOpened": (("refused",), "894b6b81d74fb87c"),
    "SketchCommitted": (("rows",), "da360380fe7a3138"),
    "SketchPart": (("kept", "rows", "squares", "filled", "data"), "f5e9464153361c35"),
    "SAEOpened": (("coming", "full", "unreachable", "refused"), "477600441f29ae8e"),
    "Failed": (("reason",), "1e91e1807a4ccd7c"),
    "Unembedded": (("logits", "least", "most", "spread", "total", "top", "best"), "4862aa131c061d4e"),
    "ProjectedRows": (("rows",), "b0faf7053e36e806"),
    "Chosen": (("ids", "weights", "refused"), "62bb5cf768acf077"),
    "Unhooked": (("reason",), "26d749fbc3230887"),
}


def filled(kind: Any) -> Any:
    """A value of a type that msgspec knows, which depends on nothing but the type."""
    match kind:
        case inspect.Metadata():
            return filled(kind.type)
        case inspect.UnionType():
            return filled(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType():
            return kind.cls(*(filled(field.type) for field in kind.fields))
        case inspect.VarTupleType(item_type=inspect.UnionType(types=types)) if all(
            hasattr(one, "tag") for one in types
        ):
            return tuple(map(filled, sorted(types, key=lambda one: one.tag)))
        case inspect.VarTupleType():
            return (filled(kind.item_type),)
        case inspect.TupleType():
            return tuple(map(filled, kind.item_types))
        case inspect.DictType():
            return {filled(kind.key_type): filled(kind.value_type)}
        case inspect.LiteralType():
            return min(kind.values)
        case inspect.BytesType():
            return b"\1\2"
        case inspect.BoolType() | inspect.IntType() | inspect.FloatType() | inspect.StrType():
            return {"BoolType": True, "IntType": 3, "FloatType": 0.5, "StrType": "s"}[type(kind).__name__]
    raise TypeError(kind)


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_frames_have_their_tags_fields_and_bytes() -> None:
    """Every question, in a call, and every answer."""
    found: dict[str, Any] = {}
    for kind in get_args(Question):
        frame = encode(Call((Owner("s", 3),), filled(inspect.type_info(kind))))
        assert encode(decode_call(frame)) == frame
        said = msgspec.msgpack.decode(frame[len(HEADER) :])
        assert (said.pop("type"), said.pop("released"), list(said)) == ("Call", [["s", 3]], ["question"])
        tag, *names = ((name, value) if name == "type" else name for name, value in said["question"].items())
        found[tag[1]] = (tuple(names), short(frame))
    assert found == QUESTIONS
    found = {}
    for kind in get_args(Answer):
        frame = encode(filled(inspect.type_info(kind)))
        assert encode(decode_answer(frame)) == frame
        said = msgspec.msgpack.decode(frame[len(HEADER) :])
        found[said["type"]] = (tuple(list(said)[1:]), short(frame))
    assert found == ANSWERS


def test_parts_of_answers_have_their_tags() -> None:
    """Those that come inside of another."""
    said = [msgspec.msgpack.decode(encode(filled(inspect.type_info(kind)))[len(HEADER) :]) for kind in get_args(Answer)]
    inner = {one["type"]: [part["type"] for part in parts] for one in said for parts in one.values() if _tagged(parts)}
    assert inner == {"Collected": ["CapturedRows", "Unknown"], "SteeringRecords": ["SteeringRecord", "Unknown"]}


def _tagged(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) and "type" in part for part in value)


#: Of what is sent and stored without names of its fields, one value each, and what it is sent as: fields may have other
#: names, and no other places.
IN_ORDER: list[tuple[msgspec.Struct, list[Any]]] = [
    (Owner(key="a", sample=1), ["a", 1]),
    (Wanted(owner=Owner("a", 1), total=2, first=3), [["a", 1], 2, 3]),
    (Joining(wanted=Wanted(Owner("a", 1), 2), sketches=("s",)), [[["a", 1], 2, 0], ["s"]]),
    (LineRange(start=1, count=2), [1, 2]),
    (Vectors(digest=b"d", bank_rows=(1,), data=b"x"), [b"d", [1], b"x"]),
    (TableBytes(ring=1, ring_in_use=2, bank=3, accumulators=4, pinned=5), [1, 2, 3, 4, 5]),
    (Loaded(family="f", code={"c": "d"}, candidates=2), ["f", {"c": "d"}, 2, {}]),
    (
        EncoderShape(d_in=1, d_sae=2, k=3, normalisation="n", centred=True, thresholds=False, shifts=True),
        [1, 2, 3, "n", True, False, True],
    ),
    (Blob(digest=b"d", rows=2), [b"d", 2]),
    (Bias(edit=1, scope=2, ids=b"i", values=b"v"), [1, 2, b"i", b"v"]),
    (Coding(encoding="rp8", k=1, seed=2), ["rp8", 1, 2]),
    (
        PointSchema(shape=(2, 3), dtype="float32", shards=2, writable=False, changes_kv=True, tokens="sampled"),
        [[2, 3], "float32", 2, False, True, "sampled"],
    ),
    (Range(start=1, stop=None, step=2), [1, None, 2]),
    (InSlot(slot=1, configuration=b"c"), [1, b"c"]),
    (
        Response(bias=1, gain=2, offset=3, minus=4, low=5, high=6, floor=7, threshold=8, relative=True),
        [1, 2, 3, 4, 5, 6, 7, 8, True],
    ),
    (
        Entry(edit=1, points=(2,), scope=3, write=4, read=5, joined=True, replacement=6, norm=7),
        [1, [2], 3, 4, 5, [0, 0, 0, 0, -math.inf, math.inf, -math.inf, -math.inf, False], True, 6, 7],
    ),
    (
        Placed(slot=1, configuration=Configuration((), (), 2, 3, (4,)), bank_rows=((5,),)),
        [
            1,
            {"entries": [], "blobs": [], "scopes": 2, "replacements": 3, "reads": [4], "biases": []},
            [[5]],
        ],
    ),
    (ExampleTokens(ids=(1, 2), prompt_len=1), [[1, 2], 1]),
]


@pytest.mark.parametrize(("value", "said"), IN_ORDER, ids=[str(number) for number in range(len(IN_ORDER))])
def test_what_has_no_names_has_its_order(value, said) -> None:
    """Two fields of one type that changed places would be read as each other."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == said


def test_a_plan_has_its_key_fields_and_bytes() -> None:
    """What a request carries."""
    frame = filled(inspect.type_info(Plan)).encode()
    assert (EXTRA_ARGS_KEY, HEADER, short(frame)) == ("steercap", b"sc\x03\x00", "3fcf74f79b597cb5")
    assert Plan.decode(frame).encode() == frame
    said = msgspec.msgpack.decode(frame[len(HEADER) :])
    assert list(said) == ["key", "prompt_len", "limit", "samples", "capture", "steering"]
    assert list(said["capture"]) == [
        "points",
        "ranges",
        "reduce",
        "coding",
        "before_edits",
        "accumulates",
        "vectors",
        "allow_nonfinite",
        "gather",
        "saes",
        "window",
        "attention",
    ]
    assert list(said["steering"]) == ["slot", "configuration", "identity", "scopes", "replaced", "biased", "held"]


# Names

EDIT_NAMES = ["ablate", "add", "add_if", "cap", "low_rank", "replace", "sae_feature", "set_projection"]


def test_native_files_name_their_types() -> None:
    """Of every kind the names that its files hold, and of which class each is made: by its name in these imports."""
    kinds = {
        kind.name: sorted(kind.types)
        for kind in (
            layers._kind(),
            directions._kind(),
            calibration._kind(),
            sketches._file_kind(),
            training_folder._kind(),
            _quantiser_kind(),
            _codes_kind(),
            roles_axis._kind(),
            specs._kind(),
        )
    }
    assert kinds == {
        "vectors": ["LayerVectors"],
        "directions": ["DirectionSet", "LayerVectors", "Provenance"],
        "calibration": ["Calibration"],
        "sketch": ["Sketch", "State"],
        "training": ["State", "TraitState", "Validation"],
        "quantiser": ["Quantiser"],
        "codes": ["Codes"],
        "axis": ["AssistantAxis", "LayerVectors", "Provenance"],
        "steering": sorted(["SteeringSpec", "LogitBias", *EDIT_NAMES]),
    }
    assert sorted(READERS) == sorted([*kinds, "captures"])
    assert native.VERSION == 1
    assert native.CONVENTION == "layers count from 0; resid_post of layer i is hidden_states[i + 1] of transformers"


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (EDITS, EDIT_NAMES),
        (METHODS, ["difference", "pca", "probe"]),
        (SKETCHES, ["frequent_directions", "moments", "variances"]),
        (
            ENCODINGS,
            [
                "attention",
                "calibrated8",
                "features",
                "fp8",
                "full8",
                "int4",
                "projected",
                "raw",
                "reduced",
                "rp16",
                "rp8",
                "topk8",
            ],
        ),
        (KNOWN_MEASURES, ["classifier", "length", "matches", "perplexity", "refusal", "repetition", "score"]),
        (OPERATIONS, ["ablate", "add", "cap", "set_projection"]),
        (KNOWN_TASKS, ["choices", "passages"]),
        (OBJECTIVES, ["bipo", "distillation", "likelihood", "reps"]),
        (SCORERS, ["judge", "keywords", "minilm"]),
        (SOURCES, ["arrow", "jsonl", "parquet", "text"]),
        (
            SITES,
            [
                "attn_in",
                "attn_out",
                "embed",
                "final_norm",
                "k",
                "mhc_attn_post_mix",
                "mhc_attn_res_mix",
                "mhc_ffn_post_mix",
                "mhc_ffn_res_mix",
                "mhc_streams_final",
                "mhc_streams_pre_attn",
                "mhc_streams_pre_mlp",
                "mlp_in",
                "mlp_out",
                "neurons",
                "q",
                "resid_mid",
                "resid_post",
                "resid_pre",
                "router",
                "v",
                "z",
            ],
        ),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_members_keep_their_names(registry, names) -> None:
    """They stand in files, requests and definitions; further ones may come."""
    assert set(names) <= set(registry)


#: Errors are sent by the names of their classes.
ERRORS = [
    "SteercapError",
    "InvalidRequest",
    "InvalidSetting",
    "InvalidPrompt",
    "InvalidSelection",
    "EmptySelection",
    "InvalidSpec",
    "PointSplit",
    "TooManyEdits",
    "InvalidEdit",
    "InvalidVector",
    "LayerOutOfRange",
    "UnknownName",
    "PointNotArmed",
    "RunDiffers",
    "EngineFailure",
    "EngineDied",
    "ModelNotLoaded",
    "UnsupportedModel",
    "ModelNotProved",
    "UnsupportedRunner",
    "TapsNotInstalled",
    "MainGuardMissing",
    "ModelClosed",
    "WrongEventLoop",
    "MemoryNotShared",
    "WorkerFailure",
    "InvalidFrame",
    "ServerFailure",
    "CaptureError",
    "CaptureIncomplete",
    "CaptureNotFinite",
    "CaptureMemoryFull",
    "SAEMemoryFull",
    "CaptureNotFetched",
    "CaptureReleased",
    "SketchError",
    "SketchMemoryFull",
    "SketchIncomplete",
    "SketchClosed",
    "SteeringError",
    "SteeringNotApplied",
    "SteeringSlotsFull",
    "PersonaError",
    "JudgeFailed",
    "RunUnfinished",
    "TooFewKept",
    "CollectionStopped",
    "TrainingDiverged",
    "MissingExtra",
    "InvalidFile",
]


def test_errors_keep_their_names() -> None:
    """A client raises what a server's header names, and a start what its engine left word of; further ones may come."""
    assert ERROR_HEADER == "x-steercap-error"
    assert STARTUP_ERROR == "refusal.json"
    assert [name for name in ERRORS if getattr(getattr(errors, name, None), "__name__", "") != name] == []


# What digests and names of folders are made of


def test_edits_are_described_alike() -> None:
    """Digests of what a training starts from hold it, and steering files all of it."""
    assert list(map(repr, steering().flat())) == [
        "Add(vector=<4>, scale=2.0, relative=False, layer=1, site='resid_post', tokens='generated')",
        (
            "AddIf(vector=<4>, probe=<4>, threshold=0.5, scale=-1.0, bias=0.25, relative=False, layers=(1, 2), "
            "site='resid_post', tokens=[0, -1])"
        ),
        "Cap(vector=<4>, low=-1.0, high=2.0, layers=slice(1, 3, None), site='mlp_out', tokens='all')",
        "LowRank(read=<2 × 4>, write=<2 × 4>, bias=<2>, scale=0.5, layer=0, site='resid_post', tokens='all')",
        "Replace(rows=<2 × 4>, positions=(0, -1), elements=(0, 1, 2, 3), layer=1, site='resid_post', tokens=[0, -1])",
        (
            "SAEFeature(encoder=<4>, decoder=<4>, value=3.0, bias=0.5, decoder_bias=<4>, threshold=0.25, layer=2, "
            "site='resid_post', tokens='all')"
        ),
        "SetProjection(vector=<4>, value=1.5, layer=-1, site='z', tokens='all', part=1)",
        "Ablate(vector=<4>, keep=0.5, layers='all', site='resid_post', tokens=slice(2, None, 1))",
        "LogitBias({3: 1.5, 7: -2.0}, tokens='generated')",
        "LogitBias(<8>, tokens='all')",
    ]
    assert steering().sha256 == "96f3fad1150b2249896d0eab39649ef10a4fc31e05ac8009099c7445c322354c"
    start = SteeringSpec(
        [
            Add(line(1), layer=1, scale=2.0),
            LowRank(line(1, 8).view(2, 4), line(3, 8).view(2, 4), layer=0),
        ]
    )
    assert digest_of_start(start) == "6f57f2e50f3003eec147d0aca2e6479387eeaa20fd5676d448ff1e0611398249"


def test_trainings_are_described_alike() -> None:
    """Objectives and settings stand in training.json, in words."""
    assert {name: repr(OBJECTIVES[name]) for name in ("bipo", "distillation", "likelihood", "reps")} == {
        "bipo": "BiPO(beta=0.1)",
        "distillation": "Distillation(temperature=1.0)",
        "likelihood": "Likelihood()",
        "reps": "RePS(factors=(1.0,))",
    }
    assert TrainingSettings().described() == {
        "fields": "None",
        "steps": "200",
        "batch_size": "8",
        "evaluate_every": "20",
        "patience": "5",
        "optimizer": "torch.optim.adamw.AdamW(lr=0.02, weight_decay=0.0)",
        "scheduler": "None",
        "norm_penalty": "0.0",
        "sparsity_penalty": "0.0",
        "max_grad_norm": "None",
        "gate_width": "1.0",
        "seed": "0",
        "dtype": "float32",
    }


SCORED = (
    "Score(trait=Trait(name='calm', description='Calm.', positive=('Be calm.',), negative=('Be wild.',), "
    "questions=('Who?', 'What?', 'When?'), examples=Examples(positive=('I rest.', 'I wait.', 'I sit.', 'I lie.'), "
    "negative=('I run.', 'I jump.', 'I shout.', 'I hit.')), keywords=('rest', 'wait'), "
    "rubric='How calm is {answer} to {question}? 0 to 100.'), scorer="
)
JUDGE = (
    "Judge(base_url='http://h/v1', model='j', api_key_env='STEERCAP_JUDGE_API_KEY', concurrency=16, retries=5, "
    "backoff=1.0, timeout=60.0, logprobs=True)"
)


#: Names of folders; what their measures and tasks are, and say of themselves.
NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "length-566c7488": (KNOWN_MEASURES["length"], "Length()"),
    "perplexity-03d5610b": (KNOWN_MEASURES["perplexity"], "Perplexity()"),
    "refusal-16ac6d5d": (KNOWN_MEASURES["refusal"], "Refusal()"),
    "repetition-7e9ec004": (KNOWN_MEASURES["repetition"], "Repetition(n=3)"),
    "m-91a07113": (lambda: Matches("m", "x"), "Matches(name='m', pattern='x', per_words=False)"),
    "c-bd64feaa": (
        lambda: Classifier("c", ("a", "b"), ("d", "e")),
        "Classifier(name='c', positive=('a', 'b'), negative=('d', 'e'))",
    ),
    "calm-c7fb713f": (lambda: Score(TRAIT, "keywords"), f"{SCORED}Keywords(density=0.05))"),
    "calm-8cd8e3ed": (lambda: Score(TRAIT, "minilm"), f"{SCORED}MiniLM(sentences=True))"),
    "calm-4d944e9b": (lambda: Score(TRAIT, Judge("http://h/v1", "j")), f"{SCORED}{JUDGE})"),
    "neutral-0afa0e91": (lambda: TASKS[0], "Passages([('What falls?', '', ('Rain falls.',))])"),
    "choices-652c9583": (lambda: TASKS[1], "Choices([('Sky?', 'It is', (' blue', ' red', ' square'))])"),
}


@pytest.mark.parametrize("folder", NUMBERS)
def test_folders_of_numbers_keep_their_names(folder) -> None:
    """They are named by what a measure or a task says of itself: under another name nothing would be found."""
    make, said = NUMBERS[folder]
    found = make()
    assert repr(found) == said
    assert folder_of(found.label, getattr(found, "key", repr(found))) == folder


def test_folders_of_what_comes_with_steercap_keep_their_names() -> None:
    """Its texts are part of the names too."""
    shipped = {
        "evil-e897998b": Score(shipped_traits()["evil"], "minilm"),
        "evil-1c68bcf2": Score(shipped_traits()["evil"], "keywords"),
        "evil-f232b919": Score(shipped_traits()["evil"], Judge("http://h/v1", "j")),
        "neutral-dad09254": Passages(),
        "choices-60091f56": Choices(),
    }
    assert {folder_of(one.label, getattr(one, "key", repr(one))): one for one in shipped.values()} == shipped


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (Selected([0, "generated"]), {"tokens": "[0, 'generated']"}),
        (Selected([True, False, True]), {"tokens": "mask(3: 0:1, 2:3)"}),
        (OneIn(4), {"tokens": "'all'", "one_in": 4, "seed": 0}),
        (ByPredicate(np.equal, name="mine"), {"tokens": "'all'", "predicate": "mine"}),
        (
            ByProbe(vectors(), layer=2, above=0.5),
            {
                "tokens": "'all'",
                "probe": "8a59f4faf430796775b04a8275c706f1bb9c2a871b3093a31b6e94ecdf9a424f",
                "layer": 2,
                "site": "mlp_out",
                "above": 0.5,
                "below": None,
            },
        ),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, TokenSample) else "",
)
def test_samples_of_tokens_are_described_alike(sample, said) -> None:
    """In the definition of a data set."""
    assert json.loads(json.dumps(sample.described())) == said


def test_settings_are_described_alike() -> None:
    """Windows, personas, roles, and what a command captures."""
    assert Cutting(None, 16).described() == {"context": 16, "long": "split", "bos": "document", "template": {}}
    said = persona_settings.described(PERSONA)
    assert list(said.pop("traits")["calm"]) == [
        "name",
        "description",
        "positive",
        "negative",
        "questions",
        "examples",
        "keywords",
        "rubric",
    ]
    assert said == {
        "seed": 0,
        "n_samples": 1,
        "n_questions": None,
        "n_prompts": None,
        "max_tokens": 48,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_in_flight": 256,
        "scorer": "keywords",
        "scorer_args": {},
        "threshold_high": 0.0,
        "threshold_low": 100.0,
        "paired": False,
        "min_kept": 2,
        "layers": "all",
        "site": "resid_post",
        "read_system": True,
        "method": "difference",
        "held_out": 0.25,
    }
    bare = {"description": "", "keywords": [], "examples": [], "rubric": ""}
    assert roles_settings.described(ROLES) == {
        "roles": {
            "roles": {
                "ghost": {"name": "ghost", "prompts": ["Be a ghost."], **bare},
                "king": {"name": "king", "prompts": ["Be a king."], **bare},
            },
            "questions": ["Who?", "What?"],
            "assistant": ["", "Help."],
            "plain": [],
        },
        "seed": 0,
        "n_samples": 1,
        "n_questions": 2,
        "n_prompts": 1,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_in_flight": 64,
        "scorer": None,
        "scorer_args": {},
        "threshold": 50.0,
        "min_kept": 2,
        "layers": "all",
        "site": "resid_post",
        "read_system": True,
        "read_together": 1,
    }
    assert arguments_of_call(PROMPTS, dict(GREEDY), CAPTURE) == {
        "prompts": "5bf010b555271c0769007621bd379858193a0855c29add9383bb7adba904eeb2",
        "sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4},
        "layers": "(0, 2)",
        "sites": ("resid_post", "mlp_out"),
        "tokens": "TokenSelection(terms=(0, 'generated'))",
        "reduce": None,
    }


def test_seeds_are_derived_alike() -> None:
    """An answer that is asked for later is drawn as it would have been."""
    assert derived_seed("0/0/0") == 3051931488724851722
    assert records.seed_of(0, "calm/positive/0/0/0") == 1129430658
    assert seed_of_document(0, 1) == 313702574736366215


# Folders

FOLDERS = {
    "sweep": (
        SWEEP,
        "sweep.json",
        (
            "model",
            "vectors",
            "layers",
            "scales",
            "operations",
            "tokens",
            "relative",
            "random",
            "reversed",
            "seed",
            "prompts",
            "sampling",
            "samples",
        ),
    ),
    "evaluation": (
        EVALUATION,
        "evaluation.json",
        ("model", "questions", "sampling", "samples", "chat", "seed", "conditions"),
    ),
    "training": (
        training_folder.FOLDER,
        "training.json",
        ("model", "objective", "settings", "edits", "examples", "held_out", "world"),
    ),
    "dataset": (
        DATASET,
        "definition.json",
        ("version", "kind", "model", "points", "documents_per_shard", "asked", "statistics_every", "num_layers"),
    ),
    "captures": (manifest.CAPTURES, "manifest.json", ("version", "kind", "model", "asked", "layouts", "requests")),
    "persona": (persona_folder.RUN, "settings.json", ("version", "model", "settings", "done")),
    "roles": (roles_folder.RUN, "settings.json", ("version", "model", "settings", "roles")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_what_it_said(name, tmp_path) -> None:
    """The file of its definition has its name and its fields, and what is read is written as it was."""
    kind, file, names = FOLDERS[name]
    assert kind.file == file
    text = (STORED / name / file).read_bytes()
    assert tuple(json.loads(text)) == names
    kind.write(tmp_path, kind.read(STORED / name))
    assert (tmp_path / file).read_bytes() == text


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            Record,
            (
                "prompt prompt_token_ids text output_token_ids number vector operation layers scale control prompt_index "
                "sample finish_reason"
            ),
        ),
        (Value, "number value"),
        (
            EvaluationAnswer,
            "prompt prompt_token_ids text output_token_ids number method dose question sample turn finish_reason",
        ),
        (
            records.Response,
            "id trait sign prompt question sample seed system_prompt question_text answer token_ids finish",
        ),
        (records.Score, "id score"),
        (records.Kept, "id trait sign question score"),
        (AnswerRowsHeader, "version layers ids prompts"),
        (
            records.RoleResponse,
            "id role prompt question sample seed system_prompt question_text answer token_ids finish",
        ),
        (roles_settings.RoleOutcome, "responses kept unscored mean_score left_out"),
        (roles_rows.RoleRowsHeader, "version role layers questions counts prompts"),
        (
            manifest.ManifestRequest,
            "file bytes sha256 id layout rows positions prompt_tokens output_tokens prompt_sha256 text_sha256 steering",
        ),
        (manifest.Layout, "points returned reduce directions versions"),
        (manifest.PointLayout, "layer site codec parameters tensors shards row ranks constants"),
        (manifest.JournalLine, "layout request"),
        (
            files.Header,
            (
                "version model request_id text num_layers points messages reduce writes steering verified directions marks "
                "coding schemas attention_rules shards media recomputed"
            ),
        ),
        (native.NativeHeader, "version kind model convention sha256 content provenance"),
        (ShardReceipt, "version number definition first stop tokens rows documents_sha256 files"),
        (FileReceipt, "bytes sha256"),
        (Totals, "version shards documents tokens rows bytes sha256"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_records_have_their_fields(kind, names) -> None:
    """Columns of tables, and headers of files; further ones may come behind them, with defaults."""
    assert " ".join(kind.__struct_encode_fields__).startswith(names)


# Files


def laid_out(path: Path) -> tuple[Any, dict[str, Any]]:
    """A safetensors file as the format has it: steercap's header, and dtype, shape and bytes of every tensor."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    said = json.loads(header.pop("__metadata__")["steercap"])
    tensors = {}
    for name, one in header.items():
        first, stop = one["data_offsets"]
        tensors[name] = (one["dtype"], one["shape"], data[start + first : start + stop])
    return said, tensors


LOADED: dict[str, Callable[[Path], Any]] = {
    "steering": SteeringSpec.load,
    "vectors": LayerVectors.load,
    "directions": DirectionSet.load,
    "calibration": Calibration.load,
    "quantiser": Quantiser.load,
    "codes": Codes.load,
    "moments": Sketch.load,
    "variances": Sketch.load,
    "frequent_directions": Sketch.load,
    "axis": AssistantAxis.load,
    "handle": CaptureHandle.load,
}


@pytest.mark.parametrize("name", LOADED)
def test_a_file_is_read_and_written_as_it_was(name, tmp_path) -> None:
    """Header and tensors, to the byte; and what makes the same value anew writes the same file."""
    path = STORED / f"{name}.safetensors"
    again = tmp_path / path.name
    LOADED[name](path).save(again)
    assert laid_out(again) == laid_out(path)
    if name in FILES:
        made = tmp_path / "made.safetensors"
        FILES[name]().save(made)
        assert laid_out(made) == laid_out(path)


def test_all_that_is_stored_is_made_by_the_script_and_stays(tmp_path, monkeypatch) -> None:
    """It makes what is not there, and refuses what is."""
    assert {path.stem for path in STORED.iterdir()} == {*FILES, *make_stored.OTHERS, *RUNS}
    monkeypatch.setattr("sys.argv", ["make_stored.py", "vectors", "handle", "--out", str(tmp_path)])
    make_stored.main()
    for name in ("vectors", "handle"):
        assert laid_out(tmp_path / f"{name}.safetensors") == laid_out(STORED / f"{name}.safetensors")
    with pytest.raises(SystemExit):
        make_stored.main()


def test_a_file_of_steering_says_what_it_said() -> None:
    """Every edit with its vectors."""
    found = SteeringSpec.load(STORED / "steering.safetensors")
    assert found.sha256 == "96f3fad1150b2249896d0eab39649ef10a4fc31e05ac8009099c7445c322354c"
    add, add_if, cap, low_rank, replace, feature, projection, ablate, bias, biases = found.flat()
    assert [keeper for _, keeper in found.segments()] == [None] * 7 + [(7,)] + [None] * 2
    assert add.vector.tolist() == [0.125, 0.25, 0.375, 0.5]
    assert (add.layer, add.scale, str(add.tokens)) == (1, 2.0, "'generated'")
    assert add_if.probe.tolist() == [0.375, 0.5, 0.625, 0.75]
    assert (add_if.layers, add_if.threshold, add_if.bias) == ((1, 2), 0.5, 0.25)
    assert (cap.low, cap.high, cap.layers, cap.site) == (-1.0, 2.0, slice(1, 3), "mlp_out")
    assert low_rank.write.tolist() == [[0.375, 0.5, 0.625, 0.75], [0.875, 1.0, 1.125, 1.25]]
    assert low_rank.bias.tolist() == [0.125, 0.25]
    assert (replace.positions, replace.elements) == ((0, -1), (0, 1, 2, 3))
    assert (feature.value, feature.threshold, feature.decoder_bias.tolist()) == (3.0, 0.25, [0.875, 1.0, 1.125, 1.25])
    assert (projection.value, projection.layer, projection.part, projection.site) == (1.5, -1, 1, "z")
    assert (ablate.keep, ablate.layers, str(ablate.tokens)) == (0.5, "all", "slice(2, None, 1)")
    assert bias.bias == {3: 1.5, 7: -2.0}
    assert biases.bias.tolist() == [-0.25, -0.125, 0.0, 0.125, 0.25, 0.375, 0.5, 0.625]


def test_files_of_vectors_say_what_they_said() -> None:
    """Vectors, directions with their origin, an axis, and a calibration."""
    found = LayerVectors.load(STORED / "vectors.safetensors")
    assert (found.name, found.model, found.site) == ("warm", "m", "mlp_out")
    assert {layer: vector.tolist() for layer, vector in found.items()} == {
        0: [0.125, 0.25, 0.375, 0.5],
        2: [0.25, 0.375, 0.5, 0.625],
    }
    both = DirectionSet.load(STORED / "directions.safetensors")
    assert {name: one[2].tolist() for name, one in both.items()} == {
        "a": [0.125, 0.25, 0.375, 0.5],
        "b": [0.25, 0.375, 0.5, 0.625],
    }
    origin = both.provenance
    assert (origin.revision, origin.dtype, origin.tokens, origin.reduce, origin.method, origin.seed) == (
        "r",
        "float32",
        "all",
        "mean",
        "difference",
        3,
    )
    assert (origin.prompts, origin.rows, origin.held_out) == (
        {"a": "0f", "b": "1f"},
        {"a": (4, 5), "b": (6, 7)},
        {"a": (1, 2), "b": (2, 1)},
    )
    assert (origin.auc["a"][2], origin.row_norms["b"][1]) == (0.75, 4.5)
    axis = AssistantAxis.load(STORED / "axis.safetensors")
    assert (axis.how, axis.explained, axis.cosine, axis.standing) == (
        "contrast",
        {1: (0.75, 0.25), 2: (0.5, 0.5)},
        {1: 0.5, 2: 0.25},
        {1: 1.5, 2: -0.5},
    )
    assert axis.ranked(1) == [("ghost", -1.0), ("assistant", 2.0)]
    known = Calibration.load(STORED / "calibration.safetensors")
    assert (known.model, known.revision, known.dtype, known.tokens, known.prompts, known.texts, known.rows) == (
        "m",
        "r",
        "bfloat16",
        "slice(1, None, 1)",
        "2f",
        3,
        12,
    )
    assert known.means[Point(1, "z")].tolist() == [0.125, 0.25, 0.375, 0.5]
    assert known.spreads[Point(1, "z")].tolist() == [0.25, 0.375, 0.5, 0.625]


def test_files_of_rows_say_what_they_said() -> None:
    """Codebooks, codes, and captures that were saved."""
    books = Quantiser.load(STORED / "quantiser.safetensors")
    assert (books.point, books.model, books.rows, books.seed) == (Point(1, "resid_post"), "m", 9, 5)
    assert books.codebooks[1].tolist() == [[1.0, 1.125], [1.25, 1.375], [1.5, 1.625], [1.75, 1.875]]
    codes = Codes.load(STORED / "codes.safetensors")
    assert codes.quantiser == books.digest == "806e458ed0389357c545b813780b66074cccb8120ed7fcb289565d7395a166b8"
    assert (codes.codes.tolist(), codes.positions.tolist(), codes.token_ids.tolist()) == (
        [[1], [4], [11]],
        [0, 1, 2],
        [5, 6, 7],
    )
    handle = CaptureHandle.load(STORED / "handle.safetensors")
    assert (handle.request_id, handle.model, handle.prompt_token_ids, handle.output_token_ids) == (
        "r",
        "m",
        (5, 6, 7),
        (8, 9),
    )
    assert (handle.positions.tolist(), handle.token_ids.tolist()) == ([0, 1, 2, 3], [5, 6, 7, 8])
    assert handle.captures[2].tolist() == [[200.0] * 2, [201.0] * 2, [202.0] * 2, [203.0] * 2]


@pytest.mark.parametrize("name", ["moments", "variances", "frequent_directions"])
def test_a_file_of_a_sketch_says_what_it_said(name) -> None:
    """What it was of, and its statistics."""
    found = Sketch.load(STORED / f"{name}.safetensors")
    assert (found.kind, found.model, found.dtype, str(found.tokens), found.before_edits, found.num_layers) == (
        name,
        "m",
        "float32",
        "[0, 'generated']",
        True,
        4,
    )
    assert (found.rows, found.requests, found.versions) == (3, 2, ("steercap 0.1.0", "torch 2.0"))
    assert found.points == (Point(0, "resid_post"), Point(2, "mlp_out"))
    torch.testing.assert_close(
        found.mean(0, "resid_post"), torch.tensor([0.25, 0.375, 0.5, 0.625], dtype=torch.float64)
    )
    if name == "frequent_directions":
        rows, bound = found.frequent_directions(2, "mlp_out")
        assert (rows[:3].tolist(), bound) == (
            [[0.0, 0.125, 0.25, 0.375], [0.25, 0.375, 0.5, 0.625], [0.5, 0.625, 0.75, 0.875]],
            0.0,
        )
    else:
        torch.testing.assert_close(found.variance(2, "mlp_out"), torch.full((4,), 0.0625, dtype=torch.float64))


# Folders, read


def test_stored_captures_are_read() -> None:
    """Every file that the manifest lists, decoded."""
    found = Manifest.load(STORED / "captures")
    assert found.document.asked["steering"] == "f1645ccbae67985e50c2be95a2c286bf42f90a8fa1c3b60c523ffebb36976e59"
    sums = [
        (
            handle.text,
            handle.output_token_ids,
            handle.positions.tolist(),
            [round(float(handle.captures[point].double().sum()), 3) for point in handle.points],
        )
        for handle in found.handles()
    ]
    assert sums == [
        ("", (253, 116, 135, 260), [0, 13, 14, 15], [170.619, 179.923, 181.895, 102.012]),
        ("", (446, 418, 489, 290), [0, 10, 11, 12], [-86.879, -21.496, -549.926, -222.94]),
        ('"', (448, 444, 1, 102), [0, 4, 5, 6], [188.121, 152.104, 206.436, 154.636]),
    ]
    _, talk, _ = found.handles()
    assert [(span.role, span.start, span.stop) for span in talk.messages] == [
        ("user", 2, 7),
        ("generation_prompt", 8, 10),
        ("assistant", 10, 14),
    ]


def test_a_stored_data_set_is_read(tmp_path) -> None:
    """Its shards are sound, and its rows are those of their tokens."""
    folder = shutil.copytree(STORED / "dataset", tmp_path / "dataset")
    totals = verify(folder)
    assert (totals.documents, totals.shards, totals.tokens, totals.rows) == (3, 2, 27, 10)
    found = ActivationDataset(folder)
    assert (len(found), found.points, found.width) == (10, ("resid_post[1]",), 128)
    torch.testing.assert_close(
        found[0:10].double().sum(1),
        torch.tensor(
            [-84.277, -27.023, 19.812, 130.82, -71.862, 143.807, 25.553, -36.473, 105.476, -30.869], dtype=torch.float64
        ),
        rtol=0,
        atol=1e-3,
    )
    tokens = [
        row["token"]
        for part in sorted((folder / "shards").glob("*.parquet"))
        for row in parquet.read_table(part).to_pylist()
    ]
    assert tokens == [7, 9, 10, 12, 17, 20, 76, 86, 78, 82]
    assert DATASET.read(folder).digest == "3a7b2b42d1a51b5feae07eb06ffcabf78461ed9cfb7386f0ed80b97c9e958a38"
    assert int(found.statistics().count) == 4


def test_a_stored_sweep_is_read() -> None:
    """It is the sweep of these arguments, with its answers and their numbers."""
    folder = STORED / "sweep"
    found = SWEEP.read(folder)
    assert sweep().definition(found.model) == found
    assert found.vectors == {"noise": "74a1195b98fdb2bc858f31565d9fc08e739108e4511de071d84da4cb65a805fa"}
    (answers,) = (folder / "answers").iterdir()
    by_number = {one.number: one for one in read_table(answers, Record)}
    texts = ("One two", "Hello")
    assert all(by_number[request.number].answers(request, texts[request.prompt]) for request in sweep().requests())
    assert by_number[2].output_token_ids == (228, 382, 65, 419)
    measures = [KNOWN_MEASURES[one]() if isinstance(one, str) else one for one in MEASURES]
    values = [folder / "values" / folder_of(one.label, one.key) for one in measures if isinstance(one, Measure)]
    assert sorted((folder / "values").iterdir()) == sorted(values)
    assert {one.value for path in values[:2] for part in path.iterdir() for one in read_table(part, Value)} == {
        4.0,
        0.0,
    }


def test_a_stored_evaluation_is_read(tmp_path) -> None:
    """Without an engine: its answers, their numbers, and what the fixed texts cost."""
    folder = shutil.copytree(STORED / "evaluation", tmp_path / "evaluation")
    found = read_results(evaluation(), out=folder, measures=["length"], tasks=TASKS)
    assert [one.text for one in found.answers] == ["", "u", "u`e"] * 3 + ["\x1f", "\x11p", "�\x03H"]
    assert found.values["length"] == [4.0] * 12
    assert list(found.readings["neutral"].values()) == [
        [4060.835325912386],
        [3974.703798237984],
        [3890.5876947916267],
        [4013.5107209036105],
    ]
    assert [one.digest[:8] for one in EVALUATION.read(folder).conditions] == [
        "439083f3",
        "60542e76",
        "ac85fb87",
        "5008d094",
    ]


def test_a_stored_run_of_personas_is_read() -> None:
    """Its digests are those of its settings, its rows and vectors are there."""
    folder = STORED / "persona"
    found = persona_folder.RUN.read(folder)
    by_trait = persona_settings.trait_hashes(found.settings, found.model)
    together = persona_settings.stage_hashes(found.settings, found.model)
    assert found.done == {
        "generate/calm": by_trait["generate"]["calm"],
        "score/calm": by_trait["score"]["calm"],
        "capture/calm": by_trait["capture"]["calm"],
        "vectors": together["vectors"],
    }
    assert persona_settings.described(PERSONA)["traits"].keys() == found.settings["traits"].keys()
    answers = read_table(folder / "responses.parquet", records.Response)
    assert [(one.id, len(one.token_ids), one.finish) for one in answers] == [
        ("calm/positive/0/0/0", 48, "length"),
        ("calm/positive/0/1/0", 48, "length"),
        ("calm/positive/0/2/0", 0, "stop"),
        ("calm/negative/0/0/0", 43, "stop"),
        ("calm/negative/0/1/0", 48, "length"),
        ("calm/negative/0/2/0", 48, "length"),
    ]
    scores = read_table(folder / "scores.parquet", records.Score)
    assert [one.score for one in scores] == [0.0, 0.0, None, 0.0, 0.0, 0.0]
    header, rows = load_rows(folder / "rows" / "calm.safetensors")
    assert (header.layers, len(header.ids), rows.shape) == ((0, 1, 2, 3), 5, (5, 4, 128))
    made = DirectionSet.load(folder / "directions.safetensors")
    assert (made.model, made.layers, made.provenance.method) == ("tiny-qwen3-a85c1e93", (0, 1, 2, 3), "difference")


def test_a_stored_run_over_roles_is_read(tmp_path) -> None:
    """Without a model: every role is done under the digests of its settings, and has its rows."""
    folder = shutil.copytree(STORED / "roles", tmp_path / "roles")
    said = roles_folder.RUN.read(folder)
    for name in ("assistant", "ghost", "king"):
        digests = roles_settings.digests_of(said.settings, said.model, name)
        state = json.loads((folder / "roles" / name / "state.json").read_text())
        assert state["done"] == {"generate": digests["generate"], "read": digests["read"]}
        assert state["outcome"] == {"responses": 2, "kept": 2, "unscored": 0, "mean_score": None, "left_out": ""}
    found = load_roles_run(folder)
    assert (found.rows.names, found.rows.layers) == (("ghost", "king"), (0, 1, 2, 3))
    torch.testing.assert_close(
        found.rows.at("king", 2).double().sum(1),
        torch.tensor([-38.085, -40.803], dtype=torch.float64),
        rtol=0,
        atol=1e-3,
    )
    assert roles_settings.described(found.settings) == roles_settings.described(ROLES)
    assert said.settings["max_in_flight"] == found.settings.concurrency  # the name in files is that of before


@pytest.fixture
def no_progress_bars() -> Iterator[None]:
    """Transformers' bars are not for tests."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.usefixtures("no_progress_bars")
def test_a_stored_training_is_read_and_one_that_was_stopped_goes_on(tmp_path) -> None:
    """The first takes no step, the second one, and both come to the same vector: to what processors round otherwise."""
    checkpoint = tiny_checkpoint("qwen3")
    done: list[int] = []
    folder = copied("training", tmp_path / "training", checkpoint)
    state = training_folder.load_state(folder)
    assert (state.step, state.traits["calm"].best_step) == (2, 2)
    found = trained(checkpoint, folder, lambda at: done.append(at.done))
    assert (done[-1:], found.best_step) == ([2], 2)
    assert [(one.step, round(one.validation_loss, 4)) for one in found.history] == [(0, 7.7341), (1, 7.73), (2, 7.7279)]
    (edit,) = SteeringSpec.load(STORED / "training" / "calm.safetensors").flat()
    assert torch.equal(found.spec.flat()[0].vector, edit.vector)
    assert laid_out(folder / "state.safetensors") == laid_out(STORED / "training" / "state.safetensors")
    done.clear()
    folder = copied("training_stopped", tmp_path / "stopped", checkpoint)
    assert training_folder.load_state(folder).step == 1
    again = trained(checkpoint, folder, lambda at: done.append(at.done))
    assert done[-1] == 2
    assert 0 not in done
    torch.testing.assert_close(again.spec.flat()[0].vector, edit.vector, rtol=1e-3, atol=1e-4)
    assert not torch.equal(edit.vector, wide() / 8)
