"""A codec for each site: rows are encoded as the formulas of the codecs say, and each codec has a file of its own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from cli_calls import call

from steercap import AttentionSummary, CaptureHandle, CaptureSpec
from steercap.captures.handle import holding
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.recordings import RecordingFolder, Recordings, RecordLimits
from steercap.captures.rows import Captures, Found
from steercap.captures.site_codecs import SiteCodecs, encoded
from steercap.core.attention import AttentionRule
from steercap.core.receipt import Receipt
from steercap.core.schema import Coding
from steercap.core.spec import Point
from steercap.errors import (
    CaptureIncomplete,
    InvalidFile,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    SteercapError,
    UnknownName,
)
from steercap.kernels.attention import RecordedAttention
from steercap.server.record_settings import RecordSettings

WIDTH, NEURONS = 96, 320
HEADS = {"q": 4, "k": 2}


def a_request(tokens: int, seed: int = 0, *, first: int = 0) -> CaptureHandle:
    """A fetched handle with rows of the stream, of neurons and of heads at two layers, from position `first` on."""
    draw = torch.Generator().manual_seed(seed)
    prompt, output = tuple(range(5, 5 + tokens - 3)), (1, 2, 3, 4)
    shapes = {"resid_post": (WIDTH,), "neurons": (NEURONS,), "z": (4, 8)}
    points = [Point(layer, site) for layer in (0, 1) for site in shapes]
    rows = {one: torch.randn(tokens - first, *shapes[one.site], generator=draw).bfloat16() for one in points}
    positions = np.arange(first, tokens)
    receipt = Receipt(tuple(points), positions, np.array((*prompt, *output))[positions], tokens * 6, None)
    return CaptureHandle(
        request_id="r",
        model="m",
        text="said",
        prompt_token_ids=prompt,
        output_token_ids=output,
        points=points,
        num_layers=4,
        lifecycle=Lifecycle("r", found=Found(Captures(rows, 4), receipt)),
    )


def an_attending_request(tokens: int, seed: int, *, first: int = 0) -> CaptureHandle:
    """`a_request` with queries of 4 heads and keys of 2 instead of heads, the layers' rules known."""
    draw, handle = torch.Generator().manual_seed(seed), a_request(tokens, seed, first=first)
    rows = {point: kept for point, kept in handle.captures.items() if point.site != "z"}
    for layer in (0, 1):
        rows |= {
            Point(layer, site): torch.randn(tokens - first, heads, 8, generator=draw) for site, heads in HEADS.items()
        }
    found = Found(Captures(rows, 4), replace(handle.receipt, points=tuple(rows)))
    return CaptureHandle(
        request_id="r",
        model="m",
        text="said",
        prompt_token_ids=handle.prompt_token_ids,
        output_token_ids=handle.output_token_ids,
        points=tuple(rows),
        num_layers=4,
        lifecycle=Lifecycle("r", found=found),
        attention_rules={layer: AttentionRule(8**-0.5, window=5 if layer else None) for layer in (0, 1)},
    )


