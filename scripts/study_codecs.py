"""Which science survives which codec? SmolLM2 on sentiment, topics and personas, every codec beside the raw rows.

    python scripts/study_codecs.py [--out out/study_codecs] [--quick]

SmolLM2-135M-Instruct in float32 on CPU. Texts are read once for each codec, through the engine, and the codes that come back are
measured against the raw rows of the same texts. A text's row is the mean of its rows from the second token on. Probes are trained on
8 texts of either class, drawn 40 times, at an early layer, where raw rows leave room for worse, and tested on texts with other words.
Directions found in coded rows steer at the length of the raw one. Errors of cosines of projections are over 24 seeds. Intervals are
95 % of resamples, of draws, or of seeds. Controls: labels in random order for probes and means, a random direction in place of the
persona's and of the one that steers, texts of one layer in another order. The result is `results.json` and a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study_dose import QUESTIONS, asked

LAYERS = (6, 14, 22)
NEURONS = 14
SEED = 11
RESAMPLES = 500
#: Texts of a class that a probe is trained on, how often they are drawn, and seeds of projections.
FEW, DRAWS, SEEDS = 8, 40, 24
#: Where directions steer, how far, and whom; as in scripts/study_dose.py.
STEERED, SCALE, TRAIT = 20, 2.0, "optimistic"
STEERING = (("full8", None), ("int4", None), ("topk8", 42), ("rp8", 512), ("rp8", 132))
#: Codecs by the bytes of a row of 576 elements: the same budget, spent in different ways.
BUDGETS = {
    "580 B": (("full8", None), ("fp8", None), ("rp8", 512), ("rp16", 256), ("topk8", 189)),
    "330 B": (("int4", None), ("rp8", 320), ("rp16", 160), ("topk8", 106)),
    "140 B": (("rp8", 132), ("rp16", 66), ("topk8", 42)),
    "70 B": (("rp8", 64), ("rp16", 32), ("topk8", 19)),
}
GOOD = (
    "wonderful",
    "delightful",
    "excellent",
    "charming",
    "superb",
    "brilliant",
    "lovely",
    "splendid",
    "great",
    "pleasant",
)
BAD = ("horrible", "dreadful", "awful", "boring", "terrible", "dull", "nasty", "miserable", "poor", "unpleasant")
THINGS = ("film", "meal", "concert", "hotel", "holiday", "book", "lecture", "garden")
OPINIONS = ("The {thing} was {word} from beginning to end.", "I thought that the {thing} was {word}, and so did they.")
SPORT = (
    "goalkeeper",
    "striker",
    "referee",
    "marathon",
    "penalty",
    "tournament",
    "coach",
    "stadium",
    "relay",
    "sprinter",
)
KITCHEN = ("saucepan", "dough", "recipe", "oven", "spice", "broth", "pastry", "skillet", "marinade", "whisk")
SCENES = (
    "Everybody in the room talked about the {word}.",
    "Nobody had expected such a {word} here.",
    "She looked at the {word} for a long time.",
    "There was a photograph of the {word} in the newspaper.",
    "He said that the {word} had changed everything.",
    "We could not stop thinking of the {word} that day.",
    "The {word} was what they remembered best.",
    "My brother explained the {word} to all of us.",
)


@dataclass(frozen=True)
class Task:
    """Texts of two classes.

    Args:
        texts: all of them.
        labels: bool [texts].
        tested: which are kept for the test, bool [texts]: their words are in no other text.
    """

    texts: tuple[str, ...]
    labels: np.ndarray[Any, Any]
    tested: np.ndarray[Any, Any]


def task(positive: Sequence[str], negative: Sequence[str], forms: Sequence[str]) -> Task:
    """Words of two classes in the same sentences; the last four words of each are kept for the test."""
    texts, labels, tested = [], [], []
    for label, words in ((True, positive), (False, negative)):
        for place, word in enumerate(words):
            for form in forms:
                texts.append(form.format(word=word))
                labels.append(label)
                tested.append(place >= len(words) - 4)
    return Task(tuple(texts), np.array(labels), np.array(tested))


def tasks() -> dict[str, Task]:
    from steercap.lab.personas import shipped_traits

    opinions = [form.format(thing=thing, word="{word}") for form, thing in product(OPINIONS, THINGS)]
    found = {"sentiment": task(GOOD, BAD, opinions), "topic": task(SPORT, KITCHEN, SCENES)}
    trait = shipped_traits()["formal"]
    examples = ((True, trait.examples.positive), (False, trait.examples.negative))
    texts = [(label, place, text) for label, given in examples for place, text in enumerate(given)]
    found["formal"] = Task(
        tuple(text for _, _, text in texts),
        np.array([label for label, _, _ in texts]),
        np.array([place % 3 == 2 for _, place, _ in texts]),
    )
    return found


# Rows


async def read(model: Any, texts: Sequence[str], **how: Any) -> list[Any]:
    """Handles of texts, fetched."""
    from steercap import CaptureSpec

    spec = CaptureSpec(**{"layers": LAYERS, "tokens": slice(1, None), **how})
    handles = await model.read(list(texts), capture=spec)
    await model.fetch_captures_batch(handles)
    return list(handles)


def means(handles: Sequence[Any], layer: int) -> np.ndarray[Any, Any]:
    """The mean row of each text: float64 [texts, numbers]."""
    return np.stack([handle.captures[layer].double().mean(0).numpy() for handle in handles])


def rows(handles: Sequence[Any], layer: int) -> np.ndarray[Any, Any]:
    return np.concatenate([handle.captures[layer].double().numpy() for handle in handles])


# Measures. Each compares a codec's numbers with the raw ones of the same texts.


def auc(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def probe(found: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], given: Task) -> np.ndarray[Any, Any]:
    """The AUC on the tested texts of a logistic regression on a few others: one for each draw, the same for each codec."""
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(SEED)
    areas = []
    for _ in range(DRAWS):
        classes = (np.flatnonzero(~given.tested & (labels == label)) for label in (True, False))
        drawn = np.concatenate([rng.choice(one, FEW, replace=False) for one in classes])
        model = LogisticRegression(max_iter=2000, C=0.1).fit(found[drawn], labels[drawn])
        areas.append(auc(model.decision_function(found[given.tested]), given.labels[given.tested]))
    return np.array(areas)


def direction(found: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The difference of means, of length 1."""
    between = found[labels].mean(0) - found[~labels].mean(0)
    unit: np.ndarray[Any, Any] = between / np.linalg.norm(between)
    return unit


