"""SGLang's own sources for the tests: the wheels from PyPI, kept in ``.cache/wheels/`` and unpacked beside it."""

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "wheels"
VERSIONS = ("0.5.17", "0.5.23")
_UNAVAILABLE = {}


@cache
def unpacked(name, version=None):
    """The folder with a wheel's files, downloaded first if it is not here; skips the test if that fails."""
    found = sorted(CACHE.glob(f"{name.replace('-', '_')}-{version or '*'}-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        wanted = f"{name}=={version}" if version else name
        if wanted not in _UNAVAILABLE:
            options = ["-q", "--retries", "1", "--timeout", "15", "--no-deps", "--only-binary=:all:", "-d", str(CACHE)]
            command = [sys.executable, "-m", "pip", "download", *options, wanted]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            if done.returncode:
                _UNAVAILABLE[wanted] = done.stderr.strip()[-200:]
        if wanted in _UNAVAILABLE:
            pytest.skip(f"{wanted} is not in {CACHE} and cannot be downloaded: {_UNAVAILABLE[wanted]}")
        found = sorted(CACHE.glob(f"{name.replace('-', '_')}-{version or '*'}-*.whl"))
    folder = CACHE / "unpacked" / found[-1].stem
    if not folder.is_dir():
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(found[-1]) as wheel:
            wheel.extractall(making)
        try:
            making.rename(folder)
        except OSError:  # another test process was faster
            assert folder.is_dir()
    return folder


def run_script(script, *arguments, stdin="", paths=(), env=None):
    """Run a test script in a Python of its own (SGLang's modules must not stay in this one)."""
    path = os.pathsep.join([*map(str, paths), str(ROOT)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        env={**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
