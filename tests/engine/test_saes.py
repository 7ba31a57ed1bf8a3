"""SAEs in the worker, on whole engines: the features that come are those of the rows, for every kind of SAE."""

from __future__ import annotations

import gc

import pytest
import torch
from support.rows import GREEDY, random_prompt, settled
from support.sae_features import features_agree

from steercap import SAE, CaptureHandle, CaptureSpec, Point, SteerModel, errors
from steercap.kernels.codecs.coded import CodedRows
from steercap.lab.mechanism.views import logit_attribution
from steercap.testing.saes import OWN, RandomSAE

WIDTH, FEATURES = 128, 1500


@pytest.mark.parametrize("architecture", list(OWN))
async def test_features_are_those_of_the_rows(architecture, tiny, tmp_path, record_property) -> None:
    """Every architecture, prompts of 9 to 170 tokens in one batch, generated tokens; afterwards it is not held."""
    own = RandomSAE(architecture, WIDTH, FEATURES, k=20)
    sae = SAE.load(own.write(tmp_path))
    await settled(tiny)
    before = await tiny.stats()  # servers of other tests may have SAEs open
    record_property("greatest", await features_agree(tiny, own, sae))
    assert (await tiny.stats()).saes == before.saes + 1
    del sae
    assert await settled(tiny) == (0, 0, 0)
    after = await tiny.stats()
    assert (after.saes, after.sae_bytes_in_use) == (before.saes, before.sae_bytes_in_use)


@pytest.mark.parametrize("normalisation", ["layer_norm", "constant_norm_rescale"])
async def test_rows_are_normalised_as_the_sae_was_trained(normalisation, tiny, tmp_path) -> None:
    """Rows are centred and scaled, or scaled to one length, in the worker as in the library; at another point than its own."""
    given = {"normalize_activations": normalisation, "apply_b_dec_to_input": False}
    own = RandomSAE("standard", WIDTH, 700, configuration=tuple(given.items()))
    await features_agree(tiny, own, SAE.load(own.write(tmp_path), input=(2, "attn_out")), requests=3)


async def test_features_survive_chunks_and_preemption(cramped, tmp_path) -> None:
    """Where prompts come in chunks and there is room for a few requests, features are the same."""
    own = RandomSAE("jumprelu", WIDTH, FEATURES)
    await features_agree(cramped, own, SAE.load(own.write(tmp_path)), requests=10)


async def test_features_come_exactly_as_the_library_reads_the_rows(tiny, tmp_path) -> None:
    """One request, alone: ids are equal, and values but for the rounding of another shape of matrix; streamed and saved, too."""
    sae = SAE.load(RandomSAE("jumprelu", WIDTH, FEATURES).write(tmp_path))
    other = SAE.load(RandomSAE("standard", WIDTH, 300, seed=5).write(tmp_path / "other"), input=(3, "mlp_out"))
    prompt, params, both = random_prompt(40, 3), {"max_tokens": 6, **GREEDY}, CaptureSpec(sae=[sae, other], sae_k=300)
    _, read = await tiny.generate(prompt, params, capture=both)
    _, whole = await tiny.generate(prompt, params, capture=CaptureSpec(layers=[1, 3], sites=["resid_post", "mlp_out"]))
    await tiny.fetch_captures_batch([read, whole])
    assert set(read.features) == {sae.input, other.input}
    for one in (sae, other):
        known = one.strongest(whole.captures[one.input], 300)
        found = read.features[one.input]
        assert found.width == one.d_sae
        assert torch.equal(found.active, known.active)
        torch.testing.assert_close(found.dense(), known.dense(), rtol=1e-5, atol=1e-5)
        dense = one.encode(whole.captures[one.input])
        assert torch.equal(found.complete, (dense > 0).sum(dim=1) <= 300)
        whole_rows = found.complete
        torch.testing.assert_close(found.dense()[whole_rows], dense[whole_rows], rtol=1e-5, atol=1e-5)
        number = int(found.ids[7, 0])
        assert torch.equal(found.of_feature(number), found.dense()[:, number])
    chunks = [chunk async for chunk in tiny.stream(prompt, params, capture=both)]
    streamed = torch.cat([chunk.captures[sae.input] for chunk in chunks])
    torch.testing.assert_close(streamed, read.captures[sae.input], rtol=1e-5, atol=1e-5)
    back = CaptureHandle.load(read.save(tmp_path / "features.safetensors"))
    assert torch.equal(back.features[sae.input].ids, read.features[sae.input].ids)
    assert isinstance(back.coded[sae.input], CodedRows)
    read.save_npz(tmp_path / "features.npz")
    with pytest.raises(errors.InvalidSpec, match="features of an SAE, not rows"):
        read.captures.elements(sae.input)


