"""A small server that speaks Ollama's wire format (docs/api.md of ollama/ollama), for tests.

It answers chats from a script, or hands them to an OpenAI-compatible server such as the embedded engine.
A script entry is a message (`{"content": ..., "tool_calls": ..., "thinking": ...}`), a fault (`{"status": 500, "error": ...}`,
`{"hang": seconds}`, `{"raw": bytes}`), or a function of the request's body that returns one of these.
"""
import hashlib
import json
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

SHOWN = {"capabilities": ["completion", "tools"], "parameter_size": "3.2B", "quantization_level": "Q4_K_M", "family": "llama",
    "context_length": 131072, "template": "{{ .System }}{{ .Tools }}{{ .Prompt }}", "size": 2_000_000_000}


class OllamaStub:
    "`with OllamaStub({'llama3.2:3b': {}}) as s:` s.url, s.requests; `models` says what each tag is, see SHOWN"

    def __init__(self, models=None, script=None, through=None, drops_tools=False, load_s=.05):
        self.models = {tag: SHOWN | more for tag, more in (models or {"llama3.2:3b": {}}).items()}
        self.script, self.through, self.drops_tools, self.load_s = list(script or []), through, drops_tools, load_s
        self.requests, self.loaded, self.pullable = [], {}, {}

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"stub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def bodies(self, path):
        "What was posted to a path, in order"
        return [body for at, body in self.requests if at == path]

    def load(self, body):
        "Seconds of loading: only where the model is not there with this context"
        context = (body.get("options") or {}).get("num_ctx", 4096)
        if self.loaded.get(body["model"]) == context: return 0.
        self.loaded[body["model"]] = context
        time.sleep(self.load_s)
        return self.load_s

    def count(self, body, messages):
        text = json.dumps(messages) + ("" if self.drops_tools else json.dumps(body.get("tools") or ""))
        return len(text)//4

    def fit(self, body):
        "What Ollama does with a prompt that is too long: the oldest messages go, the system prompt and the last one stay"
        messages, limit = list(body["messages"]), self.loaded[body["model"]]
        while self.count(body, messages) > limit and len(messages) > 1:
            oldest = next((i for i, m in enumerate(messages[:-1]) if m["role"] != "system"), 0)
            del messages[oldest]
        return messages, min(self.count(body, messages), limit)

    def reply(self, body):
        "The chat reply: a message, or a fault"
        load_s = self.load(body)
        messages, prompt_tokens = self.fit(body)
        if self.through: message, usage, reason = self.pass_on(body, messages)
        else:
            entry = self.script.pop(0) if self.script else {"content": "done"}
            message, usage, reason = entry(body) if callable(entry) else dict(entry), {}, "stop"
        if {"status", "hang", "raw"} & set(message): return message
        return {"model": body["model"], "created_at": now(), "message": {"role": "assistant", "content": ""} | message, "done": True, "done_reason": reason,
            "total_duration": int((load_s+.01)*1e9), "load_duration": int(load_s*1e9), "prompt_eval_count": usage.get("prompt_tokens", prompt_tokens),
            "prompt_eval_duration": 1_000_000, "eval_count": usage.get("completion_tokens", 7), "eval_duration": 5_000_000}

    def pass_on(self, body, messages):
        "The same request, answered by an OpenAI-compatible server"
        options = body.get("options") or {}
        sent = {"model": "any", "messages": openai_messages(messages), "temperature": options.get("temperature", .8), "max_tokens": options.get("num_predict", 256)}
        if "seed" in options: sent["seed"] = options["seed"]
        if body.get("tools"): sent["tools"] = body["tools"]
        said = httpx.post(f"{self.through}/chat/completions", json=sent, timeout=300).raise_for_status().json()
        choice, message = said["choices"][0], {"content": said["choices"][0]["message"].get("content") or ""}
        calls = choice["message"].get("tool_calls") or []
        if calls: message["tool_calls"] = [{"function": {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}} for c in calls]
        return message, said["usage"], "length" if choice["finish_reason"] == "length" else "stop"


def now(): return datetime.now(timezone.utc).isoformat()


