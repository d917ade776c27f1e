"""Start the stand-in for SGLang (``fake_sglang``) as the kit starts SGLang."""

import os
import socket
from pathlib import Path

import pytest

from kit.engines import sglang

FAKE = Path(__file__).with_name("fake_sglang")
WIDTHS = {"speculation": "mtp", "candidate_widths": "0,1,2,4"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """``serve(**settings)`` → a running server; all are stopped at the end."""
    path = [str(FAKE), str(FAKE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    started = []

    def start(**settings):
        folder = tmp_path / f"server{len(started)}"
        server = sglang.start(
            sglang.parse_settings(settings), Path("/weights/model"), folder, port=free_port(), deadline_s=60
        )
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()
