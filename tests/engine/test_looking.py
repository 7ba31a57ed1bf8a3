"""Rows that wait on a server, looked at: the numbers are those of local rows, directions and lenses."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
import torch
from support.rows import GREEDY, random_prompt
from support.sae_features import check_features

from steercap import SAE, CaptureHandle, CaptureSpec, SteerModel
from steercap.adapters import server
from steercap.core.prompts import texts_of
from steercap.core.spec import REDUCTIONS
from steercap.errors import InvalidFile, InvalidRequest, InvalidSpec
from steercap.lab.directions import extract
from steercap.saes.encoder import Features
from steercap.server import inspect_routes as looking
from steercap.server.server import ServerSettings, application
from steercap.server.statistics_routes import loaded, require_fitting
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.testing.saes import RandomSAE

FLAGS = ["--served-model-name", "tiny", "--api-key", "mine", "yours"]
SOME = LayerVectors({layer: torch.randn(128, generator=torch.Generator().manual_seed(layer)) for layer in (0, 2)})
OWN = RandomSAE("standard", 128, 512)
OTHER = LayerVectors({layer: torch.randn(128, generator=torch.Generator().manual_seed(9 + layer)) for layer in (2, 3)})
PAIR = DirectionSet({"warm": SOME, "cold": LayerVectors({0: OTHER[2], 2: OTHER[3]})})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    """Two SAEs, of different layers."""
    folder, elsewhere = (
        tmp_path_factory.mktemp("saes"),
        (("metadata", {"sae_lens_version": "6.54.12", "hook_name": "blocks.3.hook_resid_post"}),),
    )
    second = RandomSAE("topk", 128, 256, k=20, seed=4, configuration=elsewhere)
    return {"own": OWN.write(folder / "own"), "second": second.write(folder / "second")}


@pytest.fixture(scope="module")
async def app(tiny: SteerModel, tmp_path_factory, folders) -> Any:
    folder = tmp_path_factory.mktemp("looking")
    vectors = {"some": SOME.save(folder / "some.safetensors"), "other": OTHER.save(folder / "other.safetensors")}
    vectors["thin"] = LayerVectors({1: torch.ones(7)}).save(folder / "thin.safetensors")
    vectors["elsewhere"] = LayerVectors({1: torch.ones(128)}, site="attn_out").save(folder / "elsewhere.safetensors")
    vectors["pair"] = PAIR.save(folder / "pair.safetensors")
    vectors["single"] = DirectionSet({"one": OTHER}).save(folder / "single.safetensors")
    settings = ServerSettings(vectors=vectors, saes=folders)
    return await application(tiny, server.read_flags(tiny.serving.model, FLAGS), settings)


def client(app: Any, key: str = "mine") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


async def waiting(app: Any, prompt: list[int], **capture: Any) -> str:
    """The address of a capture."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "steercap": {"capture": capture or True}}
    found = (await client(app).post("/v1/completions", json=body | GREEDY)).json()
    address: str = found["steercap"]["results"][0]["capture"]["url"]
    return address


#: Captures as local specs and as they are asked for over HTTP, where vectors and SAEs stand by name.
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (asked, asked)
        for how in REDUCTIONS
        for asked in ({"reduce": how}, {"reduce": how, "tokens": "prompt", "layers": [1, 3]})
    ),
    ({"project": PAIR}, {"project": "pair"}),
    ({"project": PAIR["warm"]}, {"project": "pair/warm"}),
    ({"project": SOME, "tokens": "generated"}, {"project": "some", "tokens": "generated"}),
    ({"project": DirectionSet({"one": OTHER})}, {"project": "single"}),
    ({"project": DirectionSet({"one": OTHER})["one"]}, {"project": "single/one"}),
    ({"sae": "own", "sae_k": 7}, {"sae": "own", "sae_k": 7}),
    ({"sae": ["second", "own"], "tokens": "generated"}, {"sae": ["second", "own"], "tokens": "generated"}),
    ({}, {}),
    ({"codec": "full8", "layers": [2]}, {"codec": "full8", "layers": [2]}),
]


