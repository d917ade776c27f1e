"""What is checked before anything is interposed, how it is switched on, and that it leaves nothing behind."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from deferred_engine import Generator, Job, engine, real_engine  # noqa: F401
from deferred_scenarios import prompt

from kit import deferred
from kit.deferred import autoload
from kit.deferred.install import SUPPORTED, source_problems, version_problem
from kit.errors import KitError

TESTS = Path(__file__).parent
WHEELS = sorted((TESTS.parent / ".cache" / "wheels").glob("exllamav3-*.whl"))
install_module = sys.modules["kit.deferred.install"]


def sources(read):
    return read("exllamav3/generator/job.py"), read("exllamav3/generator/generator.py")


# ------------------------------------------------------------------------------------------------------------- checking


def test_the_installed_release_has_the_expected_calls():
    import exllamav3

    root = Path(exllamav3.__file__).parents[1]
    assert source_problems(*sources(lambda name: (root / name).read_text())) == []


@pytest.mark.skipif(not WHEELS, reason="no exllamav3 wheels in .cache/wheels (pip download --no-deps exllamav3==…)")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-")[1])
def test_every_supported_release_has_the_expected_calls(wheel):
    version = wheel.name.split("-")[1]
    if version_problem(version):
        pytest.skip(f"{version} is outside {SUPPORTED}")
    with zipfile.ZipFile(wheel) as archive:
        assert source_problems(*sources(lambda name: archive.read(name).decode())) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("self.generator.draft_model.prefill(", "self.generator.fill_draft(", "0 times"),
        ("mtp_carry_hidden", "carried", "mtp_carry_hidden"),
        (
            '"block_table": seq.block_index_tensor,\n                            "cache": self.generator.draft_cache',
            "",
            "block_table",
        ),
        ("def deallocate_pages", "def release", "deallocate_pages"),
    ],
)
def test_a_release_that_changed_is_recognised(before, after, problem):
    import exllamav3

    root = Path(exllamav3.__file__).parents[1]
    job, generator = sources(lambda name: (root / name).read_text())
    if after == "":
        after = '"tables": seq.block_index_tensor'
    assert before in job
    [found] = [p for p in source_problems(job.replace(before, after), generator) if problem in p]
    assert "Job." in found


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("1.4.1", True),
        ("1.5.0+cu128.torch2.9.0", True),
        ("1.6.5", True),
        ("1.4.0", False),
        ("1.7.0", False),
        (None, False),
    ],
)
def test_the_supported_range(version, ok):
    assert (version_problem(version) is None) is ok


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(install_module, "installed_version", lambda: "9.9.9")


@pytest.mark.usefixtures("unknown_release")
def test_an_unknown_release_stays_stock():
    methods = {name: getattr(Job, name) for name in ("prefill", "deallocate_pages")}
    with pytest.raises(deferred.DeferError, match=r"stays stock: .* 9\.9\.9 is outside the checked range, 1\.4\.1 to"):
        deferred.install()
    assert {name: getattr(Job, name) for name in methods} == methods


@pytest.mark.usefixtures("unknown_release")
def test_an_unknown_release_may_only_warn(caplog):
    assert deferred.install(on_mismatch="warn") is False
    assert "stays stock" in caplog.text
    assert deferred.installed() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"depth": 0}, "depth 0"),
        ({"depth": 2.5}, "depth 2.5"),
        ({"depth": 4, "where": "disk"}, "where='disk'"),
        ({"depth": 4, "max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(KitError, match=said):
        deferred.install(**arguments)


# ----------------------------------------------------------------------------------------------------------- in and out


def test_uninstalling_leaves_nothing(engine):  # noqa: F811
    owners = {Generator: ("__init__", "iterate", "close"), Job: ("prefill", "deallocate_pages", "hash_completed_page")}
    before = {(owner, name): owner.__dict__[name] for owner, names in owners.items() for name in names}
    e = engine(options={"cpu_cache_size": 2**20})
    instances = [e.target, e.target.modules[0], e.head, e.draft_cache, e.generator.cpu_page_cache, e.generator]
    attributes = [set(vars(instance)) for instance in instances]
    deferred.install(4, skip_single_device=False)
    deferred.unblock()
    e.enqueue(prompt(1500))
    e.run()
    assert [set(vars(instance)) for instance in instances] != attributes
    deferred.uninstall()
    assert {(owner, name): owner.__dict__[name] for owner, name in before} == before
    assert [set(vars(instance)) for instance in instances] == attributes


def test_installing_again_replaces_and_unblocking_is_kept(engine):  # noqa: F811
    deferred.unblock()
    deferred.install(4, skip_single_device=False)
    deferred.install(6, where="pinned", skip_single_device=False)
    settings = deferred.installed()
    assert (settings.depth, settings.where, settings.unblock) == (6, "pinned", True)
    e = engine()
    e.enqueue(prompt(3000))
    e.run()
    assert len([n for _, n in e.passes if n > 8]) == 6


def test_a_generator_older_than_the_installation_is_deferred_too(engine):  # noqa: F811
    e = engine()
    deferred.install(4, skip_single_device=False)
    e.enqueue(prompt(3000))
    e.run()
    assert deferred.counters(e.generator)["flushes"] == {"depth": 1, "prefill_end": 1}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda e: setattr(e.generator, "dflash_draft", True), "DFlash"),
        (lambda e: setattr(e.generator, "mtp_draft", False), "autoregressive"),
        (lambda e: e.head.caps.update(draft_uses_target_cache=True), "target's cache"),
        (lambda e: setattr(e.target, "loaded_tp", True), "tensor parallel"),
        (lambda e: None, "one device"),
    ],
)
def test_what_is_not_this_path_is_left_alone(engine, make, said):  # noqa: F811
    e = engine()
    make(e)
    deferred.install(4, skip_single_device=said == "one device")
    state = install_module.bind(e.generator)
    assert said in state.bypass
    assert not state._deferrable({"target_hidden": object(), "cache": e.draft_cache})
    e.target.loaded_tp = False


def test_a_recurrent_draft_state_is_never_deferred(engine):  # noqa: F811
    e = engine()
    deferred.install(4, skip_single_device=False)
    state = install_module.bind(e.generator)
    params = {"target_hidden": object(), "cache": e.draft_cache, "recurrent_states": None}
    assert state._deferrable(params)
    assert not state._deferrable({**params, "recurrent_states": [object()]})


def test_a_generator_without_drafting_runs_as_before(engine):  # noqa: F811
    plain = engine(draft=False)
    plain.enqueue(prompt(1500), "plain")
    plain.run()
    deferred.install(4)
    deferred.unblock()
    e = engine(draft=False)
    e.enqueue(prompt(1500), "plain")
    e.run()
    assert e.outputs == plain.outputs
    assert deferred.counters(e.generator)["bypass"] == "no draft model"
    assert deferred.counters(e.generator)["unblocked_uploads"] == 3


# ------------------------------------------------------------------------------------------------------------- autoload


def python(code, **environment):
    """Run code in a fresh interpreter; returns what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KIT_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_imports_no_engine():
    code = "import sys, kit.deferred, kit.deferred.autoload, kit.deferred.model; "
    assert python(code + "print({'torch', 'exllamav3'} & set(sys.modules))") == "set()"