def signs(k: int, width: int, seed: int) -> np.ndarray:
    """The published matrix: the bits of Philox, row by row, each row padded to whole words."""
    words = -(-width // 64)
    raw = np.random.Philox(key=seed).random_raw(k * words).astype("<u8")
    bits = np.unpackbits(raw.view(np.uint8).reshape(k, -1), axis=1, bitorder="little")
    return 2.0 * bits[:, :width] - 1.0


@pytest.mark.parametrize("seed", range(4))
def test_each_site_is_kept_in_its_codec(tmp_path, seed) -> None:
    """The stream projected, neurons by their largest elements, heads as they are: through a folder and back."""
    draw = random.Random(seed)
    k, kept, tokens = draw.choice([100, 128, 512]), draw.randrange(1, 80), draw.randrange(4, 40)
    codecs = SiteCodecs.parse([f"resid_post=rp8,k={k},seed={seed}", f"neurons=topk8,k={kept}", "z"])
    handle = a_request(tokens, seed)
    folder = RecordingFolder(tmp_path, model="m", limits=RecordLimits())
    folder.add(codecs.parted(handle), "a")
    folder.close()
    (request,) = Recordings.load(tmp_path).requests
    stream, neurons, heads = request.handles()
    assert [{one.site for one in part.points} for part in (stream, neurons, heads)] == [
        {"resid_post"},
        {"neurons"},
        {"z"},
    ]
    for layer in (0, 1):
        rows = handle.captures[layer, "resid_post"].double().numpy()
        projected = rows @ signs(k, WIDTH, seed).T / np.sqrt(k)
        found = stream.coded[layer, "resid_post"]
        assert (found.codec, found.decoded().shape) == ("rp8", (tokens, k))
        groups = [projected[:, one : one + 128] for one in range(0, k, 128)]
        for number, group in enumerate(groups):  # half a step of the group's greatest number, and float32's rounding
            error = np.abs(found.decoded()[:, 128 * number :][:, : group.shape[1]].numpy() - group).max(1)
            assert (error <= np.abs(group).max(1) / 127 / 2 * 1.001 + 1e-5).all()
        rows = handle.captures[layer, "neurons"].float().numpy()
        decoded = neurons.captures[layer, "neurons"].numpy()
        strong = np.argsort(-np.abs(rows), axis=1, kind="stable")[:, :kept]
        assert ((decoded != 0).sum(1) <= kept).all()
        chosen = np.take_along_axis(rows, strong, 1)
        step = (chosen.max(1) - chosen.min(1)) / 255
        assert (np.abs(np.take_along_axis(decoded, strong, 1) - chosen).max(1) <= step / 2 * 1.001 + 1e-5).all()
        assert torch.equal(heads.captures[layer, "z"], handle.captures[layer, "z"])
    assert heads.text == "said"


@pytest.mark.parametrize("seed", range(4))
def test_attention_is_kept_as_its_strongest_targets(tmp_path, seed) -> None:
    """Beside rp8 and topk8, in one request: targets, weights and entropies as softmax has them, 3 bytes a target and no
    queries or keys; through a folder and back.
    """
    tokens, top = random.Random(seed).randrange(4, 30), random.Random(seed).choice([1, 3, 8])
    codecs = SiteCodecs.parse(["resid_post=rp8,k=128", f"attention={top}", "neurons=topk8,k=16"])
    handle = an_attending_request(tokens, seed)
    assert codecs.sites == ("resid_post", "neurons", "q", "k")
    folder = RecordingFolder(tmp_path, model="m", limits=RecordLimits())
    folder.add(codecs.parted(handle), "a")
    folder.close()
    (request,) = Recordings.load(tmp_path).requests
    stream, neurons = request.handles()
    assert {point.site for part in (stream, neurons) for point in part.points} == {"resid_post", "neurons"}
    assert (list(stream.recorded_attention), neurons.recorded_attention) == ([0, 1], {})
    for layer, found in stream.recorded_attention.items():
        queries, keys = (handle.captures[layer, site].double().numpy() for site in HEADS)
        logits = np.einsum("qhd,khd->hqk", queries, keys.repeat(2, axis=1)) * 8**-0.5
        behind = np.arange(tokens)[:, None] - np.arange(tokens)
        logits[:, (behind < 0) | (behind >= (5 if layer else tokens))] = -np.inf
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        for query in range(tokens):
            seen = min(query + 1, 5 if layer else tokens, top)
            best = np.argsort(-weights[:, query], axis=1)[:, :top]
            assert found.targets[:, query, :seen].tolist() == best[:, :seen].tolist()
            assert (found.targets[:, query, seen:] == -1).all()
            kept = np.take_along_axis(weights[:, query], best[:, :seen], 1)
            assert np.abs(found.weights[:, query, :seen].numpy() - kept).max() <= 1 / 510 + 1e-6
        entropy = -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)
        np.testing.assert_allclose(found.entropy.numpy(), entropy, rtol=2**-10, atol=1e-6)
        sizes = {name: part.numel() * part.element_size() for name, part in found.parts.items()}
        assert sizes == {"indices": 2 * tokens * 4 * top, "shares": tokens * 4 * top, "entropies": 2 * tokens * 4}


