"""The MCP server in a client that we did not write: the Inspector's command line, from npm, over stdio and HTTP.

A place is a transport, a domain and a level: 24 of them. One takes two requests, each with processes of its own, 4 to 6 seconds
together. So twelve places run always: each of the three domains at each level once, by turns over stdio and HTTP, which brings
every domain and every level through both. The other twelve, the same interfaces over the other transport, are marked slow."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from granite.domain import load_domain
from granite.level import LEVELS
from granite.scenario import load_scenarios
from granite.store import plain

# Asks npm for Node 22.7.5; its command line, all that is used here, also ran on the Node 20.20 it was tried on. 2.x asks for 22.19 and was not tried.
INSPECTOR = "@modelcontextprotocol/inspector@1.0.3"
DOMAINS = ["smarthome", "warehouse", "healthcare"]  # one of each area
PLACES = [(domain, level) for domain in DOMAINS for level in LEVELS]
SERVE = [sys.executable, "-m", "granite.cli", "serve"]

@pytest.fixture(scope="session")
def inspector():
    "The Inspector's program, installed once into the user's cache and never into the repository."
    node, npm = shutil.which("node"), shutil.which("npm")
    if not (node and npm): pytest.skip("node and npm are not on this machine, and the Inspector needs both")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < 20: pytest.skip(f"the Inspector needs Node 20 or newer; this is {version}")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "granite" / INSPECTOR.replace("/", "-").strip("@")
    program, ready = folder / "node_modules" / ".bin" / "mcp-inspector", folder / "ready"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent", INSPECTOR], capture_output=True, text=True, timeout=600)
        if done.returncode: pytest.skip(f"npm could not install {INSPECTOR}: {(done.stderr or done.stdout).strip()[-200:]}")
        ready.touch()
    return [node, str(program), "--cli"]

def ask(inspector, target, method, *options):
    "What the Inspector prints for one request."
    done = subprocess.run([*inspector, *target, "--method", method, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

@contextmanager
def http_server(domain, level):
    "`granite serve` over HTTP, and its address."
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    process = subprocess.Popen([*SERVE, domain, level, "--transport", "http", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try: socket.create_connection(("127.0.0.1", port), 1).close(); break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(20)

def first_call(domain, level):
    "The first gold call of the domain's first scenario."
    return load_scenarios(load_domain(domain))[0].gold(level)[0]

def both(inspector, target, transport, domain, level):
    "The tools that the Inspector lists, and the result of a gold call."
    call = first_call(domain, level)
    options = ["--transport", transport] if transport == "http" else []
    arguments = [part for name, value in call.arguments.items() for part in ("--tool-arg", f"{name}={json.dumps(value)}")]
    listed = ask(inspector, target, "tools/list", *options)["tools"]
    return listed, ask(inspector, target, "tools/call", *options, "--tool-name", call.tool, *arguments)

TRANSPORTS = ("stdio", "http")
QUICK = [(TRANSPORTS[(row + column) % 2], domain, level) for row, domain in enumerate(DOMAINS) for column, level in enumerate(LEVELS)]
REST = [(transport, *place) for transport in TRANSPORTS for place in PLACES if (transport, *place) not in QUICK]

@pytest.mark.parametrize("transport,domain,level", [*QUICK, *(pytest.param(*key, marks=pytest.mark.slow) for key in REST)])
def test_inspector_lists_and_calls(inspector, transport, domain, level):
    if transport == "stdio": listed, called = both(inspector, [*SERVE, domain, level], transport, domain, level)
    else:
        with http_server(domain, level) as address: listed, called = both(inspector, [address], transport, domain, level)
    interface = LEVELS[level](load_domain(domain))
    assert [(t["name"], t["description"], t["inputSchema"]) for t in listed] == [(t["name"], t["description"], t["input_schema"]) for t in interface.listing()]
    call = first_call(domain, level)
    wanted = plain(interface.call(interface.domain.seed(), call.tool, call.arguments))
    assert not called.get("isError") and json.loads(called["content"][0]["text"]) == json.loads(json.dumps(wanted))

def test_inspector_shows_a_refusal(inspector):
    refused = ask(inspector, [*SERVE, "smarthome", "L1"], "tools/call", "--tool-name", "smarthome", "--tool-arg", 'action="fly"')
    assert refused["isError"] and refused["content"][0]["text"].startswith("Invalid arguments: action: expected one of ")