@pytest.mark.parametrize("number", range(len(ALIKE)))
async def test_over_http_a_capture_is_the_local_one(app, folders, tiny: SteerModel, number, tmp_path) -> None:
    """Of every reduction, projections and SAEs by name: points, dtypes and numbers of the file that is fetched; then
    the lens, which both answer alike or both refuse.
    """
    spec, asked = ALIKE[number]
    if names := spec.get("sae"):
        read = {name: SAE.load(folders[name]) for name in folders}
        spec = {**spec, "sae": read[names] if isinstance(names, str) else [read[name] for name in names]}
    prompt, http = random_prompt(17 + number, number), client(app)
    _, here = await tiny.generate(prompt, {"max_tokens": 4, **GREEDY}, capture=CaptureSpec(**spec))
    stream = number % 2 == 1
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": stream, "steercap": {"capture": asked}}
    said = await http.post("/v1/completions", json=body | GREEDY)
    assert said.status_code == 200, said.text
    events = said.text.split("data: ")[-2] if stream else said.text
    address = msgspec.json.decode(events)["steercap"]["results"][0]["capture"]["url"]
    file = tmp_path / "rows.safetensors"
    file.write_bytes((await http.get(address)).content)
    there = CaptureHandle.load(file)
    await here.fetch()
    assert there.points == here.points
    assert (there.directions, there.receipt.reduce) == (here.directions, here.receipt.reduce)
    assert torch.equal(there.positions, here.positions)
    for point, rows in here.captures.items():
        assert there.captures[point].dtype == rows.dtype
        torch.testing.assert_close(there.captures[point], rows, rtol=1e-4, atol=1e-4)
        if names:
            torch.testing.assert_close(there.features[point].ids, here.features[point].ids)
    looked = await http.post(f"{address}/lens", json={"layers": [2], "top": 3})
    try:
        known = await here.lens(2, top=3)
    except InvalidRequest:
        assert looked.status_code == 400, looked.text
        return
    found = looked.json()
    assert found["positions"] == known.positions.tolist()
    for row, (ids, chances) in enumerate(zip(known.token_ids.tolist(), known.log_probs.exp().tolist(), strict=True)):
        assert [text for text, _ in found["top"][0][row]] == texts_of(tiny.tokenizer, ids)
        assert [chance for _, chance in found["top"][0][row]] == pytest.approx(chances, abs=1e-4)


async def test_scores_are_those_of_local_rows(app, tiny: SteerModel) -> None:
    prompt = random_prompt(20, 1)
    address = await waiting(app, prompt)
    found = (await client(app).post(f"{address}/scores", json={"directions": ["some", "other"]})).json()
    _, handle = await tiny.generate(prompt, {"max_tokens": 4, **GREEDY}, capture=CaptureSpec())
    async with handle:
        assert [one["id"] for one in found["tokens"]] == handle.token_ids.tolist()
        assert [one["position"] for one in found["tokens"]] == list(range(23))
        assert [one["generated"] for one in found["tokens"]] == [False] * 20 + [True] * 3
        assert found["rest"] == [tiny.tokenizer.decode([handle.output_token_ids[-1]])]
        assert found["layers"] == [0, 1, 2, 3]
        for layer in range(4):
            rows = handle.captures[layer]
            assert found["norms"][layer] == pytest.approx(rows.norm(dim=1).tolist(), rel=1e-4)
        for name, vectors in (("some", SOME), ("other", OTHER)):
            one = found["directions"][name]
            assert one["layers"] == list(vectors)
            for at, layer in enumerate(vectors):
                rows, vector = handle.captures[layer], vectors[layer]
                along = torch.cosine_similarity(rows, vector[None], dim=1)
                assert one["cosine"][at] == pytest.approx(along.tolist(), abs=1e-4)
                assert one["projection"][at] == pytest.approx((rows @ vector / vector.norm()).tolist(), abs=1e-3)
                assert one["norms"][at] == pytest.approx(float(vector.norm()), rel=1e-5)
    assert found["alike"]["of"] == ["some", "other"]
    assert found["alike"]["layers"] == [2]
    assert found["alike"]["cosine"] == pytest.approx(
        [float(torch.cosine_similarity(SOME[2], OTHER[2], dim=0))], abs=1e-5
    )


async def test_the_lens_is_that_of_a_handle(app, tiny: SteerModel) -> None:
    prompt = random_prompt(15, 2)
    address = await waiting(app, prompt)
    asked = {"layers": [3, 1], "positions": [14, 2, 16], "top": 4}
    found = (await client(app).post(f"{address}/lens", json=asked)).json()
    assert (found["layers"], found["positions"]) == ([3, 1], [14, 2, 16])
    _, handle = await tiny.generate(prompt, {"max_tokens": 4, **GREEDY}, capture=CaptureSpec())
    async with handle:
        for at, layer in enumerate([3, 1]):
            known = await handle.lens(layer, site="resid_post", top=4)
            for row, position in enumerate([14, 2, 16]):
                texts = [tiny.tokenizer.decode([token]) for token in known.token_ids[position].tolist()]
                assert [text for text, _ in found["top"][at][row]] == texts
                chances = [chance for _, chance in found["top"][at][row]]
                assert chances == pytest.approx(known.log_probs[position].exp().tolist(), abs=2e-5)
    every = (await client(app).post(f"{address}/lens", json={})).json()
    assert [len(layer) for layer in every["top"]] == [18] * 4