def test_indices_are_wider_where_a_sequence_is_longer() -> None:
    for last, dtype in ((65_534, torch.uint16), (65_535, torch.uint32)):
        targets = torch.tensor([[[last, 3], [last, -1]]])
        zeros = torch.zeros(1, 2)
        summary = AttentionSummary(torch.tensor([last, last]), targets, torch.zeros(1, 2, 2), zeros, zeros, zeros)
        found = RecordedAttention.of(summary)
        assert found.indices.dtype == dtype
        assert torch.equal(found.targets, targets)


def test_one_codec_is_left_to_the_workers() -> None:
    codecs = SiteCodecs.parse(["resid_post=rp8,k=64,seed=3", "attn_out=rp8,k=64,seed=3"])
    spec = codecs.spec(layers=[1], tokens="generated")
    assert (spec.sites, spec.codec, spec.codec_k, spec.codec_seed, spec.layers) == (
        ("resid_post", "attn_out"),
        "rp8",
        64,
        3,
        (1,),
    )
    mixed = SiteCodecs.parse(["resid_post=rp8", "neurons=topk8"])
    assert (mixed.spec().codec, mixed.codings["neurons"], mixed.codings["resid_post"].k) == (
        "raw",
        Coding("topk8", 64),
        512,
    )


def test_a_prompt_that_is_left_out_is_nowhere_in_the_folder(tmp_path) -> None:
    """Neither the ids of its tokens nor their hash: the same file is written for another prompt of its length."""
    written = []
    for number in range(2):
        handle = a_request(12, first=9)
        handle.prompt_token_ids = tuple(one + number for one in handle.prompt_token_ids)
        codecs = SiteCodecs.parse(["resid_post", "neurons=full8", "z"])
        folder = RecordingFolder(tmp_path / str(number), model="m", limits=RecordLimits(), clock=lambda: 7.0)
        folder.add(codecs.parted(handle, prompts=False), "a")
        folder.close()
        (request,) = Recordings.load(tmp_path / str(number)).requests
        assert {one.prompt_token_ids for one in request.handles()} == {(-1,) * 9}
        assert [one.positions.tolist() for one in request.handles()] == [[9, 10, 11]] * 2
        written.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).rglob("*.*")})
    assert written[0] == written[1]


def test_the_mix_of_two_is_as_small_as_said() -> None:
    """rp8 with k=512 and topk8 with k=64 take 732 bytes a token and layer, labels and headers of files aside."""
    codecs = SiteCodecs.parse(["resid_post=rp8,k=512", "neurons=topk8,k=64", "z=topk8,k=1"])
    parts = codecs.parted(a_request(200))[:2]
    sizes = [sum(rows.nbytes for rows in one.coded.values()) for one in parts]
    assert sizes == [2 * 200 * (512 + 4 * 4), 2 * 200 * (3 * 64 + 12)]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "no site is given; give one, such as 'resid_post=rp8,k=512'"),
        (["resid_post=rp8,j=3"], "'resid_post=rp8,j=3': 'j=3' is not a parameter of a codec; .*'k'.*'seed'"),
        (["resid_post=rp8,k=x"], "'k=x' is not a parameter of a codec"),
        (["resid_post=rp9"], "unknown codec 'rp9'; .*'rp8'"),
        (["resid_post=topk8,seed=1"], "seed=1 with codec='topk8', which has no such parameter"),
        (["resid_post=rp8,k=0"], "k=0; give an integer from 1"),
        (["resid_post", "attention=0"], "'attention=0': give a number of targets from 1 to 128, such as attention=8"),
        (["attention=129"], "'attention=129': give a number of targets from 1 to 128"),
        (["resid_post", "resid_post=rp8"], "the codec of 'resid_post' is given already"),
        (["z", "attention=8", "attention=2"], "the codec of 'attention' is given already"),
        (["z=rp8,k=64,k=32"], "'z=rp8,k=64,k=32' gives k twice"),
    ],
)
def test_codecs_that_do_not_fit_are_told(texts, says) -> None:
    with pytest.raises(SteercapError, match=says):
        SiteCodecs.parse(texts)


