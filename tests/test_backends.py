"""What serves a model: the whole Ollama path against a stub, OpenAI-compatible servers, keys that stay secret."""
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from granite import models
from granite.backends import ONE_TOOL, BackendError, backend_for, models_table, pull, within
from granite.models import Model, ModelError, resolve
from ollama_stub import OllamaStub

TAG = "llama3.2:3b"
CALL = {"content": "", "tool_calls": [{"function": {"name": "read_sensor", "arguments": {"sensor_id": "SN005"}}}]}
ASK = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What does SN005 say?"}]


def ollama(stub, tag=TAG, **more):
    return backend_for(Model("llama3.2", "ollama", tag, base_url=stub.url, think=False, context_tokens=4096, **more), seed=11)


@pytest.fixture
def litellm():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm
    return litellm


@pytest.fixture
def deaf():
    "A port that accepts connections and never says a word"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(8)
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


# --- is it up ---------------------------------------------------------------------------------------------------------

def test_check_says_what_is_wrong_in_one_line(deaf):
    with OllamaStub() as stub:
        assert ollama(stub).check() is None
        missing = ollama(stub, "qwen3:14b").check()
        assert missing.kind == "missing" and "ollama pull qwen3:14b" in missing.message
    gone = ollama(stub).check()
    assert gone.kind == "down" and "ollama serve" in gone.message and "-p model qwen2.5-coder-1.5b" in gone.message
    assert "\n" not in gone.message+missing.message


def test_check_answers_within_five_seconds_whatever_happens(deaf):
    for backend in (backend_for(Model("a", "ollama", "a", base_url=deaf)), backend_for(f"openai/big@{deaf}/v1")):
        start = time.monotonic()
        assert backend.check().kind == "down"
        assert time.monotonic()-start < 5


def test_a_server_that_is_not_ollama():
    with serving(lambda path, headers: (200, b"<html>hello</html>")) as url:
        assert backend_for(Model("a", "ollama", "a", base_url=url)).check().kind == "odd"


def test_latest_is_the_default_tag():
    with OllamaStub({"granite4:latest": {}}) as stub: assert ollama(stub, "granite4").check() is None


# --- what was really loaded -------------------------------------------------------------------------------------------

def test_start_loads_with_our_context_and_stop_unloads():
    with OllamaStub() as stub:
        with ollama(stub) as b:
            facts = b.facts()
            assert stub.loaded == {TAG: 4096}
        assert stub.loaded == {}
    assert facts["context_tokens"] == facts["context_asked"] == 4096 and facts["load_s"] == .05
    assert facts["quantization"] == "Q4_K_M" and facts["server"] == "ollama 0.0.0-stub" and len(facts["digest"]) == 64
    assert facts["capabilities"] == ["completion", "tools"] and facts["context_trained"] == 131072
    json.dumps(facts)


def test_start_without_a_server_is_one_line():
    with pytest.raises(BackendError, match="No Ollama server at"): backend_for(Model("a", "ollama", "a", base_url="http://127.0.0.1:9")).start()


# --- pre-flight -------------------------------------------------------------------------------------------------------

def test_preflight_finds_out_whether_tools_arrive():
    with OllamaStub() as stub:
        p = ollama(stub).preflight(ONE_TOOL)
        assert p.tools_supported and p.schema_tokens > 0 and p.protocol == "native"
    with OllamaStub(drops_tools=True) as stub:
        p = ollama(stub).preflight()
        assert p.tools_supported is False and "drops tools" in p.why and p.protocol == "prompted"
    with OllamaStub({TAG: {"capabilities": ["completion"]}}) as stub:
        p = ollama(stub).preflight()
        assert p.tools_supported is False and not stub.bodies("/api/chat")
    with OllamaStub({TAG: {"capabilities": None}}) as stub: # an old server that does not list capabilities and refuses
        stub.models[TAG]["capabilities"] = []
        p = ollama(stub).preflight()
        assert p.tools_supported is False and "does not support tools" in p.why


# --- LiteLLM on the wire ----------------------------------------------------------------------------------------------

