"""What a newcomer meets: imports, errors, registries, the guard, the map of the tree."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import door
import pytest

import steercap
from steercap import (
    CaptureSpec,
    Progress,
    SteerModel,
    errors,
    sync,
)
from steercap.architectures.families import FAMILIES, family_of
from steercap.architectures.sites import SITES
from steercap.captures.handle import CaptureHandle
from steercap.client.sampling import sampling_json
from steercap.config import CPU, Settings
from steercap.config.environment import SETTINGS
from steercap.core.protocols import Count
from steercap.core.spec import Point, check_armed
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting, UnknownName
from steercap.kernels.codecs import ENCODINGS, codec_of
from steercap.kernels.sketches import SKETCHES
from steercap.lab import (
    datasets,
    training,
)
from steercap.lab import (
    directions as vectors,
)
from steercap.lab import (
    personas as persona,
)
from steercap.lab.directions import METHODS
from steercap.lab.measures.scores import SCORERS, make_scorer
from steercap.lab.mechanism import (
    analysis,
    comparison,
    views,
)
from steercap.lab.personas import (
    roles,
)
from steercap.lab.studies import (
    evaluation,
)
from steercap.lab.studies import (
    sweeps as experiments,
)
from steercap.lab.studies.evaluation import TASKS
from steercap.lab.studies.sweeps import MEASURES
from steercap.lab.training import OBJECTIVES
from steercap.lab.training.settings import settings_of
from steercap.steering import (
    DirectionSet,
    LayerVectors,
    formats,
)

ROOT = Path(steercap.__file__).parent


def test_importing_steercap_loads_neither_vllm_nor_torch() -> None:
    """`import steercap` is quick: heavy things are loaded by what needs them."""
    code = "import sys, steercap; print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_is_there() -> None:
    """`steercap.__all__` holds, and an unknown name is an AttributeError."""
    for name in steercap.__all__:
        assert getattr(steercap, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'SteerModle'"):
        _ = steercap.SteerModle


def test_no_public_name_changes_unannounced() -> None:
    """The names of `steercap`, their members and signatures are those of tests/door.txt."""
    assert door.door() == door.FILE.read_text(), "announce it in CHANGELOG.md, then run: python scripts/door.py"


def test_public_packages_are_attributes_of_steercap() -> None:
    """After `import steercap` alone; of the others, and of slips of the pen, the error says what to write."""
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py") if "__all__" in path.read_text()]
    assert {"steering", "sync", "saes"} <= set(packages)
    names = sorted({*packages, "architectures", "lab", "errors"})
    code = (
        "import steercap\n"
        "try:\n    steercap.worker\nexcept AttributeError as error:\n    print(error)\n"
        f"for name in {names}:\n    assert getattr(steercap, name).__name__ == f'steercap.{{name}}', name\n"
        f"assert set({names}) <= set(dir(steercap))\n"
        "steercap.steerin"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        done.stdout
        == "module 'steercap' has no attribute 'worker' before it is imported; write import steercap.worker\n"
    )
    assert done.stderr.endswith("module 'steercap' has no attribute 'steerin'. Did you mean: 'steering'?\n")


def test_the_tree_of_errors_is_the_one_drawn() -> None:
    """The drawing in errors.py names every class, at its depth."""
    drawn = {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^([│├└─ ]*)(\w+)(?: \(\w+\))?(?:\s{2,}.*)?$", line)
        if match and inspect.isclass(getattr(errors, match[2], None)):
            drawn[match[2]] = len(match[1]) // 4
    classes = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}
    assert drawn == {
        name: sum(issubclass(base, errors.SteercapError) for base in cls.__mro__) - 1 for name, cls in classes.items()
    }


PUBLIC = [
    getattr(module, name)
    for module in (
        steercap,
        analysis,
        comparison,
        datasets,
        evaluation,
        experiments,
        formats,
        persona,
        roles,
        training,
        vectors,
        views,
        sync,
    )
    for name in module.__all__
    if callable(getattr(module, name))
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: f"{public.__module__}.{public.__qualname__}")
def test_each_argument_is_described(public) -> None:
    """Where a docstring lists arguments, it lists all of them, each once, and no others."""
    names = sorted(inspect.signature(public).parameters)
    listed = re.search(r"^Args:\n((?: .*\n|\n)*)", inspect.getdoc(public) + "\n", re.MULTILINE)
    if listed is not None:
        described = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*): ", listed[1], re.MULTILINE)
        assert sorted(name.lstrip("*") for group in described for name in group.split(", ")) == names


@pytest.mark.parametrize("registry", [SITES, FAMILIES, ENCODINGS, METHODS, SKETCHES, OBJECTIVES])
def test_a_registry_names_what_it_knows(registry) -> None:
    """An unknown name is an error that lists the known ones; each member is a file, or an entry in one."""
    with pytest.raises(UnknownName, match=f"known: .*'{next(iter(registry))}'"):
        registry["nothing"]
    folder = Path(sys.modules[type(next(iter(registry.values()))).__module__].__file__).parent
    files = {path.stem: path.read_text() for path in folder.glob("*.py")}
    tables = "".join(
        text for text in files.values() if re.search(r"^(MEMBERS|[A-Z]+: Final\[Registry)", text, re.MULTILINE)
    )
    assert all(name in files or f'    "{name}": ' in tables for name in registry)
    assert "nothing" not in registry
    assert len(registry) == len(list(registry))


DIRECTIONS = DirectionSet({name: LayerVectors({1: [1.0, 2.0]}) for name in ("optimistic", "formal")})


@pytest.mark.parametrize(
    ("ask", "meant"),
    [
        (lambda: check_armed([Point(1, "resid_pst")], [], SITES), "resid_post"),
        (lambda: CaptureSpec(sites="blocks.1.hook_resid_poost"), "hook_resid_post"),
        (lambda: CaptureSpec(reduce="maen"), "mean"),
        (lambda: CaptureSpec(tokens="last_promt"), "last_prompt"),
        (lambda: codec_of("ful8"), "full8"),
        (lambda: DIRECTIONS["formel"], "formal"),
        (lambda: DIRECTIONS.select(["Optimistic"]), "optimistic"),
        (lambda: Settings(overflow="eror"), "error"),
        (lambda: SteerModel("m", preset="cpu "), "cpu"),
        (lambda: sampling_json({"temprature": 1.0}), "temperature"),
        (lambda: settings_of({"batchsize": 4}), "batch_size"),
        (lambda: persona.PersonaSettings(traits=("poetc",)).resolved(), "poetic"),
        (lambda: experiments.MEASURES["score"]("poetc"), "poetic"),
        (lambda: make_scorer("keywords", {"densty": 1}), "density"),
        (lambda: roles.shipped_roles().role("pirat"), "pirate"),
        (lambda: roles.shipped_roles().select(["pirat"]), "pirate"),
        *[
            (lambda registry=registry, name=name: registry[f"{name}x"], name)
            for registry in (
                SITES,
                FAMILIES,
                ENCODINGS,
                METHODS,
                SKETCHES,
                OBJECTIVES,
                MEASURES,
                TASKS,
                SCORERS,
            )
            for name in list(registry)[-1:]
        ],
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(ask, meant) -> None:
    """A slip of the pen is an error that says which name may be meant, before it lists all of them."""
    with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'.*known: "):
        ask()


def test_a_forgotten_await_is_named_by_its_call() -> None:
    """Python warns of a coroutine by its name: that of the call that a user wrote, not of what runs it."""
    for model in (SteerModel("m"), SteerModel.connect("http://127.0.0.1:9")):
        for name in ("generate", "chat", "read", "encode"):
            coming = getattr(model, name)("x")
            assert coming.__qualname__ == f"{type(model).__name__}.{name}"
            coming.close()


def test_no_architecture_is_claimed_twice() -> None:
    """Each architecture has one family."""
    names = [name for family in FAMILIES.values() for name in family.architectures]
    assert len(names) == len(set(names))
    assert all(family_of([name]) for name in names)


SCRIPT = """
import asyncio
from steercap.engine.guard import require_main_guard