async def test_features_are_those_of_local_rows(app, tiny: SteerModel) -> None:
    """By an SAE that the operator loaded, against its forward in NumPy; of some rows, and of all."""
    listed = (await client(app).get("/v1/steercap/saes")).json()["data"]
    assert [(one["name"], one["layer"], one["site"], one["features"]) for one in listed] == [
        ("own", 1, "resid_post", 512),
        ("second", 3, "resid_post", 256),
    ]
    prompt = random_prompt(15, 4)
    address = await waiting(app, prompt)
    _, handle = await tiny.generate(prompt, {"max_tokens": 4, **GREEDY}, capture=CaptureSpec(layers=[1]))
    async with handle:
        rows = handle.captures[1]
    dense, slack = OWN.encode(rows), OWN.slack(rows)
    found = (await client(app).post(f"{address}/features", json={"sae": "own", "top": 50})).json()
    assert (found["layer"], found["site"], found["positions"]) == (1, "resid_post", list(range(18)))
    pairs, active = found["features"], torch.tensor(found["active"])
    ids = torch.tensor([[feature for feature, _ in row] for row in pairs])
    values = torch.tensor([[value for _, value in row] for row in pairs])
    left = torch.from_numpy(dense).float().scatter(1, ids, 0.0).amax(1)
    near = slack + 1e-5 * dense.max()  # six digits are said
    assert check_features(Features(ids.int(), values, active.int(), left, 512), dense, near) < 1e-3 * dense.max()
    some = (await client(app).post(f"{address}/features", json={"sae": "own", "positions": [17, 3], "top": 2})).json()
    assert some["positions"] == [17, 3]
    for one, other in zip(some["features"], (pairs[17][:2], pairs[3][:2]), strict=True):
        assert [feature for feature, _ in one] == [feature for feature, _ in other]
        assert [value for _, value in one] == pytest.approx([value for _, value in other], rel=1e-4)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "sae=None; known: 'own'"),
        ({"sae": "other"}, "known: 'own'"),
        ({"sae": ["own"]}, "known: 'own'"),
        ({"sae": "own", "top": 51}, "from 1 to 50"),
        ({"sae": "own", "positions": [99]}, "positions whose rows were captured"),
        ({"sae": "own", "path": "/etc"}, "unknown field"),
    ],
)
async def test_features_that_cannot_be_had_are_refused(app, body, says) -> None:
    found = await client(app).post(f"{await waiting(app, [3, 4, 5])}/features", json=body)
    assert found.status_code == 400
    assert says in found.json()["error"]["message"]


async def test_features_are_of_what_was_captured_by_its_key(app) -> None:
    address = await waiting(app, [3, 4, 5], layers=[2])
    found = await client(app).post(f"{address}/features", json={"sae": "own"})
    assert "which was not captured" in found.json()["error"]["message"]
    assert (await client(app, "yours").post(f"{address}/features", json={"sae": "own"})).status_code == 404


def test_an_sae_of_another_model_is_refused_at_the_start(tiny: SteerModel, tmp_path) -> None:
    with pytest.raises(InvalidSpec, match="reads rows of 64, and those of"):
        require_fitting(loaded({"thin": RandomSAE("standard", 64, 100).write(tmp_path / "thin")}), tiny)
    elsewhere = (
        ("metadata", {"sae_lens_version": "6.54.12", "model_name": "m", "hook_name": "blocks.9.hook_resid_post"}),
    )
    far = RandomSAE("standard", 128, 100, configuration=elsewhere).write(tmp_path / "far")
    with pytest.raises(InvalidSpec, match="which is not armed"):
        require_fitting(loaded({"far": far}), tiny)
    with pytest.raises(InvalidSpec, match="give letters"):
        loaded({"a/b": tmp_path / "far"})
    with pytest.raises(InvalidFile):
        loaded({"none": tmp_path})