def test_a_tool_call_and_its_result_through_litellm(litellm):
    with OllamaStub(script=[CALL, {"content": "It is closed.", "thinking": "short"}]) as stub:
        kwargs = ollama(stub).litellm_kwargs(max_tokens=64, timeout_s=20)
        first = litellm.completion(messages=ASK, tools=ONE_TOOL, **kwargs).choices[0]
        assert first.finish_reason == "tool_calls"
        call = first.message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"sensor_id": "SN005"}
        history = ASK+[first.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "closed"}]
        second = litellm.completion(messages=history, tools=ONE_TOOL, **kwargs)
        assert second.choices[0].message.content == "It is closed." and second.choices[0].message.reasoning_content == "short"
        assert second.usage.prompt_tokens > 0
        sent = stub.bodies("/api/chat")
    assert len(sent) == 2 and sent[0]["tools"] == ONE_TOOL
    assert sent[0]["options"] == {"temperature": 0.0, "num_predict": 64, "seed": 11, "num_ctx": 4096}
    assert sent[0]["think"] is False and sent[0]["keep_alive"] == "30m"
    assert sent[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"sensor_id": "SN005"}


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429}, {"status": 400, "error": "does not support tools"}, {"raw": b"not json"}])
def test_litellm_does_not_retry_behind_our_back(litellm, fault):
    with OllamaStub(script=[fault]*4) as stub:
        with pytest.raises(Exception): litellm.completion(messages=ASK, tools=ONE_TOOL, **ollama(stub).litellm_kwargs(timeout_s=20))
        assert len(stub.bodies("/api/chat")) == 1


def test_a_reply_that_never_comes_ends_at_the_timeout(litellm):
    with OllamaStub(script=[{"hang": 5}]) as stub:
        start = time.monotonic()
        with pytest.raises(litellm.Timeout): litellm.completion(messages=ASK, **ollama(stub).litellm_kwargs(timeout_s=1))
        assert time.monotonic()-start < 3 and len(stub.bodies("/api/chat")) == 1


# --- a prompt that was cut --------------------------------------------------------------------------------------------

def test_a_prompt_that_ollama_cut_is_noticed(litellm):
    with OllamaStub() as stub:
        b = backend_for(Model("llama3.2", "ollama", TAG, base_url=stub.url, context_tokens=1000))
        b.preflight(ONE_TOOL)
        watch, messages, seen = b.context_watch(), list(ASK), []
        for _ in range(6):
            r = litellm.completion(messages=messages, tools=ONE_TOOL, **b.litellm_kwargs(timeout_s=20))
            seen.append(watch.truncated(messages, ONE_TOOL, r.usage.prompt_tokens))
            messages += [{"role": "assistant", "content": "x"*900}, {"role": "user", "content": "go on"}]
    assert seen[:4] == [False]*4 and seen[-1], seen


# --- getting models ---------------------------------------------------------------------------------------------------

def test_pull_through_ollama(monkeypatch):
    with OllamaStub() as stub:
        monkeypatch.setenv("OLLAMA_HOST", stub.url)
        stub.pullable["functiongemma:270m"] = {}
        assert "functiongemma is here" in pull("functiongemma", progress=False)
        assert "functiongemma is here" in pull("functiongemma", progress=False)
        assert len(stub.bodies("/api/pull")) == 1
        with pytest.raises(BackendError, match="file does not exist"): pull("gpt-oss", progress=False)
        rows = {r["key"]: r for r in models_table()}
        assert rows["functiongemma"]["here"] == "yes" and rows["gpt-oss"]["here"] == "no"
        assert rows["functiongemma"]["can"] == "tools" and rows["gpt-oss"]["can"] == "asked at pre-flight, thinking"
    assert {r["here"] for r in models_table() if r["source"].startswith("ollama")} == {"no Ollama server"}


# --- OpenAI-compatible servers, and keys ------------------------------------------------------------------------------

class serving:
    "A loopback server that answers every request with what `answer(path, headers)` says"
    def __init__(self, answer): self.answer = answer
    def __enter__(self):
        answer, seen = self.answer, []
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *a): pass
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                seen.append((self.path, dict(self.headers)))
                status, raw = answer(self.path, self.headers)
                self.send_response(status); self.send_header("Content-Length", str(len(raw))); self.end_headers(); self.wfile.write(raw)
            do_POST = do_GET
        self.server, self.seen = ThreadingHTTPServer(("127.0.0.1", 0), Handler), seen
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"
    def __exit__(self, *e): self.server.shutdown(); self.server.server_close()


KEY = "sk-very-secret-0123456789"


def vllm(path, headers):
    if headers.get("Authorization") != f"Bearer {KEY}": return 401, b"{}"
    if path == "/version": return 200, b'{"version": "0.9.1"}'
    if path == "/v1/models": return 200, json.dumps({"data": [{"id": "big", "owned_by": "vllm", "max_model_len": 16384}]}).encode()
    return 200, json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        "id": "x", "object": "chat.completion", "created": 1, "model": "big"}).encode()


