"""Servers that misbehave, for tests: an OpenAI-compatible one, and an MCP one over stdio.

    with ModelServer([{"status": 500}, {"content": "done"}]) as s: ...      # s.url, s.bodies, s.times
    python tests/misbehaving.py model PAUSE_S          # plays the gold standard of every request; prints its URL
    python tests/misbehaving.py tools DOMAIN LEVEL die # a tool server over stdio whose calls go wrong

A script is a list (the last entry repeats) or a function of (body, number). An entry is a message
(`content`, `reasoning_content`, `tool_calls` as (name, arguments), `finish_reason`) or a fault: `{"status": 500, "error": text, "headers": {}}`,
`{"hang": seconds}`, `{"cut": True}` (half a reply, then the connection closes) or `{"raw": bytes}`.
Requests for a single token (warm-up, pre-flight) are always answered well and are not part of the script.
"""
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


class ModelServer:
    def __init__(self, script, model="toy"):
        self.script, self.model, self.bodies, self.times, self._lock = script, model, [], [], threading.Lock()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"owner": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.key = f"openai/{self.model}@{self.url}"
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def entry(self, body):
        if body.get("max_tokens") == 1: return {"content": "x"}
        with self._lock:
            self.bodies.append(body); self.times.append(time.monotonic())
            n = len(self.bodies) - 1
        return self.script(body, n) if callable(self.script) else self.script[min(n, len(self.script) - 1)]


def gold(body, n=0):
    "The next call of the gold standard, for any request of our scenarios."
    from granite.domain import domain_names
    from granite.scenario import load_scenarios
    if not gold.known: gold.known.update((s.user_prompt, s) for d in domain_names() for s in load_scenarios(d))
    scenario = gold.known[next(m["content"] for m in body["messages"] if m["role"] == "user")]
    names = {t["function"]["name"] for t in body["tools"]}
    calls = next(g for g in scenario.gold_standard.values() if {c.tool for c in g} <= names)
    said = sum(m["role"] == "assistant" for m in body["messages"])
    return {"content": "Done. " + ", ".join(scenario.objective.answer)} if said >= len(calls) else {"tool_calls": [(calls[said].tool, calls[said].arguments)]}


gold.known = {}


def completion(entry, body):
    "A reply as OpenAI words it."
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": a if isinstance(a, str) or a is None else json.dumps(a)}} for i, (name, a) in enumerate(entry.get("tool_calls", []))]
    message = {"role": "assistant", "content": entry.get("content")} | {k: entry[k] for k in ("reasoning_content",) if k in entry} | ({"tool_calls": calls} if calls else {})
    tokens = len(json.dumps([body["messages"], body.get("tools") or []])) // 4
    return {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "usage": {"prompt_tokens": tokens, "completion_tokens": 7, "total_tokens": tokens + 7},
            "choices": [{"index": 0, "finish_reason": entry.get("finish_reason", "tool_calls" if calls else "stop"), "message": message}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize, disable_nagle_algorithm = "HTTP/1.1", -1, True
    def log_message(self, *a): pass

    def send(self, raw, status=200, headers=(), length=None):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(length or len(raw)), **dict(headers)}.items(): self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)
        self.wfile.flush()

    def do_GET(self): self.send(json.dumps({"data": [{"id": self.owner.model, "max_model_len": 8192}]}).encode() if self.path.endswith("/models") else b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = self.owner.entry(body)
        if "hang" in entry: time.sleep(entry["hang"])
        elif "status" in entry: self.send(json.dumps({"error": {"message": entry.get("error", "something is wrong"), "type": "error"}}).encode(), entry["status"], entry.get("headers", {}))
        elif "raw" in entry: self.send(entry["raw"])
        elif "cut" in entry:
            raw = json.dumps(completion({"content": "half a reply " * 20}, body)).encode()
            self.send(raw[:len(raw) // 2], length=len(raw))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else: self.send(json.dumps(completion(entry, body)).encode())


def serve_tools(domain, level, fault):
    "The interface as it should be, but the first call goes wrong."
    from granite.domain import load_domain
    from granite.level import load_level
    from granite.server import InterfaceTool, serve
    if fault == "nostart": sys.exit("no such device")
    if fault == "deaf": time.sleep(600)
    wire, well = os.dup(1), InterfaceTool.run # the server library moves stdout aside; a careless one would not
    async def run(self, arguments):
        import asyncio
        if fault == "hang": await asyncio.sleep(600)
        if fault == "die": os._exit(3)
        if fault == "print": os.write(wire, b"debug: a line that is not JSON-RPC\n")
        result = await well(self, arguments)
        if fault == "big": result.content[0].text = json.dumps({"log": "x" * 2_000_000})
        return result
    InterfaceTool.run = run
    interface = load_level(level)(load_domain(domain))
    if fault == "fewer": interface.tools.pop(next(iter(interface.tools)))
    serve(interface)


if __name__ == "__main__":
    if sys.argv[1] == "tools": serve_tools(*sys.argv[2:5])
    else:
        def slowly(body, n): time.sleep(float(sys.argv[2])); return gold(body)
        with ModelServer(slowly) as server:
            print(server.url, flush=True)
            sys.stdin.read() # until whoever started it is gone