async def test_a_steered_feature_is_what_was_asked(tiny, tmp_path) -> None:
    """`set_feature` makes an activation what it says, on rows where it was active and where it was not, for each response."""
    for architecture in ("standard", "jumprelu", "gated"):
        own = RandomSAE(
            architecture, WIDTH, FEATURES, configuration=(("apply_b_dec_to_input", architecture != "gated"),)
        )
        sae = SAE.load(own.write(tmp_path / architecture))
        prompt, params = random_prompt(60, 1), {"max_tokens": 5, **GREEDY}
        asked = CaptureSpec(layers=1, before_edits=True), CaptureSpec(layers=1)
        activations = []
        counts = own.encode((await rows_of(tiny, prompt)).float())
        feature = int(abs((counts > 0).mean(axis=0) - 0.5).argmin())
        edit = sae.set_feature(feature, 3.0)
        for spec in asked:
            _, handle = await tiny.generate(prompt, params, capture=spec, steering=edit)
            async with handle:
                activations.append(handle.captures[1].clone())
        before, after = activations
        had = sae.encode(before)[:, feature]
        assert bool((had > 0).any())
        assert bool((had == 0).any())
        wanted = before + (3.0 - had)[:, None] * sae.decoder[feature]
        torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-4)


async def rows_of(model: SteerModel, prompt: list[int]) -> torch.Tensor:
    _, handle = await model.generate(prompt, {"max_tokens": 1, **GREEDY}, capture=CaptureSpec(layers=1))
    async with handle:
        return handle.captures[1].clone()


async def test_a_transcoders_feature_is_written_at_its_output(tiny, tmp_path) -> None:
    """It reads at one point and adds its decoder's row at another; what cannot be followed there is refused."""
    sae = SAE.load(RandomSAE("transcoder", WIDTH, 400).write(tmp_path))
    assert (sae.input, sae.output) == (Point(1, "resid_pre"), Point(1, "mlp_out"))
    edit = sae.add_feature(7, 2.5)
    prompt, params, found = random_prompt(20, 2), {"max_tokens": 4, **GREEDY}, []
    for before in (True, False):
        spec = CaptureSpec(layers=1, sites="mlp_out", before_edits=before)
        _, handle = await tiny.generate(prompt, params, capture=spec, steering=edit)
        async with handle:
            found.append(handle.captures[1].clone())
    torch.testing.assert_close(found[1] - found[0], (2.5 * sae.decoder[7]).expand_as(found[0]), rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.InvalidSpec, match="a transcoder reads one point and writes another"):
        sae.set_feature(7, 1.0)


async def test_saes_make_room_for_each_other_and_are_refused_where_there_is_none(tiny, tmp_path) -> None:
    """What no request uses is displaced, the least recently used first; what is too large is an error before any token."""
    saes = [SAE.load(RandomSAE("standard", WIDTH, 200, seed=seed).write(tmp_path / f"{seed}")) for seed in range(3)]
    await settled(tiny)
    before = (await tiny.stats()).saes
    held = tiny.serving.here().saes
    most, held._most_bytes = held._most_bytes, 2 * (WIDTH + 1) * 200 * 4 + 2 * WIDTH * 4 + 1000
    prompt, params = random_prompt(5, 0), {"max_tokens": 2, **GREEDY}
    try:
        for sae in (*saes, saes[2], saes[0]):
            _, handle = await tiny.generate(prompt, params, capture=CaptureSpec(sae=sae, sae_k=5))
            handle.release()
            stats = await tiny.stats()
            assert stats.saes <= 2
            assert stats.sae_bytes_in_use <= held._most_bytes
        large = SAE.load(RandomSAE("standard", WIDTH, 900).write(tmp_path / "large"))
        with pytest.raises(errors.SAEMemoryFull, match=r"no room for an SAE of 900 features .*sae_bytes="):
            await tiny.generate(prompt, params, capture=CaptureSpec(sae=large))
    finally:
        held._most_bytes = most
    del sae, saes, large
    gc.collect()
    assert await settled(tiny) == (0, 0, 0)
    assert (await tiny.stats()).saes <= before


