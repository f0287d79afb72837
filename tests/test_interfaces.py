"""What an agent reads: the same words at every level, unchanged by every library in between, and frozen in a snapshot.

`python tests/test_interfaces.py` renews the snapshot after an intended change."""
import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fastmcp import Client

from granite.agent import Controls, ModelAccess, gold_replies, run_sync, run_trial, scripted_access
from granite.domain import domain_names, load_domain
from granite.level import LEVELS
from granite.scenario import load_scenarios
from granite.server import build_server
from granite.store import digest

SNAPSHOT = Path(__file__).with_name("interfaces.json")
DOORS = [(domain, level) for domain in domain_names() for level in LEVELS]
door = lambda domain, level: LEVELS[level](load_domain(domain))

async def listed(interface) -> dict:
    "What `tools/list` gives: name -> (description, input schema)."
    async with Client(build_server(interface, interface.domain.seed())) as client:
        return {t.name: (t.description, t.input_schema) for t in await client.list_tools()}

def nodes(schema: dict, path: str = ""):
    "Every part of a schema by its path."
    yield path, schema
    for name, part in schema.get("properties", {}).items(): yield from nodes(part, f"{path}.{name}")
    if "items" in schema: yield from nodes(schema["items"], f"{path}[]")

def facts(schema: dict) -> dict:
    "Path -> type, properties, enum, description and required list, at any depth."
    return {path: {"type": s.get("type"), "properties": list(s.get("properties", {})), "enum": s.get("enum"), "description": s.get("description"), "required": s.get("required", [])}
            for path, s in nodes(schema)}

# ---- what the model finally receives

@pytest.fixture(scope="module")
def model_server():
    "A server that keeps the bodies of chat requests and answers that it is done."
    bodies = []
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "stub", "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Done."}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
        def log_message(self, *args): pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    server.shutdown()
    server.server_close()

def received(model_server, interface, protocol="native") -> dict:
    "The body that reaches the model server: through MCP, ADK and LiteLLM, over HTTP."
    url, bodies = model_server
    bodies.clear()
    access = ModelAccess("stub", {"model": "openai/stub", "api_base": url, "api_key": "none", "num_retries": 0}, protocol)
    trial = run_sync(run_trial("0" * 16, load_scenarios(interface.domain)[0], interface, access, Controls(agent_timeout_seconds=120)))
    assert trial.status == "ok" and len(bodies) == 1, trial.error
    return bodies[0]

@pytest.mark.parametrize("domain,level", DOORS)
def test_model_receives_what_the_server_lists(model_server, domain, level):
    interface = door(domain, level)
    given = asyncio.run(listed(interface))
    functions = {t["function"]["name"]: t["function"] for t in received(model_server, interface)["tools"]}
    assert set(functions) == set(given)
    for name, (description, schema) in given.items():
        assert functions[name]["description"] == description
        assert facts(functions[name]["parameters"]) == facts(schema)
        assert functions[name]["parameters"] == schema
        assert not {"anyOf", "oneOf", "$ref", "$defs"} & set(re.findall(r'"([^"]+)":', json.dumps(schema)))
        assert not any("default" in s and s["default"] is None for _, s in nodes(schema))

@pytest.mark.parametrize("level", LEVELS)
def test_prompted_protocol_shows_the_same_tools(model_server, level):
    interface = door(domain_names()[0], level)
    body = received(model_server, interface, "prompted")
    shown = [json.loads(line) for line in body["messages"][0]["content"].splitlines() if line.startswith("{") and '"parameters"' in line]
    assert {f["name"]: (f["description"], f["parameters"]) for f in shown} == asyncio.run(listed(interface))
    assert not body.get("tools")

# ---- the same words at every level

@pytest.mark.parametrize("domain,level", DOORS)
def test_sentences_word_for_word(domain, level):
    given = asyncio.run(listed(door(domain, level)))
    for tool in door(domain, level).tools.values():
        description, schema = given[tool.name]
        for operation in tool.operations:
            shown = re.findall(rf"(?:^|(?<=\s)){re.escape(operation.sentence)}(?=\s|$)", description)
            assert len(shown) == 1, f"{tool.name}: the sentence of {operation.name} is not shown as it is, once"
            for name, argument in operation.schema["properties"].items():
                assert schema["properties"][name] == argument, f"{tool.name}: argument {name} differs from {operation.name}"
        if not tool.single: assert schema["properties"]["action"]["enum"] == [op.name for op in tool.operations]
        always = {n for n in schema["required"] if n != "action"}
        assert always == set.intersection(*(set(op.schema["required"]) for op in tool.operations))

