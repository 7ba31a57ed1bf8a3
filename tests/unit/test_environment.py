"""Settings from the environment: what counts before what, and that nothing that is set is passed over."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_calls import call

import steercap
from steercap import CaptureSpec, SteerModel
from steercap.adapters.reaper import MARK
from steercap.cli.engines import ModelOptions
from steercap.cli.preflight import preflight
from steercap.config import Settings, environment
from steercap.config.environment import (
    OTHERS,
    OWN,
    SETTINGS,
    flag_of,
    from_environment,
    settings,
    table,
    variable_of,
)
from steercap.errors import InvalidSetting, InvalidSpec
from steercap.lab.demo import CACHE as CHECKPOINTS
from steercap.lab.demo import cache_root, cached

ROOT = Path(steercap.__file__).parent.parent
#: Of each setting a value that is not its default, as the environment and as code have it.
VALUES = {
    "codec": ("full8", "full8"),
    "codec_k": ("32", 32),
    "codec_seed": ("5", 5),
    "capture_bytes": ("1048576", 1 << 20),
    "device_ring_bytes": ("1048576", 1 << 20),
    "reduce_bytes": ("0", 0),
    "sketch_bytes": ("0", 0),
    "sae_bytes": ("0", 0),
    "overflow": ("error", "error"),
    "overflow_timeout": ("0.5", 0.5),
    "spill_folder": ("/tmp", "/tmp"),
    "spill_bytes": ("1048576", 1 << 20),
    "transport": ("wire", "wire"),
    "steering_slots": ("3", 3),
    "vector_bytes": ("4096", 4096),
    "edits_per_point": ("2", 2),
    "restart": ("true", True),
}
#: Of each setting another one.
GIVEN = {
    name: {
        "codec": "raw",
        "overflow": "wait",
        "transport": "shared",
        "overflow_timeout": 9.0,
        "spill_folder": "/",
        "restart": False,
    }.get(name, 77)
    for name in SETTINGS
}


@pytest.mark.parametrize("name", SETTINGS)
def test_code_comes_before_the_environment_and_that_before_the_default(name, monkeypatch) -> None:
    """Of each setting, in SteerModel, and in what a command foresees of its engine, flags included."""
    text, value = VALUES[name]
    if name.startswith("spill_"):
        monkeypatch.setenv(variable_of("overflow"), "spill")
    default = getattr(Settings(), name)
    assert value != default
    assert getattr(SteerModel("m").settings, name) == default
    monkeypatch.setenv(variable_of(name), text)
    options, flag = ModelOptions(), ModelOptions(engine_arg=[f"{name}={json.dumps(GIVEN[name])}"])
    assert getattr(SteerModel("m").settings, name) == getattr(preflight(options).settings, name) == value
    assert getattr(SteerModel("m", **{name: GIVEN[name]}).settings, name) == GIVEN[name]
    assert getattr(preflight(flag).settings, name) == getattr(preflight(options, **{name: GIVEN[name]}).settings, name)
    assert getattr(preflight(flag).settings, name) == GIVEN[name]
    monkeypatch.setenv(variable_of(name), "")
    assert getattr(SteerModel("m").settings, name) == default


def test_a_spec_that_names_a_codec_has_it_and_others_the_models() -> None:
    """What is computed of rows is no row, and never coded; a codec for it is refused where it is named."""
    assert CaptureSpec().codec_or("full8") == "full8"
    assert CaptureSpec(codec="raw").codec_or("full8") == "raw"
    assert CaptureSpec(codec="full8").codec_or("raw") == "full8"
    assert CaptureSpec(reduce="mean").codec_or("full8") == "raw"
    with pytest.raises(InvalidSpec, match="codec='full8' cannot hold"):
        CaptureSpec(reduce="mean", codec="full8")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("STEERCAP_CODECC", "did you mean 'STEERCAP_CODEC'"),
        ("STEERCAP_CAPTUREBYTES", "did you mean 'STEERCAP_CAPTURE_BYTES'"),
        ("STEERCAP_", "known: 'STEERCAP_"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(wrong, meant, monkeypatch) -> None:
    """When a model is made, when a command starts, whatever the command does; empty or not."""
    for text in ("full8", ""):
        monkeypatch.setenv(wrong, text)
        says = rf"{wrong} is set .* no such setting; .*{meant}"
        with pytest.raises(InvalidSetting, match=says):
            SteerModel("m")
        done = call("persona", "traits")
        assert done.exit_code == 1
        assert re.search(says, done.stderr.replace("\n", " "))
        assert not done.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("codec", "zip"),
        ("codec", "projected"),
        ("capture_bytes", "4GB"),
        ("capture_bytes", "0"),
        ("capture_bytes", "1.5"),
        ("device_ring_bytes", "-1"),
        ("reduce_bytes", "-1"),
        ("overflow", "Wait"),
        ("overflow_timeout", "soon"),
        ("overflow_timeout", "nan"),
        ("transport", "pigeon"),
        ("steering_slots", "0"),
        ("vector_bytes", "99999999999999999999"),
        ("edits_per_point", "true"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_its_variable(name, text, monkeypatch) -> None:
    """It is not passed over where code gives another value: what is wrong is mended, not forgotten."""
    monkeypatch.setenv(variable_of(name), text)
    for given in ({}, {name: GIVEN[name]}):
        with pytest.raises(InvalidSetting, match=f"^{variable_of(name)}='{text}' in the environment is not valid: "):
            SteerModel("m", **given)
    assert call("persona", "traits").exit_code == 1


def test_what_a_killed_process_left_in_the_cache_is_removed(tmp_path, monkeypatch) -> None:
    """With the next folder of that name, and nothing of other names, which may be in the making."""
    monkeypatch.setenv(CHECKPOINTS, str(tmp_path))

    def killed(folder: Path) -> None:
        shutil.copytree(folder, folder.with_name(folder.name[:-1] + "~"))  # what its removal does not find
        raise KeyboardInterrupt

    for name in ("one", "one.two"):
        with pytest.raises(KeyboardInterrupt):
            cached(name, killed)
    assert cached("one", lambda folder: (folder / "made").touch()) == tmp_path / "one"
    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) == 2
    assert all(name == "one" or name.startswith(".one.two.") for name in left)


def test_what_steercap_and_its_tests_set_themselves_is_none_of_the_users(monkeypatch) -> None:
    """The mark of an engine's processes, the tests' own, and what is no field of Settings."""
    assert MARK in OWN
    for name in (*OWN, *OTHERS, "STEERCAP_TEST_SEED"):
        monkeypatch.setenv(name, "/some/where")
    assert from_environment() == {}
    assert settings(codec=None) == Settings()
    assert cache_root() == Path("/some/where")


def test_every_variable_that_is_read_is_known() -> None:
    """No file of the package names one that is not in the table; no test reads one that is not a test's."""
    known = {*map(variable_of, SETTINGS), *OTHERS, *OWN}
    for path in (ROOT / "steercap").rglob("*.py"):
        assert set(re.findall(r"STEERCAP_[A-Z_]+\b", path.read_text())) <= known, path
    for path in (ROOT / "tests").rglob("*.py"):
        read = re.findall(r"environ\W+(?:get\W+)?(STEERCAP_\w+)", path.read_text())
        assert all(name.startswith(environment.TESTS) for name in read), path


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    """Line by line; and each setting has a value in these tests."""
    assert table() in (ROOT / "docs" / "settings.md").read_text()
    assert CHECKPOINTS in OTHERS
    assert VALUES.keys() == SETTINGS.keys()


def test_each_flag_of_the_table_is_there() -> None:
    """In the help of `steercap capture`."""
    shown = call("capture", "--help").stdout
    for name, variable in SETTINGS.items():
        assert bool(re.search(rf"{flag_of(variable_of(name))}(?![\w-])", shown)) == variable.flag, name