def test_settings_that_do_not_fit_are_told(tmp_path) -> None:
    with pytest.raises(InvalidSetting, match="fraction=0; give a number above 0"):
        RecordSettings(tmp_path, fraction=0)
    with pytest.raises(InvalidSetting, match="prompts=False records no row of a prompt; give tokens='generated'"):
        RecordSettings(tmp_path, prompts=False)
    with pytest.raises(InvalidSelection, match="unknown tokens='never'"):
        RecordSettings(tmp_path, tokens="never")
    attention = SiteCodecs.parse(["resid_post", "attention=8"])
    assert RecordSettings(tmp_path, attention, tokens=slice(0, 9)).capture.sites == ("resid_post", "q", "k")
    for tokens in ("generated", slice(1, 9), [0, 1], slice(0, 9, 2)):
        with pytest.raises(InvalidSpec, match="give 'all' as tokens, or a slice from 0"):
            RecordSettings(tmp_path, attention, tokens=tokens)  # type: ignore[arg-type]


def test_attention_alone_is_left_to_the_workers(tmp_path) -> None:
    """The capture is of summaries; its one handle is written as it came. Beside a site queries and keys are captured."""
    alone = SiteCodecs.parse(["attention=8"])
    assert (alone.sites, alone.texts) == (("q", "k"), ("attention=8",))
    assert RecordSettings(tmp_path, alone, layers=[1]).capture == CaptureSpec(layers=[1], attention=8)
    assert SiteCodecs.load(alone.save(tmp_path / "codecs.json")) == alone
    assert SiteCodecs.parse(["attention=8", "z"]).spec().attention is None
    handle = an_attending_request(9, 1)
    assert alone.parted(handle) == [handle]
    with pytest.raises(UnknownName, match="no codec is chosen for 'z'"):
        alone.coding_of(["z"])
    with pytest.raises(InvalidSpec, match="give 'all' as tokens, or a slice from 0"):
        RecordSettings(tmp_path, alone, tokens="generated")