@pytest.mark.parametrize("domain", domain_names())
def test_one_argument_one_meaning(domain):
    seen = {}
    for level in LEVELS:
        for _, schema in asyncio.run(listed(door(domain, level))).values():
            for name, argument in schema["properties"].items():
                if name != "action": assert seen.setdefault(name, argument) == argument, f"{level}: {name}"

@pytest.mark.parametrize("domain", domain_names())
def test_l1_holds_what_l2_holds(domain):
    operations = lambda level: {op.name for t in door(domain, level).tools.values() for op in t.operations}
    assert operations("L1") == operations("L2") >= operations("L4")
    assert [len(door(domain, level).tools) for level in ("L3", "L2", "L1")] == [4, 2, 1] and len(door(domain, "L4").tools) in (8, 9, 10)

# ---- frozen

def as_they_are() -> dict:
    "domain/level -> digest of the interface, and of each tool."
    out = {}
    for domain, level in DOORS:
        interface = door(domain, level)
        out[f"{domain}/{level}"] = {"digest": interface.digest, "tools": {t["name"]: digest(t) for t in interface.listing()}}
    return out

def changed(known: dict, now: dict) -> list[str]:
    "One line for each interface that is not as in the snapshot."
    lines = []
    for place in sorted({*known, *now}):
        old, new = known.get(place), now.get(place)
        if old == new: continue
        tools = [] if None in (old, new) else [t for t in {**old["tools"], **new["tools"]} if old["tools"].get(t) != new["tools"].get(t)]
        lines.append(f"{place}: " + ("is new" if old is None else "is gone" if new is None else f"{old['digest']} -> {new['digest']}, tools {', '.join(tools) or 'in another order'}"))
    return lines

def test_snapshot():
    lines = changed(json.loads(SNAPSHOT.read_text()), as_they_are())
    assert not lines, "\n".join(["what agents read has changed; runs from before and after do not combine. If it is meant: python tests/test_interfaces.py", *lines])

def test_snapshot_notices_one_word():
    now, place = as_they_are(), "/".join(DOORS[0])
    tool = next(iter(now[place]["tools"]))
    now[place] = {"digest": "0" * 16, "tools": now[place]["tools"] | {tool: "1" * 16}}
    (line,) = changed(as_they_are(), now)
    assert line.startswith(f"{place}: ") and line.endswith(f"tools {tool}")

# ---- requests

@pytest.mark.parametrize("domain", domain_names())
def test_requests_name_no_tool_operation_or_level(domain):
    world = load_domain(domain)
    names = {*LEVELS, *world.operations, *(t for level in LEVELS for t in door(domain, level).tools)}
    for scenario in load_scenarios(world):
        found = [n for n in names if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", scenario.user_prompt, re.I)]
        assert not found, f"{scenario.id}: the request says {', '.join(found)}"

# ---- transports

TIMES = {"started_at", "started_mono", "wall_s", "start_s", "latency_s"}

def timeless(value):
    "A trace without its times."
    if isinstance(value, dict): return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value

def trace(scenario, interface, replies, transport) -> dict:
    import msgspec
    controls = Controls(transport=transport, agent_timeout_seconds=180, tool_timeout_seconds=90)
    return timeless(msgspec.to_builtins(run_sync(run_trial("0" * 16, scenario, interface, scripted_access(replies), controls))))

def mistaken(scenario, level) -> list[dict]:
    "The gold standard with every kind of mistake before it."
    first = scenario.gold(level)[0]
    wrong = [("no_such_tool", {}), (first.tool, first.arguments | {"colour": "blue"}), (first.tool, "[1, 2]"), (first.tool, {k: 7 if k != "action" else v for k, v in first.arguments.items()})]
    return [{"tool_calls": [call]} for call in wrong] + gold_replies(scenario, level)

@pytest.mark.parametrize("domain,level", [("smarthome", "L1"), ("smarthome", "L4"), ("warehouse", "L3"), ("healthcare", "L2")])
def test_transports_leave_the_same_trace(domain, level):
    if domain not in domain_names(): pytest.skip(f"no {domain}")
    scenario = next(s for s in load_scenarios(domain) if s.difficulty == "medium")
    memory, stdio, http = (trace(scenario, door(domain, level), mistaken(scenario, level), t) for t in ("memory", "stdio", "http"))
    assert memory["status"] == "ok" and memory["end_state"] is not None and sum(c["is_error"] for c in memory["tool_calls"]) >= 3, memory["error"]
    assert stdio == memory
    assert http == memory

if __name__ == "__main__":
    for line in changed(json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}, as_they_are()): print(line)
    SNAPSHOT.write_text(json.dumps(as_they_are(), indent=1) + "\n")