def test_the_key_from_the_environment_goes_to_the_server_and_nowhere_else(monkeypatch, litellm):
    with serving(vllm) as url:
        monkeypatch.setenv("GRANITE_OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-this-server")
        assert backend_for("openai/big").check().kind == "refused"
        monkeypatch.setenv("GRANITE_OPENAI_API_KEY", KEY)
        with backend_for("openai/big") as b:
            facts, p = b.facts(), b.preflight()
            reply = litellm.completion(messages=ASK, **b.litellm_kwargs(timeout_s=20))
        assert reply.choices[0].message.content == "hi"
        assert facts["server"] == "vllm 0.9.1" and facts["context_tokens"] == 16384 and p.tools_supported is False
        other = backend_for("openai/small").check()
        assert other.kind == "missing" and "it has big" in other.message
    assert KEY not in repr([b, b.model, facts, b.model.facts(), b.model.api_key])


def test_the_key_from_yaml_stays_secret(tmp_path, monkeypatch, litellm):
    with serving(vllm) as url:
        own = tmp_path/"mine.yaml"
        own.write_text(f"models:\n  lab: {{serve: openai, name: big, base_url: '{url}/v1', api_key: {KEY}, params_b: 8}}\n")
        monkeypatch.setenv("GRANITE_MODELS", str(own))
        with backend_for("lab") as b: assert b.check() is None
        bad = backend_for(Model("lab", "openai", "big", base_url=f"{url}/v1", api_key=models.Secret("sk-wrong-key")))
        with pytest.raises(BackendError) as e: bad.start()
        assert "refuses the key" in str(e.value) and "sk-wrong-key" not in str(e.value)
    assert KEY not in repr(b)+repr(b.model)+json.dumps(b.model.facts(), default=repr)+repr(models_table())


def test_a_missing_key_variable_is_named():
    m = Model("lab", "openai", "big", base_url="http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY_HERE")
    assert "NO_SUCH_KEY_HERE is not set" in backend_for(m).check().message


@pytest.mark.parametrize("text, said", [
    ("models: {a: {serve: opanai, name: x}}", "serve must be one of"), ("models: {a: {serve: openai, name: x}}", "needs `base_url`"),
    ("models: {a: {serve: ollama}}", "needs `name`"), ("models: [a]", "must start with `models:`"), ("models: {a: {serve: [}", "line 1"),
    ("models: {a: {serve: ollama, name: x, context_tokens: big}}", "whole number"), ("models: {a: {serve: ollama, name: x, contxt_tokens: 1}}", "nearest: context_tokens")])
def test_mistakes_in_your_own_file_are_named(tmp_path, text, said):
    own = tmp_path/"mine.yaml"
    own.write_text(text)
    with pytest.raises(ModelError) as e: resolve("a", own)
    assert said in str(e.value) and "mine.yaml" in str(e.value) and "\n" not in str(e.value)


def test_within_passes_errors_on():
    with pytest.raises(KeyError): within(1, lambda: {}["x"])


# --- with a real model ------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_ollamas_path_with_a_real_model(litellm):
    "LiteLLM's ollama_chat, tools, pre-flight and facts, answered by Qwen2.5-Coder-0.5B behind the stub"
    with backend_for("qwen2.5-coder-0.5b", context_tokens=4096) as engine, OllamaStub(through=engine.url) as stub:
        with ollama(stub) as b:
            p = b.preflight(ONE_TOOL)
            assert p.tools_supported and p.schema_tokens > 20
            said = litellm.completion(messages=ASK, tools=ONE_TOOL, **b.litellm_kwargs(max_tokens=64, timeout_s=120))
            exact = engine.count_tokens(ASK, ONE_TOOL)
            assert said.usage.prompt_tokens == exact and not b.context_watch().truncated(ASK, ONE_TOOL, exact)
            message = said.choices[0].message
            assert message.content or message.tool_calls


@pytest.mark.slow
def test_the_embedded_engine_comes_back_after_a_crash():
    with backend_for("smollm2-135m", context_tokens=1024) as b:
        b.engine._process.kill()
        b.engine._process.wait(5)
        with pytest.raises(ModelError, match="is not running"): b.engine.tokenize("x")
        assert b.revive() is None and b.preflight().tools_supported is False


def test_a_server_that_dies_between_check_and_load_is_one_line(deaf, monkeypatch):
    b = backend_for(Model("a", "ollama", "a", base_url=deaf))
    with pytest.raises(BackendError, match="timed out"): b._generate(.5)
    b.model = Model("a", "ollama", "a", base_url="http://127.0.0.1:9")
    with pytest.raises(BackendError): b._generate(.5)
    b.unload() # nothing to raise about