def openai_messages(messages):
    "Ollama's messages as OpenAI's: arguments as text, calls and results joined by an id"
    out, last = [], []
    for n, m in enumerate(messages):
        m = {k: m[k] for k in ("role", "content", "tool_calls") if k in m}
        if m.get("tool_calls"):
            last = [f"call_{n}_{i}" for i, _ in enumerate(m["tool_calls"])]
            m["tool_calls"] = [{"id": id, "type": "function", "function": {"name": c["function"]["name"], "arguments": json.dumps(c["function"]["arguments"])}}
                for id, c in zip(last, m["tool_calls"])]
        if m["role"] == "tool": m["tool_call_id"] = last.pop(0) if last else f"call_{n}"
        out.append(m)
    return out


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass

    def send(self, data, status=200, kind="application/json"):
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def described(self, tag):
        m = self.stub.models[tag]
        return {"name": tag, "model": tag, "modified_at": now(), "size": m["size"], "digest": hashlib.sha256(tag.encode()).hexdigest(),
            "details": {"format": "gguf", "family": m["family"], "families": [m["family"]], "parameter_size": m["parameter_size"], "quantization_level": m["quantization_level"]}}

    def do_GET(self):
        self.stub.requests.append((self.path, None))
        if self.path == "/": return self.send(b"Ollama is running", kind="text/plain")
        if self.path == "/api/version": return self.send({"version": "0.0.0-stub"})
        if self.path == "/api/tags": return self.send({"models": [self.described(t) for t in self.stub.models]})
        if self.path == "/api/ps":
            return self.send({"models": [self.described(t) | {"expires_at": now(), "size_vram": 0, "context_length": c} for t, c in self.stub.loaded.items()]})
        self.send({"error": "not found"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.stub.requests.append((self.path, body))
        answer = {"/api/show": self.show, "/api/generate": self.generate, "/api/chat": self.chat, "/api/pull": self.pull}.get(self.path)
        if answer is None: return self.send({"error": "not found"}, 404)
        if self.path != "/api/pull" and body.get("model") not in self.stub.models: return self.send({"error": f"model '{body.get('model')}' not found"}, 404)
        answer(body)

    def show(self, body):
        m = self.stub.models[body["model"]]
        self.send({"modelfile": "", "parameters": "", "template": m["template"], "details": self.described(body["model"])["details"], "capabilities": m["capabilities"],
            "model_info": {"general.architecture": m["family"], "general.parameter_count": 3_212_749_888, f"{m['family']}.context_length": m["context_length"]}})

    def generate(self, body):
        if body.get("keep_alive") == 0:
            self.stub.loaded.pop(body["model"], None)
            return self.send({"model": body["model"], "created_at": now(), "response": "", "done": True, "done_reason": "unload"})
        self.send({"model": body["model"], "created_at": now(), "response": "", "done": True, "done_reason": "load", "load_duration": int(self.stub.load(body)*1e9)})

    def chat(self, body):
        if body.get("tools") and "tools" not in self.stub.models[body["model"]]["capabilities"]:
            return self.send({"error": f"{body['model']} does not support tools"}, 400)
        said = self.stub.reply(body)
        if "hang" in said: time.sleep(said["hang"]); self.close_connection = True; return
        if "raw" in said: return self.send(said["raw"])
        if "status" in said: return self.send({"error": said.get("error", "planned")}, said["status"])
        if body.get("stream", True): return self.send(json.dumps(said).encode()+b"\n", kind="application/x-ndjson")
        self.send(said)

    def pull(self, body):
        tag = body["model"]
        if tag not in self.stub.pullable: return self.send(b'{"error":"pull model manifest: file does not exist"}\n', kind="application/x-ndjson")
        self.stub.models[tag] = SHOWN | self.stub.pullable[tag]
        steps = [{"status": "pulling manifest"}] + [{"status": "pulling aa", "digest": "sha256:aabbccddeeff00", "total": 1000, "completed": n} for n in (0, 500, 1000)]
        self.send(b"".join(json.dumps(s).encode()+b"\n" for s in steps+[{"status": "success"}]), kind="application/x-ndjson")