def cka(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Linear CKA of two layers' rows of the same texts."""
    one, other = one - one.mean(0), other - other.mean(0)
    shared = np.linalg.norm(one.T @ other) ** 2
    return float(shared / np.linalg.norm(one.T @ one) / np.linalg.norm(other.T @ other))


def in_row_space(numbers: np.ndarray[Any, Any], coded: Any) -> np.ndarray[Any, Any]:
    """A direction among a codec's numbers as one of the rows: back through the matrix, where there is one."""
    from steercap.kernels.codecs.random_projection import signs

    if not coded.codec.startswith("rp"):
        return numbers
    matrix = signs(coded.coding.k, coded.schema.width, coded.coding.seed).double().numpy()
    back = numbers @ matrix
    unit: np.ndarray[Any, Any] = back / np.linalg.norm(back)
    return unit


def interval(count: int, measure: Callable[[np.ndarray[Any, Any]], float], rng: np.random.Generator) -> list[float]:
    """The measure of all, and 95 % of its values over resamples: [value, least, greatest]."""
    drawn = [measure(rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return [round(float(value), 4) for value in (measure(np.arange(count)), low, high)]


def geometry(raw: Sequence[Any], coded: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
    """Errors of rows, and of cosines between rows of different texts, over all layers."""
    found: dict[str, Any] = {}
    projected = coded[0].coded[LAYERS[0]].codec.startswith("rp")
    if not projected:
        per_text = []
        for one, other in zip(raw, coded, strict=True):
            exact = torch.cat([one.captures[layer] for layer in LAYERS]).double()
            back = torch.cat([other.captures[layer] for layer in LAYERS]).double()
            error = (back - exact).norm(dim=1) / exact.norm(dim=1)
            cosine = torch.nn.functional.cosine_similarity(back, exact, dim=1)
            per_text.append((float(error.mean()), float(cosine.mean()), float(cosine.min())))
        table = np.array(per_text)
        found["relative error of a row"] = interval(len(table), lambda at: table[at, 0].mean(), rng)
        found["cosine with the row"] = interval(len(table), lambda at: table[at, 1].mean(), rng)
        found["least cosine of a row"] = round(float(table[:, 2].min()), 4)
    return found | (over_seeds(raw, coded) if projected else of_cosines(raw, coded, rng))


def of_cosines(raw: Sequence[Any], coded: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
    """Errors of cosines between rows of different texts."""
    squares, sums, counts = [], [], []
    for place, partner in enumerate(rng.permutation(len(raw)).tolist()):
        for layer in LAYERS if place != partner else ():
            mine, theirs = raw[place].captures[layer].double(), raw[partner].captures[layer].double()
            norms = mine.norm(dim=1)[:, None] * theirs.norm(dim=1)
            off = (coded[place].coded[layer].inner(coded[partner].coded[layer]) - mine @ theirs.T) / norms
            squares.append(float(off.square().sum()))
            sums.append(float(off.sum()))
            counts.append(off.numel())
    square, total, count = np.array(squares), np.array(sums), np.array(counts)
    return {
        "rms error of a cosine": interval(len(count), lambda at: math.sqrt(square[at].sum() / count[at].sum()), rng),
        "bias of a cosine": interval(len(count), lambda at: total[at].sum() / count[at].sum(), rng),
    }


def over_seeds(raw: Sequence[Any], coded: Sequence[Any]) -> dict[str, Any]:
    """The same of projections: one row of each text, coded on the host with other seeds."""
    from msgspec import structs

    from steercap.kernels.codecs import ENCODINGS
    from steercap.kernels.codecs.coded import CodedRows

    sample = coded[0].coded[LAYERS[1]]
    codec: Any = ENCODINGS[sample.codec]
    exact = torch.stack([handle.captures[LAYERS[1]][-1] for handle in raw])
    norms = exact.double().norm(dim=1)
    known = exact.double() @ exact.double().T / norms[:, None] / norms
    other = ~torch.eye(len(exact), dtype=torch.bool)
    per_seed = []
    for seed in range(SEEDS):
        coding = structs.replace(sample.coding, seed=seed)
        stored = codec.encode(exact, sample.schema, coding, codec.matrix(sample.schema.width, coding))
        found = CodedRows(coding, sample.schema, codec.parts(stored, sample.schema, coding)).inner()
        off = (found / norms[:, None] / norms - known)[other]
        per_seed.append((float(off.square().mean().sqrt()), float(off.mean())))
    table = np.array(per_seed)
    spread = 1.96 * table.std(axis=0, ddof=1) / math.sqrt(SEEDS)
    return {
        name: [round(float(one), 4) for one in (mean, mean - half, mean + half)]
        for name, mean, half in zip(
            ("rms error of a cosine", "bias of a cosine"), table.mean(axis=0), spread, strict=True
        )
    }


def science(raw: Sequence[Any], coded: Sequence[Any], given: Task, rng: np.random.Generator) -> dict[str, Any]:
    """Probes, means and persona projections of one task, at the middle layer; with their controls."""
    layer, early = LAYERS[1], LAYERS[0]
    exact, found = means(raw, layer), means(coded, layer)
    labels, tested = given.labels, given.tested
    shuffled = rng.permutation(labels)
    areas, of_raw = (probe(means(handles, early), labels, given) for handles in (coded, raw))
    by_chance_areas = probe(means(coded, early), shuffled, given)
    known = direction(exact[~tested], labels[~tested])
    mine = in_row_space(direction(found[~tested], labels[~tested]), coded[0].coded[layer])
    control = in_row_space(direction(found[~tested], shuffled[~tested]), coded[0].coded[layer])
    noise = rng.standard_normal(len(known))
    along, by_chance = (
        np.array([float(one.coded[layer].inner(torch.from_numpy(vector)[None]).mean()) for one in coded])
        for vector in (known, noise / np.linalg.norm(noise))
    )
    wanted = exact @ known
    return {
        "probe, AUC": interval(DRAWS, lambda at: areas[at].mean(), rng),
        "probe, AUC beyond that of raw rows": interval(DRAWS, lambda at: (areas - of_raw)[at].mean(), rng),
        "probe, labels shuffled": interval(DRAWS, lambda at: by_chance_areas[at].mean(), rng),
        "difference of means, cosine with the raw one": round(float(mine @ known), 4),
        "difference of means, labels shuffled": round(float(control @ known), 4),
        "projection on the direction, correlation": interval(
            len(wanted), lambda at: float(np.corrcoef(along[at], wanted[at])[0, 1]), rng
        ),
        "projection on a random direction, correlation": round(float(np.corrcoef(by_chance, wanted)[0, 1]), 4),
    }


def similarity(raw: Sequence[Any], coded: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
    """How far linear CKA between layers is off, and what it is when the texts of one layer are in another order."""
    exact, found = ([means(handles, layer) for layer in LAYERS] for handles in (raw, coded))
    pairs = [(one, other) for one in range(len(LAYERS)) for other in range(one)]
    apart = [abs(cka(found[one], found[other]) - cka(exact[one], exact[other])) for one, other in pairs]
    order = rng.permutation(len(raw))
    return {
        "CKA of two layers, error": round(max(apart), 4),
        "CKA of two layers": round(cka(exact[0], exact[1]), 4),
        "CKA, texts shuffled": round(cka(exact[0], exact[1][order]), 4),
    }


def neuron_ranks(raw: Sequence[Any], coded: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
    """Which neurons are strongest: of each token, and over all texts."""
    exact, found = (np.abs(rows_at_neurons(handles)) for handles in (raw, coded))
    top = [len(set(np.argsort(-a)[:10]) & set(np.argsort(-b)[:10])) / 10 for a, b in zip(exact, found, strict=True)]
    overlap, average = np.array(top), (exact.mean(0), found.mean(0))
    first = [set(np.argsort(-one)[:50].tolist()) for one in average]
    order = rng.permutation(exact.shape[1])
    return {
        "ten strongest neurons of a token, kept": interval(len(overlap), lambda at: overlap[at].mean(), rng),
        "fifty strongest on average, kept": len(first[0] & first[1]) / 50,
        "the same, neurons shuffled": len(first[0] & {int(order[one]) for one in first[1]}) / 50,
    }


def rows_at_neurons(handles: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([handle.captures[NEURONS, "neurons"].double().numpy() for handle in handles])


# The run


def codings() -> Iterator[tuple[str, str, int | None]]:
    for budget, codecs in BUDGETS.items():
        for codec, k in codecs:
            yield budget, codec, k


async def study(out: Path, *, quick: bool) -> dict[str, Any]:
    from steercap import SteerModel
    from steercap.kernels.codecs import ENCODINGS
    from steercap.lab.demo import smollm2

    results: dict[str, Any] = {"codecs": {}, "neurons": {}}
    async with SteerModel(smollm2(), preset="cpu", sites=("resid_post", "neurons"), use_tqdm_on_load=False) as model:
        given = tasks()
        raw = {name: await read(model, one.texts) for name, one in given.items()}
        baseline = raw_science(raw, given)
        results["raw"] = baseline
        for budget, codec, k in codings():
            if quick and budget != "140 B":
                continue
            rng = np.random.default_rng(SEED)
            how = {"codec": codec, "codec_k": k, "codec_seed": SEED if ENCODINGS[codec].seeded else None}
            coded = {name: await read(model, one.texts, **how) for name, one in given.items()}
            sample = coded["topic"][0].coded[LAYERS[0]]
            name = codec if k is None else f"{codec} k={k}"
            found: dict[str, Any] = {
                "budget": budget,
                "bytes of a row": sample.nbytes // len(sample),
                **geometry(raw["topic"], coded["topic"], rng),
                **similarity(raw["sentiment"], coded["sentiment"], rng),
                "tasks": {task: science(raw[task], coded[task], given[task], rng) for task in given},
            }
            if k is not None and codec.startswith("rp"):
                found["1 / sqrt(k)"] = round(k**-0.5, 4)
            results["codecs"][name] = found
            print(json.dumps({name: found}, indent=1), flush=True)
        texts = given["topic"].texts
        kept = {"layers": NEURONS, "sites": "neurons"}
        known = await read(model, texts, **kept)
        for codec, k in (("topk8", 16), ("topk8", 64), ("topk8", 256), ("full8", None), ("int4", None)):
            coded_neurons = await read(model, texts, **kept, codec=codec, codec_k=k)
            sample = coded_neurons[0].coded[NEURONS, "neurons"]
            name = codec if k is None else f"{codec} k={k}"
            results["neurons"][name] = {
                "bytes of a row": sample.nbytes // len(sample),
                **neuron_ranks(known, coded_neurons, np.random.default_rng(SEED)),
            }
            print(json.dumps({name: results["neurons"][name]}, indent=1), flush=True)
        results["steering"] = await steering(model, out)
        print(json.dumps(results["steering"], indent=1), flush=True)
    return results


def raw_science(raw: Mapping[str, Sequence[Any]], given: dict[str, Task]) -> dict[str, Any]:
    """What the raw rows give."""
    found = {}
    for name, one in given.items():
        exact, rng = means(raw[name], LAYERS[0]), np.random.default_rng(SEED)
        areas, shuffled = probe(exact, one.labels, one), probe(exact, rng.permutation(one.labels), one)
        found[name] = {
            "texts": len(one.texts),
            "probe, AUC": round(float(areas.mean()), 4),
            "probe, labels shuffled": round(float(shuffled.mean()), 4),
        }
    return found


async def steering(model: Any, out: Path) -> dict[str, Any]:
    """Steer with directions found in coded rows, all of the raw one's length: the trait's score of the answers."""
    from steercap.kernels.codecs import ENCODINGS
    from steercap.lab.measures.score import Score
    from steercap.lab.personas import shipped_traits
    from steercap.lab.studies.sweeps import Sweep, run_sweep
    from steercap.steering import LayerVectors

    examples = shipped_traits()[TRAIT].examples
    texts = (*examples.positive, *examples.negative)
    labels = np.array([True] * len(examples.positive) + [False] * len(examples.negative))
    exact = means(await read(model, texts, layers=STEERED), STEERED)
    length = float(np.linalg.norm(exact[labels].mean(0) - exact[~labels].mean(0)))
    known = direction(exact, labels)
    found = {"raw": known}
    for codec, k in STEERING:
        how = {"codec": codec, "codec_k": k, "codec_seed": SEED if ENCODINGS[codec].seeded else None}
        coded = await read(model, texts, layers=STEERED, **how)
        name = codec if k is None else f"{codec} k={k}"
        found[name] = in_row_space(direction(means(coded, STEERED), labels), coded[0].coded[STEERED])
    sweep = Sweep(
        vectors={name: LayerVectors({STEERED: torch.from_numpy(one * length).float()}) for name, one in found.items()},
        layers=(STEERED,),
        scales=(SCALE,),
        prompts=[asked(question) for question in QUESTIONS],
        tokens="generated",
        sampling_params={"max_tokens": 32, "temperature": 0.0},
        random=4,
        negated=False,
    )
    results = await run_sweep(model, sweep, out=out / "sweep", measures=[Score(TRAIT)])
    summary: dict[str, Any] = {}
    for one in results.summary():
        mean = one.means[TRAIT]
        name = one.condition.vector or "without steering"
        if one.condition.control.startswith("random"):
            summary.setdefault("random directions", []).append(round(mean.value, 1))
        else:
            summary[name] = {"score": round(mean.value, 1)}
            if name in found:
                summary[name]["cosine with the raw direction"] = round(float(found[name] @ known), 3)
    return summary


def draw(results: dict[str, Any], out: Path) -> None:
    """Two pictures: errors of cosines against the rate, and directions by bytes."""
    import matplotlib.pyplot as plt

    from steercap.core.display import place_names

    codecs = results["codecs"]
    colours = {"full8": "C0", "fp8": "C1", "int4": "C2", "rp8": "C3", "rp16": "C4", "topk8": "C5"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    named: list[tuple[str, tuple[float, float], tuple[float, float]]] = []
    for name, found in codecs.items():
        codec = name.split()[0]
        value, low, high = found["rms error of a cosine"]
        size = found["bytes of a row"]
        axes[0].errorbar(size, value, [[value - low], [high - value]], fmt="o", color=colours[codec])
        if "1 / sqrt(k)" in found:
            axes[0].plot(size, found["1 / sqrt(k)"], marker="_", markersize=14, color=colours[codec])
        cosines = [one["difference of means, cosine with the raw one"] for one in found["tasks"].values()]
        axes[1].plot([size] * len(cosines), cosines, "o", color=colours[codec], alpha=0.6)
        named.append((name, (size, value), (size, min(cosines))))
    axes[0].set(xlabel="bytes of a row", ylabel="rms error of a cosine; bar: 1 / √k", xscale="log", yscale="log")
    axes[1].set(xlabel="bytes of a row", ylabel="difference of means: cosine with the raw one", xscale="log")
    for axis in axes:
        axis.set_xlim(58, 1000)
        axis.set_xticks([70, 140, 330, 580], ["70", "140", "330", "580"])
        axis.minorticks_off()
    figure.tight_layout()
    names, *places = zip(*named, strict=True)
    for axis, points in zip(axes, places, strict=True):
        place_names(axis, names, points, size=7)
    figure.savefig(out / "codecs.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/study_codecs"))
    parser.add_argument("--quick", action="store_true", help="one budget alone")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(study(args.out, quick=args.quick))
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    draw(results, args.out)
    print(json.dumps(results["raw"], indent=1))


if __name__ == "__main__":
    main()
