"""Setting the width of a running server: believed only when read back, refused with the reason."""

import json
import threading
import urllib.request

import pytest
from draftwidth_servers import WIDTHS, serve  # noqa: F401

from kit.cli import main
from kit.draftwidth import client
from kit.draftwidth.policy import Row, WidthPolicy
from kit.errors import KitError


def long_request(url, tokens):
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": tokens}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["text"]


def test_a_width_counts_as_set_once_the_server_reports_it_in_use(serve):  # noqa: F811
    url = serve(**WIDTHS).base_url
    assert client.get_width(url).in_use == 4
    state = client.set_width(f"{url}/v1", 2)
    assert state.in_use == state.asked == 2 and not state.pending
    assert state.counts()[2]["steps"] > 0, "an idle server needs a request to make a decode step"


def test_an_idle_server_that_may_not_be_sent_a_request_is_reported_pending(serve, capsys):  # noqa: F811
    url = serve(**WIDTHS).base_url
    state = client.set_width(url, 1, nudge=False)
    assert state.pending and state.asked == 1 and state.in_use == 4
    assert "pending" in str(state)
    long_request(url, 5)
    assert not client.get_width(url).pending


def test_widths_switched_under_traffic_lose_nothing(serve):  # noqa: F811
    url = serve(**WIDTHS).base_url
    plain = long_request(url, 400)
    texts = []
    clients = [threading.Thread(target=lambda: texts.append(long_request(url, 400))) for _ in range(4)]
    for each in clients:
        each.start()
    for width in (0, 4, 1, 2, 0):
        assert client.set_width(url, width, nudge=False).asked == width
    for each in clients:
        each.join()
    assert texts == [plain] * 4


def test_a_refusal_is_an_error_with_the_candidates(serve):  # noqa: F811
    url = serve(**WIDTHS).base_url
    with pytest.raises(KitError, match=r"refused: draft_width must be one of \[0, 1, 2, 4\].*; got 3"):
        client.set_width(url, 3)
    with pytest.raises(KitError, match="no width policy"):
        client.set_width(url, client.AUTO)
    assert client.get_width(url).asked == 4


def test_a_server_without_the_plugin_or_without_speculation_says_so(serve, monkeypatch):  # noqa: F811
    plain = serve().base_url
    with pytest.raises(KitError, match=r"does not run the draft_width plugin: .*SGLANG_PLUGINS=draft_width"):
        client.set_width(plain, 2)
    monkeypatch.setenv("SGLANG_PLUGINS", "draft_width")
    inactive = serve().base_url
    with pytest.raises(KitError, match="cannot change its draft width: the server runs without speculative"):
        client.get_width(inactive)


def test_a_policy_sent_to_the_server_is_followed(serve):  # noqa: F811
    url = serve(**WIDTHS).base_url
    policy = WidthPolicy((Row(1, 1), Row(3, 0)), dwell_steps=1)
    state = client.set_width(url, client.AUTO, policy=policy)
    assert state.ranks[0].mode == "auto" and state.ranks[0].policy == policy.to_settings()
    long_request(url, 20)
    assert client.get_width(url).in_use == 1
    own = client.set_width(url, client.SGLANG)
    assert own.ranks[0].mode == "sglang"


def test_a_width_that_never_comes_into_use_is_an_error(monkeypatch):
    # A server that takes a width and never uses it: what a plugin with a broken hook would do.
    report = {"active": True, "mode": "fixed", "asked": 2, "in_use": 4, "candidates": [2, 4], "refused": None,
              "policy": None, "counts": {}}  # fmt: skip
    steps = iter(range(10**6))

    def answer(method, url, **_):
        if url.endswith("/server_info"):
            count = {"steps": next(steps), "requests": 1, "verified": 1, "accepted": 0}
            return {"internal_states": [{"draft_width": {**report, "counts": {"4": count}}}]}
        return [True]

    monkeypatch.setattr(client, "request_json", answer)
    with pytest.raises(KitError, match=r"took draft_width = 2 but does not report it in use after 0\.3 s"):
        client.set_width("http://127.0.0.1:1", 2, timeout_s=0.3)


def test_the_command_line(serve, capsys, tmp_path):  # noqa: F811
    url = serve(**WIDTHS).base_url
    assert main(["width", "set", url, "off"]) == 0
    assert "draft width 0 in use" in capsys.readouterr().out
    assert main(["width", "get", url]) == 0
    out = capsys.readouterr().out
    assert "width 0:" in out and "candidates [0, 1, 2, 4]" in out
    assert main(["width", "set", url, "3"]) == 2
    assert "one of [0, 1, 2, 4]" in capsys.readouterr().err
    (tmp_path / "policy.json").write_text(WidthPolicy((Row(1, 2),)).to_json())
    assert main(["width", "set", url, "auto", "--policy", str(tmp_path / "policy.json")]) == 0
    assert "by policy" in capsys.readouterr().out
    assert main(["width", "set", url, "2", "--policy", str(tmp_path / "policy.json")]) == 2
    assert main(["width", "get", "http://127.0.0.1:9"]) == 2


def test_watch_tells_each_change(serve):  # noqa: F811
    url = serve(**WIDTHS).base_url
    states = client.watch(url, interval_s=0.02)
    assert next(states).in_use == 4
    client.set_width(url, 1)
    assert next(states).asked == 1