@pytest.mark.parametrize(
    ("line", "variables", "expected"),
    [
        ("--record-gib 3", {}, (2, "the other --record-... options need it")),
        ("", {"STEERCAP_RECORD_GIB": "3"}, (2, "the other --record-... options need it")),
        ("--record r --record-site resid_post=rp9", {}, (2, "--record-site: unknown codec 'rp9'")),
        (
            "",
            {"STEERCAP_RECORD": "r", "STEERCAP_RECORD_SITE": "z resid_post=rp9"},
            (2, "--record-site: unknown codec 'rp9'"),
        ),
        ("--record r --record-site nowhere", {}, (2, "--record-site: unknown site 'nowhere'")),
        ("--record r --record-full never", {}, (2, "--record-full: 'never'; known: 'drop', 'rotate'")),
        ("--record r --record-fraction 2", {}, (2, "less than or equal to 1")),
        ("--record r --record-fraction 0", {}, (2, "--record-fraction: 0.0; give a number above 0, up to 1")),
        ("--record r --record-fraction nan", {}, (2, "less than or equal to 1")),
        ("--record r --record-gib 0", {}, (2, "--record-gib: 0.0; give a number of at least 1e-9")),
        ("--record r --record-gib inf", {}, (2, "--record-gib: inf; give a number of at least 1e-9")),
        ("--record r --record-hours 0", {}, (2, "--record-hours: 0.0; give a number above 0")),
        ("--record r --record-layers x", {}, (2, "--record-layers: 'x': give all, an index")),
        ("--record r --record-tokens x", {}, (2, "--record-tokens: 'x': give all")),
        (
            "--record r --record-site z --record-site attention=8 --record-tokens 1:9",
            {},
            (
                2,
                "--record-tokens: attention reads the keys of all tokens before; give 'all' as tokens, or a slice from",
            ),
        ),
        (
            "--record r --no-record-prompts",
            {},
            (2, "--no-record-prompts: rows of prompts are recorded; give --record-"),
        ),
        ("", {"STEERCAP_RECORD": "r", "STEERCAP_RECORD_PROMPTS": "0"}, (2, "give --record-tokens generated")),
        ("--record=", {}, (2, "--record: ''; give the path of a folder")),
        ("--record r --no-record", {}, (2, "--no-record: give --record or --no-record, not both")),
        ("--record r", {"STEERCAP_RECORD_CODEC": "rp8"}, (1, "STEERCAP_RECORD_CODEC is set in the environment")),
    ],
)
def test_options_of_the_command_are_checked_before_an_engine_starts(
    tmp_path, monkeypatch, line, variables, expected
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = call("serve", "/no/such/model", "--port", "0", *line.split())
    assert result.exit_code == expected[0], result.output
    assert expected[1] in re.sub(r"[\s│]+", " ", result.output)


def test_settings_come_back_from_their_file(tmp_path) -> None:
    """With seeds, raw sites and attention; and stand for themselves among other sites."""
    codecs = SiteCodecs.parse(["resid_post=rp8,k=64,seed=3", "z", "neurons=topk8", "attention=8"])
    path = codecs.save(tmp_path / "codecs.json", model="m")
    assert SiteCodecs.load(path) == codecs
    assert json.loads(path.read_text())["sites"] == [
        "resid_post=rp8,k=64,seed=3",
        "z=raw",
        "neurons=topk8,k=64",
        "attention=8",
    ]
    assert SiteCodecs.parse([f"@{path}", "attn_out=int4"]).sites == ("resid_post", "z", "neurons", "attn_out", "q", "k")
    with pytest.raises(InvalidSpec, match="the codec of 'z' is given already"):
        SiteCodecs.parse([f"@{path}", "z=full8"])
    assert codecs.coding_of(["neurons"]) == Coding("topk8", 64)
    with pytest.raises(InvalidSpec, match=r"these sites have different codecs, z: raw; neurons: topk8\(k=64\)"):
        codecs.coding_of(["z", "neurons"])
    with pytest.raises(SteercapError, match="no codec is chosen for 'neuron'; did you mean 'neurons'"):
        codecs.coding_of(["neuron"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "missing required field `sites`"),
        ("[1", "cannot be read as settings of codecs, a JSON object"),
        ('{"sites": ["z"], "kind": "other"}', "is of kind 'other', version 1; this reads 'site codecs', version 1"),
        ('{"sites": ["z"], "version": 2}', "is of kind 'site codecs', version 2"),
        ('{"sites": ["z"], "more": 2}', "unknown field `more`"),
        ('{"sites": ["z=rp9"]}', "holds settings that do not fit: unknown codec 'rp9'"),
        ('{"sites": []}', "no site is given"),
        ('{"sites": ["@codecs.json"]}', "names another file, '@codecs.json'"),
        ("", "it is empty"),
    ],
)
def test_a_file_of_other_settings_is_refused(text, says, tmp_path) -> None:
    path = tmp_path / "codecs.json"
    path.write_text(text)
    for read in (SiteCodecs.load, lambda path: SiteCodecs.parse([f"@{path}"])):
        with pytest.raises(InvalidFile, match=r"codecs\.json") as told:
            read(path)
        assert says in str(told.value)
    with pytest.raises(InvalidFile, match=r"did you mean '.*/codecs\.json'"):
        SiteCodecs.load(tmp_path / "codec.json")


def test_rows_that_indices_cannot_name_are_refused() -> None:
    """Indices are of 16 bits, and would begin again at 0."""
    with pytest.raises(
        InvalidSpec, match=r"topk8\(k=4\) takes rows of at most 65,536 elements, and these are 65537 of"
    ):
        encoded(torch.ones(1, 65_537), Coding("topk8", 4))
    assert encoded(torch.ones(1, 65_536), Coding("topk8", 4)).decoded().sum() == 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--record-layers 4", "--record-layers: layer 4"),
        ("--record-layers 9:", "--record-layers: .*9"),
        ("--record-site resid_post=rp8,k=129", "--record-site: codec='rp8' with k=129 keeps more numbers than the 128"),
        ("--record-site resid_pots", "--record-site: .*'resid_pots'.*'resid_post'"),
    ],
)
def test_what_the_model_lacks_is_told_before_it_is_loaded(tmp_path, monkeypatch, line, expected) -> None:
    """A checkpoint without weights, of which nothing but its config.json can be read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 128, "model_type": "llama"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    called = ["serve", tmp_path / "model", "--port", "0"]
    result = call(*called, "--record", "r", *line.split())
    assert result.exit_code == 2
    assert re.search(expected, re.sub(r"[\s│]+", " ", result.output)), result.output
    assert not (tmp_path / "r").exists()
    for site in ("resid_post[4]", "model.layers[4].mlp.output"):
        result = call(*called, "--sites", site)
        assert (result.exit_code, "LayerOutOfRange" in result.output) == (1, True), result.output


def test_a_flag_switches_the_environment_off(monkeypatch, tmp_path) -> None:
    """The folder is no longer looked at: one that cannot be written is refused without the flag alone."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEERCAP_RECORD", str(tmp_path / "file"))
    monkeypatch.setenv("STEERCAP_RECORD_SITE", "resid_post=rp8")
    assert "give a folder" in call("serve", "/no/such/model", "--port", "0").output
    result = call("serve", "/no/such/model", "--port", "0", "--no-record")
    assert (result.exit_code, "/no/such/model" in result.output, "give a folder" in result.output) == (1, True, False)