async def main():
    require_main_guard()
    print("started")

{run}
"""


@pytest.mark.parametrize(
    ("run", "starts"),
    [
        ("asyncio.run(main())", False),
        ("if True:\n    asyncio.run(main())", False),
        ('if __name__ == "__main__":\n    asyncio.run(main())', True),
        ('def go():\n    asyncio.run(main())\n\nif __name__ == "__main__":\n    go()', True),
        (
            """
import multiprocessing as m
if __name__ == "__mp_main__":
    asyncio.run(main())
if __name__ == '__main__':
    p = m.get_context("spawn").Process(target=print)
    p.start()
    p.join()
""",
            False,
        ),
    ],
)
def test_a_script_needs_the_main_guard(run, starts, tmp_path) -> None:
    """Without it an engine would start engines; the message says what to write."""
    script = tmp_path / "experiment.py"
    script.write_text(SCRIPT.format(run=run))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ("started" in done.stdout) == starts
    assert ('if __name__ == "__main__":' in done.stderr) != starts


def test_the_guard_lets_interactive_sessions_be() -> None:
    """There is nothing to import again."""
    code = "from steercap.engine.guard import require_main_guard\nrequire_main_guard()\nprint('started')"
    assert "started" in subprocess.check_output([sys.executable, "-c", code], text=True)


def test_every_room_is_on_the_page() -> None:
    """docs/architecture.md names each room; it and the pages of mechanisms name no room or module that is gone."""
    docs = ROOT.parent / "docs"
    named = _modules_named(docs / "architecture.md")
    rooms = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in ROOT.glob("*/__init__.py")}
    rooms |= {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in ROOT.glob("lab/*/__init__.py")}
    modules = {path.name for path in ROOT.glob("*.py")} - {"__init__.py"}
    assert (rooms | modules) - named == set(), "not on the page"
    for page in (docs / "mechanisms").glob("*.md"):
        named |= _modules_named(page)
    assert {name for name in named if not (ROOT / name).exists()} == set(), "gone"


def _modules_named(page: Path) -> set[str]:
    """Rooms and modules in a page, by their paths in the library."""
    found = re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text())
    return {name for name in found if not name.startswith(("tests/", "scripts/", "docs/"))}


def test_only_adapters_name_vllm() -> None:
    """At run time nothing else imports vllm; types under TYPE_CHECKING do not count."""
    guilty = []
    for path in ROOT.rglob("*.py"):
        if "adapters" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        skipped = {id(n) for block in checking for n in ast.walk(block)}
        for node in ast.walk(tree):
            names = (
                [a.name for a in getattr(node, "names", [])]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", "") or ""]
            )
            if (
                isinstance(node, (ast.Import, ast.ImportFrom))
                and id(node) not in skipped
                and any(n.split(".")[0] == "vllm" for n in names)
            ):
                guilty.append(path.name)
    assert guilty == []


#: As Qwen 3 does: the last message is rendered otherwise than the same message in the middle.
LAST_IS_SPECIAL = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content | trim }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: As Mistral does: the system message moves into the last user message.
SYSTEM_MOVES = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.last %}{{ messages[0].content }} :: {% endif %}{{ m.content }}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Why? Why? "},
    {"role": "assistant", "content": "Why? Because."},
    {"role": "user", "content": "Why? Because of what?"},
]


@pytest.mark.parametrize("template", [LAST_IS_SPECIAL, SYSTEM_MOVES])
def test_a_message_is_found_wherever_the_template_puts_it(template) -> None:
    """Decorated, trimmed, moved or alike: each span is its own message's words, and no other's."""
    from transformers import AutoTokenizer

    from steercap.core.prompts import templated
    from steercap.testing import tiny_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    ids, spans = templated(tokenizer, TALK, {"chat_template": template}, spans=True)
    words = {span.index: tokenizer.decode(ids[span.start : span.stop]) for span in spans if span.index is not None}
    assert {index: text.strip() for index, text in words.items()} == {
        index: message["content"].strip() for index, message in enumerate(TALK)
    }
    invited = [tokenizer.decode(ids[span.start : span.stop]) for span in spans if span.index is None]
    assert invited == (["<assistant>"] if template == LAST_IS_SPECIAL else [])


def test_a_message_that_the_template_leaves_out_has_no_span() -> None:
    """What is not in the prompt is nobody's row."""
    from transformers import AutoTokenizer

    from steercap.core.prompts import templated
    from steercap.testing import tiny_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    _, spans = templated(tokenizer, TALK, {"chat_template": "{{ messages[-1].content }}"}, spans=True)
    assert [(span.index, span.start) for span in spans if not span.missing] == [(3, 0)]
    assert [(span.index, span.start, span.stop) for span in spans if span.missing] == [(at, 0, 0) for at in range(3)]


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_file_that_is_no_capture_is_refused(content, tmp_path) -> None:
    """Empty, foreign, truncated or missing files are InvalidFile with the path."""
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidFile, match=r"x\.safetensors"):
        CaptureHandle.load(path)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [({}, "not of steercap"), ({"steercap": '{"version": 2}'}, "version 2"), ({"steercap": "{"}, "cannot be read")],
)
def test_a_foreign_or_newer_header_is_refused(metadata, says, tmp_path) -> None:
    """A safetensors file of somebody else's, of a later format, or with a broken header says which."""
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors", metadata)
    with pytest.raises(InvalidFile, match=says):
        CaptureHandle.load(tmp_path / "x.safetensors")