async def test_a_direction_of_texts_is_the_one_extracted_here(app, tiny: SteerModel) -> None:
    more, less = ["red blue green", "one two three"], ["cat dog bird", "up down left right"]
    mine, yours = client(app), client(app, "yours")
    made = await mine.post("/v1/steercap/vectors/texts", json={"more": more, "less": less})
    assert made.status_code == 201
    known = (await extract(tiny, more, less, name="texts", held_out=0.0))["texts"]
    assert made.json()["norms"] == pytest.approx({str(layer): norm for layer, norm in known.norms().items()}, rel=1e-4)
    address = await waiting(app, random_prompt(8, 3))
    assert (await mine.post(f"{address}/scores", json={"directions": ["texts"]})).status_code == 200
    assert (await yours.get("/v1/steercap/vectors/texts")).status_code == 404


@pytest.mark.parametrize(
    ("to", "body", "says"),
    [
        ("scores", {"directions": "some"}, "give a list of names"),
        ("scores", {"directions": ["nothing"]}, "is called 'nothing'"),
        ("scores", {"directions": ["thin"]}, "'thin' has width 7"),
        ("scores", {"directions": ["elsewhere"]}, "'elsewhere' is of attn_out"),
        ("scores", {"directions": ["some"] * 17}, "17 directions; at most 16"),
        ("scores", {"site": "attn_out"}, "'attn_out' was not captured"),
        ("scores", {"site": ["x"]}, "was not captured"),
        ("scores", {"path": "/etc"}, "unknown field 'path'"),
        ("scores", [1], "give an object"),
        ("lens", {"layers": [9]}, "layer 9 was not captured"),
        ("lens", {"layers": "some"}, "give a list of layers"),
        ("lens", {"layers": [True]}, "give a list of layers"),
        ("lens", {"positions": [99]}, "positions whose rows were captured"),
        ("lens", {"positions": {"a": 1}}, "give a list of positions"),
        ("lens", {"positions": [[1]]}, "give a list of positions"),
        ("lens", {"layers": [0] * 9000}, "at most 8192 rows"),
        ("lens", {"top": 0}, "from 1 to 50"),
        ("lens", {"top": None}, "from 1 to 50"),
    ],
)
async def test_what_cannot_be_looked_at_is_said(app, to, body, says) -> None:
    found = await client(app).post(f"{await waiting(app, [3, 4, 5])}/{to}", json=body)
    assert found.status_code == 400
    assert says in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("a..%2Fb", {"more": ["a b"], "less": ["c d"]}, ""),
        ("bad name", {"more": ["a b"], "less": ["c d"]}, "give letters"),
        ("x", {"more": "a b", "less": ["c d"]}, "more='a b'"),
        ("x", {"more": ["a b"], "less": []}, "give a list of texts"),
        ("x", {"more": ["a b"], "less": [" "]}, "none of them empty"),
        ("x", {"more": ["a b"] * 65, "less": ["c d"]}, "at most 64"),
        ("x", {"more": ["a"], "less": ["c"]}, "token"),
    ],
)
async def test_texts_that_make_no_direction_are_refused(app, name, body, says) -> None:
    found = await client(app).post(f"/v1/steercap/vectors/{name}", json=body)
    assert found.status_code in {400, 404, 405}
    assert says in found.text


async def test_an_answer_has_a_size(app, monkeypatch) -> None:
    """And what is no number in JSON is none."""
    address = await waiting(app, [3, 4, 5])
    monkeypatch.setattr(looking, "MOST_NUMBERS", 6 * 4 * 3 - 1)
    assert (await client(app).post(f"{address}/scores", json={})).status_code == 200
    found = await client(app).post(f"{address}/scores", json={"directions": ["some"]})
    assert found.status_code == 400
    assert "4 layers × 6 tokens and 1 directions make 72 numbers" in found.json()["error"]["message"]
    assert looking._short([1.23456789, float("nan"), float("-inf")]) == [1.23457, None, None]


async def test_rows_are_looked_at_by_their_key_alone(app) -> None:
    address = await waiting(app, [3, 4, 5])
    for to in ("scores", "lens"):
        assert (await client(app, "yours").post(f"{address}/{to}", json={})).status_code == 404
        assert (await client(app, "nobody's").post(f"{address}/{to}", json={})).status_code == 401
    assert (await client(app).post("/v1/steercap/captures/cap-0/lens", json={})).status_code == 404
    reduced = await waiting(app, [3, 4, 5], reduce="mean")
    found = await client(app).post(f"{reduced}/scores", json={})
    assert found.status_code == 400
    assert "not the rows" in found.json()["error"]["message"]
    long = await client(app).post(f"{address}/scores", content=b" " * ((1 << 20) + 1))
    assert long.status_code == 413