async def test_what_cannot_be_read_is_refused_before_it_runs(tiny, tmp_path) -> None:
    """Rows of another width, layers that there are not, too many features, points beside them, other things than SAEs."""
    sae = SAE.load(RandomSAE("standard", WIDTH, 64).write(tmp_path / "a"))
    wide = SAE.load(RandomSAE("standard", WIDTH + 1, 64).write(tmp_path / "b"))
    deep = SAE.load(tmp_path / "a", input=(9, "resid_post"))
    prompt, params = random_prompt(5, 0), {"max_tokens": 2, **GREEDY}
    for spec, error, says in (
        (CaptureSpec(sae=wide), errors.InvalidSpec, "made for another model"),
        (CaptureSpec(sae=deep), errors.LayerOutOfRange, "is it of another model"),
        (CaptureSpec(sae=sae, sae_k=65), errors.InvalidSpec, "has 64 features"),
        (CaptureSpec(sae=[sae, sae]), errors.InvalidSpec, "two SAEs that read"),
        (CaptureSpec(sae="sae"), errors.InvalidSpec, "give an SAE"),
    ):
        with pytest.raises(error, match=says):
            await tiny.generate(prompt, params, capture=spec)


@pytest.mark.parametrize("architecture", ["jumprelu", "transcoder"])
async def test_a_logit_is_what_features_and_the_rest_give_to_it(architecture, tiny, tmp_path) -> None:
    """The logits are the engine's own, the parts add up to them, and a feature's part is what it wrote times what is read."""
    sae = SAE.load(RandomSAE(architecture, WIDTH, 500).write(tmp_path))
    prompt, params, last = random_prompt(30, 4), {"max_tokens": 5, **GREEDY}, tiny.num_layers - 1
    _, whole = await tiny.generate(
        prompt, params, capture=CaptureSpec(layers=[1, last], sites=["resid_pre", "resid_post"])
    )
    _, read = await tiny.generate(prompt, params, capture=CaptureSpec(sae=sae, sae_k=500))
    await tiny.fetch_captures_batch([whole, read])
    table = logit_attribution(whole, tiny, sae, top=500)
    rows = whole.captures[last, "resid_post"]
    sequence = [*whole.prompt_token_ids, *whole.output_token_ids]
    assert table.token_ids.tolist() == sequence[1:]
    engine = tiny.serving.here()
    own = await engine.unembed(rows, tuple(sequence[1:]))
    logits = torch.frombuffer(bytearray(own.logits), dtype=torch.float32).view(len(rows), -1).diagonal()
    torch.testing.assert_close(table.logits, logits, rtol=1e-4, atol=1e-4)
    parts = table.contributions.sum(dim=1) + table.others + table.bias + table.rest + table.constants
    torch.testing.assert_close(parts, logits, rtol=1e-3, atol=1e-3)
    row, at = 9, 3
    feature = int(table.ids[row, at])
    wrote = sae.encode(whole.captures[sae.input])[row, feature] * sae.decoder[feature]
    # The engine's own norm and unembedding, with the scale of the whole row: norm(row + small) - norm(row) moves it by little.
    step = 1e-2
    moved = await engine.unembed(
        torch.stack([rows[row] + step * wrote, rows[row] - step * wrote]), (sequence[row + 1],)
    )
    up, down = torch.frombuffer(bytearray(moved.logits), dtype=torch.float32).tolist()
    along = float(rows[row] @ wrote / rows[row].square().sum())
    frozen = (up - down) / (2 * step) + along * float(table.logits[row])
    assert float(table.contributions[row, at]) == pytest.approx(frozen, rel=2e-2, abs=2e-3)
    sparse = logit_attribution(whole, tiny, sae, top=500, features=read.features[sae.input])
    torch.testing.assert_close(sparse.contributions, table.contributions, rtol=1e-3, atol=1e-3)
    assert bool(sparse.complete.all())
    for token in ("b", 65):
        records = logit_attribution(whole, tiny, sae, token=token, top=2).records()
        assert {record["token"] for record in records} == {"b"}
    assert len(str(table).splitlines()) == len(rows)
    with pytest.raises(errors.InvalidRequest, match="has no rows of"):
        logit_attribution(read, tiny, sae)