def test_the_pth_line_is_inert_without_the_variable(tmp_path):
    (tmp_path / autoload.PTH_NAME).write_text(autoload.PTH_LINE)
    code = f"import sys, site; site.addsitedir({str(tmp_path)!r}); "
    code += "print('kit.deferred' in sys.modules, 'torch' in sys.modules)"
    assert python(code) == "False False"
    assert python(code, KIT_DEFER_DEPTH="8") == "True False"


ENGINE_LATER = """
import sys, site
site.addsitedir({folder!r})
assert "torch" not in sys.modules
import deferred_engine
from kit import deferred
s = deferred.installed()
print(s and (s.depth, s.where, s.rolling, s.unblock, s.max_bytes))
"""


@pytest.mark.parametrize(
    ("environment", "installed"),
    [
        ({}, "None"),
        ({"KIT_DEFER_DEPTH": "all", "KIT_DEFER_MAX_MIB": "7"}, "(None, 'device', False, False, 7340032)"),
        (
            {"KIT_DEFER_DEPTH": "2", "KIT_DEFER_WHERE": "pinned", "KIT_DEFER_ROLLING": "1", "KIT_DEFER_UNBLOCK": "1"},
            "(2, 'pinned', True, True, 4294967296)",
        ),
        ({"KIT_DEFER_DEPTH": "many"}, "None"),
    ],
)
def test_autoload_interposes_once_the_engine_is_imported(tmp_path, environment, installed):
    (tmp_path / autoload.PTH_NAME).write_text(autoload.PTH_LINE)
    assert python(ENGINE_LATER.format(folder=str(tmp_path)), **environment).splitlines()[-1] == installed


def test_autoload_leaves_workers_alone(monkeypatch):
    import multiprocessing

    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    monkeypatch.setenv(autoload.DEPTH, "4")
    autoload.interpose()
    assert deferred.installed() is None


@pytest.mark.parametrize(
    "environment",
    [
        {"KIT_DEFER_DEPTH": "0"},
        {"KIT_DEFER_DEPTH": "-3"},
        {"KIT_DEFER_DEPTH": "4", "KIT_DEFER_MAX_MIB": "lots"},
        {"KIT_DEFER_DEPTH": "4", "KIT_DEFER_COALESCE": "yes"},
    ],
)
def test_variables_that_mean_nothing_are_named(environment):
    name, value = list(environment.items())[-1]
    with pytest.raises(KitError, match=f"{name}='{value}'"):
        autoload.options(environment)


def test_the_pth_file_is_written_and_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(autoload, "pth_path", lambda: tmp_path / autoload.PTH_NAME)
    assert autoload.main(["--install"]) == 0
    assert (tmp_path / autoload.PTH_NAME).read_text().startswith("import os")
    assert autoload.main(["--uninstall"]) == 0
    assert not list(tmp_path.iterdir())
    assert "KIT_DEFER_DEPTH" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- tabby


FAKE_TABBY = """
import os, sys
import helper
import deferred_engine
from kit import deferred
print(helper.NAME, os.path.basename(os.getcwd()), sys.argv[1:], __name__, deferred.installed().depth)
"""


def test_tabbyapi_is_started_as_if_directly(tmp_path):
    folder = tmp_path / "tabbyAPI"
    folder.mkdir()
    (folder / "main.py").write_text(FAKE_TABBY)
    (folder / "helper.py").write_text("NAME = 'helper'\n")
    code = (
        "import runpy, sys; "
        f"sys.argv = ['tabby', '--depth', '6', {str(folder)!r}, '--config', 'x.yml']; "
        "runpy.run_module('kit.deferred.tabby', run_name='__main__', alter_sys=True)"
    )
    assert python(code).splitlines()[-1] == "helper tabbyAPI ['--config', 'x.yml'] __main__ 6"


def test_a_folder_without_tabbyapi_is_named(tmp_path, capsys):
    from kit.deferred import tabby

    assert tabby.main([str(tmp_path / "nowhere")]) == 2
    assert "no TabbyAPI at" in capsys.readouterr().err