def test_every_setting_is_an_argument() -> None:
    """What `Settings` holds can be given to `SteerModel` under its name; what the environment may give is left open."""
    arguments = inspect.signature(SteerModel).parameters
    for field in dataclasses.fields(Settings):
        default = None if field.name in SETTINGS else getattr(Settings, field.name)
        assert arguments[field.name].default == default
    assert SteerModel("m").settings == Settings()


def test_a_preset_stands_under_what_is_given() -> None:
    """`preset="cpu"` brings engine arguments; those of the call count before them; another name is refused."""
    bare, preset = SteerModel("m"), SteerModel("m", preset="cpu")
    assert bare.serving.engine_args == {}
    assert preset.serving.engine_args == dict(CPU)
    given = SteerModel("m", preset="cpu", max_model_len=64, seed=3).serving.engine_args
    assert given == {**CPU, "max_model_len": 64, "seed": 3}
    with pytest.raises(InvalidSetting, match="preset='gpu'; did you mean 'cpu'"):
        SteerModel("m", preset="gpu")
    documented = inspect.getdoc(SteerModel)
    documented = documented.replace('"', "'")
    assert all(f"`{name}={value!r}`" in documented for name, value in CPU.items() if name != "kv_cache_memory_bytes")
    assert f"kv_cache_memory_bytes={CPU['kv_cache_memory_bytes'] >> 20} MiB" in documented


