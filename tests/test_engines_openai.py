"""Attaching to servers that already run: local ones that answer as the real ones do, and one real one."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny_gguf

from kit.engines import llamacpp, openai
from kit.engines.base import HttpError, request
from kit.engines.guard import started
from kit.engines.openai import AttachSettings, attach, normal_url
from kit.engines.process import EngineError

ONE_MODEL = {"object": "list", "data": [{"id": "qwen", "object": "model", "owned_by": "someone"}]}


class Fake:
    """A local server: ``answers`` maps paths to JSON, text, or (status, JSON). Keeps what it was asked."""

    def __init__(self):
        self.answers = {"/v1/models": ONE_MODEL}
        self.key = None
        self.asked = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self):
                authorization = self.headers.get("Authorization")
                fake.asked.append((self.command, self.path, authorization))
                answer = fake.answers.get(self.path.partition("?")[0], (404, {"error": "not found"}))
                status, body = answer if isinstance(answer, tuple) else (200, answer)
                if fake.key is not None and authorization != f"Bearer {fake.key}":
                    status, body = 401, {"error": f"key {(authorization or '').removeprefix('Bearer ')} is not valid"}
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = respond

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def attach(self, **settings):
        return attach(AttachSettings.checked(base_url=self.url, **settings))

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.close()


@pytest.mark.parametrize(
    "given",
    [
        "http://host:8000",
        "http://host:8000/",
        "http://host:8000/v1",
        "http://host:8000/v1/",
        "http://host:8000/v1/chat/completions",
        "http://host:8000/v1/models",
        " http://host:8000/v1 ",
    ],
)
def test_the_url_may_be_given_in_any_usual_form(given):
    assert normal_url(given) == "http://host:8000"


def test_a_path_before_v1_is_kept():
    assert normal_url("https://host/serving/llm/v1") == "https://host/serving/llm"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("host:8000", "not a URL like"),
        ("ftp://host", "not a URL like"),
        ("http://", "not a URL like"),
        ("http://host:port", "not a URL like"),
        ("http://me:s3cret@host", "holds credentials"),
        ("http://host/v1?key=s3cret", r"before any \?"),
    ],
)
def test_a_bad_url_is_refused_without_repeating_a_secret(url, says):
    with pytest.raises(EngineError, match=says) as caught:
        AttachSettings.checked(base_url=url)
    assert "s3cret" not in str(caught.value)


def test_an_unknown_setting_is_named_with_the_valid_ones():
    with pytest.raises(EngineError, match=r"unknown setting 'base'; the settings are: base_url, model, api_key_env"):
        AttachSettings.checked(base_url="http://h", base="x")


def test_a_plain_server_is_attached_with_what_is_known(fake):
    server = fake.attach()
    assert (server.base_url, server.dialect, server.model) == (fake.url, "openai", "qwen")
    assert server.metrics_url is None and server.sampled == {}
    assert server.resolved["engine"] is None and server.resolved["layout"] is None
    with pytest.raises(EngineError, match="no way to empty"):
        server.flush()


def test_vllm_is_known_by_its_version(fake):
    fake.answers["/version"] = {"version": "0.99.1"}
    fake.answers["/metrics"] = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
    server = fake.attach()
    assert server.dialect == "openai"
    assert server.resolved["engine_build"] == "vllm 0.99.1"
    assert server.metrics_url == f"{fake.url}/metrics"
    assert server.sampled["drafted"] == "vllm:spec_decode_num_draft_tokens_total"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_sglang_is_known_by_its_server_info_old_or_new(fake, path):
    fake.answers[path] = {
        "version": "0.5.23", "model_path": "/home/me/qwen", "api_key": "s3cret", "tp_size": 2, "pp_size": 1,
        "dp_size": 1, "speculative_algorithm": "EAGLE", "mem_fraction_static": 0.8,
        "internal_states": [{"speculative_num_steps": 3, "speculative_algorithm": "EAGLE"}],
    }  # fmt: skip
    fake.answers["/flush_cache"] = "Cache flushed."
    server = fake.attach()
    assert (server.dialect, server.resolved["engine"], server.resolved["draft_width"]) == ("sglang", "sglang", 3)
    assert server.resolved["mem_fraction_static"] == 0.8
    assert "s3cret" not in json.dumps(server.resolved) and "/home/me" not in json.dumps(server.resolved)
    server.flush()
    assert fake.asked[-1][0] == "POST" and fake.asked[-1][1].startswith("/flush_cache")


def test_a_real_llamacpp_server_is_known_and_left_running(tmp_path):
    model = tiny_gguf.write(tmp_path / "peaked.gguf")
    settings = llamacpp.LlamaCppSettings.checked(
        model=model, slots=2, tokens_per_slot=256, threads=1, speculation="mtp", draft_width=1
    )
    with llamacpp.start(settings, tmp_path) as own:
        with attach(AttachSettings.checked(base_url=f"{own.base_url}/v1")) as server:
            assert (server.dialect, server.model) == ("llamacpp", "peaked")
            told = {key: server.resolved[key] for key in ("slots", "tokens_per_slot", "speculative", "model_file")}
            assert told == {"slots": 2, "tokens_per_slot": 256, "speculative": True, "model_file": "peaked.gguf"}
            assert server.resolved["layout"] is None  # the server tells no thread count, so none is claimed
            assert server.sampled["running"].split(":")[1] in request("GET", server.metrics_url)
            server.flush()
        assert started(own.process.pid) is not None


def test_a_server_that_is_not_there_is_an_error_with_its_address(fake):
    fake.close()
    with pytest.raises(EngineError, match=rf"no server answers at {fake.url}"):
        fake.attach()


def test_a_server_that_wants_a_key_says_how_to_give_one(fake):
    fake.key = "right"
    with pytest.raises(EngineError, match=r"wants an API key .*api_key_env"):
        fake.attach()


def test_the_key_is_sent_but_kept_and_printed_nowhere(fake, monkeypatch):
    fake.key = "right-s3cret"
    monkeypatch.setenv("MY_KEY", "right-s3cret")
    server = fake.attach(api_key_env="MY_KEY")
    assert {authorization for _, _, authorization in fake.asked} == {"Bearer right-s3cret"}
    assert server.api_key_env == "MY_KEY" and server.headers() == {"Authorization": "Bearer right-s3cret"}
    assert "s3cret" not in repr(server)


def test_a_refused_key_is_not_repeated_even_if_the_server_does(fake, monkeypatch):
    fake.key = "right"
    monkeypatch.setenv("MY_KEY", "wrong-s3cret")
    with pytest.raises(EngineError, match=r"refuses the API key in MY_KEY \(HTTP 401\)") as caught:
        fake.attach(api_key_env="MY_KEY")
    chain = [caught.value, caught.value.__cause__]
    assert not any("s3cret" in str(error) for error in chain)


def test_a_key_variable_that_is_not_set_is_named(fake, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(EngineError, match="MY_KEY is not set"):
        fake.attach(api_key_env="MY_KEY")
    assert fake.asked == []


def test_the_key_itself_given_as_the_name_is_refused_and_not_repeated():
    with pytest.raises(EngineError, match="must be the NAME") as caught:
        AttachSettings.checked(base_url="http://h", api_key_env="sk-s3cret")
    assert "s3cret" not in str(caught.value) and caught.value.__cause__ is None


def test_redirects_are_not_followed_with_the_key(fake, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k")
    fake.answers["/v1/models"] = (302, {})
    with pytest.raises(EngineError, match="redirects elsewhere"):
        fake.attach(api_key_env="MY_KEY")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"object": "list", "data": []}, "serves no model"),
        ((404, {}), "not the base URL of an OpenAI-style API"),
        ({"hello": "world"}, "not with a list of models"),
        ("<html>welcome</html>", "not JSON"),
        ((503, {"error": "loading"}), "still loading"),
        ((500, {"error": "boom"}), "boom"),
    ],
)
def test_what_is_wrong_with_the_server_is_said(fake, answer, says):
    fake.answers["/v1/models"] = answer
    with pytest.raises(EngineError, match=says):
        fake.attach()


def test_the_model_must_be_served_and_chosen_where_several_are(fake):
    fake.answers["/v1/models"] = {"data": [{"id": "big"}, {"id": "small"}]}
    with pytest.raises(EngineError, match="several models; choose one by model=: big, small"):
        fake.attach()
    with pytest.raises(EngineError, match="does not serve 'medium'; it serves: big, small"):
        fake.attach(model="medium")
    assert fake.attach(model="small").model == "small"


def test_a_front_page_at_metrics_is_not_taken_for_metrics(fake):
    fake.answers["/metrics"] = "<html>welcome</html>"
    assert fake.attach().metrics_url is None
    assert fake.attach(metrics_url="http://127.0.0.1:9/metrics").metrics_url == "http://127.0.0.1:9/metrics"


def test_a_silent_server_does_not_hold_the_kit_up():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(EngineError, match="timed out"):
            attach(AttachSettings.checked(base_url=url, timeout_s=0.3))


def test_proxies_of_the_environment_are_not_used_for_this_machine(fake, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert fake.attach().model == "qwen"


def test_http_errors_keep_the_status(fake):
    with pytest.raises(HttpError) as caught:
        request("GET", f"{fake.url}/nothing")
    assert caught.value.status == 404
    assert openai.SAMPLED_VLLM.keys() == llamacpp.SAMPLED.keys()