def in_chunks(handle: CaptureHandle, rows: int):
    """Handles of the request's rows, at most `rows` at a time."""
    receipt = handle.receipt
    for start in range(0, len(receipt.positions), rows):
        part = slice(start, start + rows)
        captures = Captures({point: kept[part] for point, kept in handle.captures.items()}, 4)
        labels = replace(receipt, positions=receipt.positions[part], token_ids=receipt.token_ids[part])
        yield holding(handle, Found(captures, labels))


@pytest.mark.parametrize("rows", [1, 7, 128])
@pytest.mark.parametrize(
    "texts",
    [
        ["resid_post=rp8,k=16", "neurons=topk8,k=8", "attention=3"],
        ["resid_post=full8", "neurons=int4"],
        ["resid_post", "neurons=fp8"],
        ["resid_post", "neurons"],
    ],
)
def test_files_of_chunks_are_those_of_all_rows_at_once(tmp_path, texts, rows) -> None:
    """Byte for byte, labels and attention too; nothing else is left in the folder."""
    codecs, handle = SiteCodecs.parse(texts), an_attending_request(23, 5)
    kept = [one for one in handle.points if one.site in codecs.sites]
    handle = holding(
        handle,
        Found(Captures({one: handle.captures[one] for one in kept}, 4), replace(handle.receipt, points=tuple(kept))),
    )
    sums = []
    for name in ("whole", "chunks"):
        folder = RecordingFolder(tmp_path / name, model="m", limits=RecordLimits(), clock=lambda: 5.0)
        whole = name == "whole"
        found = codecs.parted(handle) if whole else codecs.parted_chunks(in_chunks(handle, rows), 23, folder.path)
        folder.add(found, "a")
        folder.close()
        (request,) = Recordings.load(folder.path).requests
        sums.append([(one.sha256, one.rows, one.positions) for one in request.files])
        assert len([path for path in folder.path.rglob("*") if path.is_file()]) == len(request.files) + 1
    assert sums[0] == sums[1]


@pytest.mark.parametrize("announced", [22, 24])
def test_chunks_that_lack_rows_make_no_file(tmp_path, announced) -> None:
    codecs, handle = SiteCodecs.parse(["resid_post=full8", "neurons"]), a_request(23)
    with pytest.raises(CaptureIncomplete, match=f"rows came for a request that has {announced}"):
        codecs.parted_chunks(in_chunks(handle, 7), announced, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_for_chunks_is_an_error(tmp_path, monkeypatch) -> None:
    """The space is allocated before it is mapped: no signal ends the process later."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SiteCodecs.parse(["neurons"]).parted_chunks(in_chunks(a_request(23), 7), 23, tmp_path)


def test_a_kill_between_chunks_leaves_nothing(tmp_path) -> None:
    """Files that gather rows have no name: what a killed process had written is gone with it."""
    codecs, handle = SiteCodecs.parse(["resid_post=full8", "neurons"]), a_request(23)
    if not (child := os.fork()):
        chunks = in_chunks(handle, 7)
        codecs.parted_chunks(
            chain([next(chunks)], (os.kill(os.getpid(), signal.SIGKILL) for _ in chunks)), 23, tmp_path
        )
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not list(tmp_path.iterdir())