def test_the_changelog_begins_with_this_version() -> None:
    """Its newest heading is `__version__`, with a day or Unreleased; headings are those of Keep a Changelog."""
    text = (ROOT.parent / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.fullmatch(rf"\[{re.escape(steercap.__version__)}\] - (Unreleased|\d{{4}}-\d\d-\d\d)", versions[0])
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\S*\] - \d{4}-\d\d-\d\d", older) for older in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_the_commands_of_tests_leave_nothing_out_and_do_nothing_twice() -> None:
    """`make test` runs what is not slow, `make unit` its part without an engine, `make test-all` the first and then what is
    slow, but for extended tests, which are slow and have a command of their own; CI runs `make test-all`.
    """
    makefile = (ROOT.parent / "Makefile").read_text()
    assert re.findall(r"^(\S+): (\S+)\n\t\$\(BIN\)/python -m pytest -m (\"[^\"]+\"|\S+)", makefile, re.MULTILINE) == [
        ("unit", "setup", '"not slow"'),
        ("test", "lint", '"not slow"'),
        ("test-all", "test", '"slow and not extended"'),
        ("test-extended", "setup", "extended"),
    ]
    assert "exec make test-all" in (ROOT.parent / ".ci" / "run").read_text()


def test_a_callback_for_one_verb_fits_every_other() -> None:
    """Each public `progress=` is the one type, and is described in the same words, or as that of another verb."""
    verbs = {name: getattr(sync, name) for name in sync.__all__}
    for module in pkgutil.walk_packages(steercap.lab.__path__, "steercap.lab."):
        if module.ispkg and (names := getattr(package := importlib.import_module(module.name), "__all__", ())):
            verbs |= {f"{module.name}.{name}": getattr(package, name) for name in names}
    taken = {
        name: inspect.signature(verb).parameters["progress"].annotation
        for name, verb in verbs.items()
        if callable(verb) and "progress" in inspect.signature(verb).parameters
    }
    assert len({name.rpartition(".")[2] for name in taken}) >= 20
    assert set(taken.values()) == {"ProgressCallback | None"}
    words = r"progress: function called with a `Progress` whenever the work advances\.|progress: (arguments )?as\sfor"
    assert not [name for name in taken if not re.search(words, " ".join(verbs[name].__doc__.split()))]


def test_a_report_of_progress_is_a_line() -> None:
    """Counts have separators; a total that is unknown is left out; details come with four digits."""
    seen: list[Progress] = []
    count = Count("answers", 1200, 3, seen.append)
    count.add(1100)
    assert [str(at) for at in seen] == ["answers: 3 of 1,200", "answers: 1,103 of 1,200"]
    assert (
        str(Progress("rows", 5, None, {"loss": 0.25641, "tokens/s": 12345.6}))
        == "rows, loss 0.2564, tokens/s 12,346: 5"
    )
    Count("answers", None, 0, None).add()
