"""A run as a log of Inspect, read back with Inspect's own API.

inspect-ai pins fsspec and botocore, so it does not fit into the environment that constraints.txt describes. Where it is
installed it is used; otherwise GRANITE_INSPECT_PYTHON may name the Python of an environment that has it (`.ci/run` makes one)."""

import csv
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_site import CHROMIUM, HERE, WORK, node_modules

from granite.domain import load_domain
from granite.experiment import check_experiment
from granite.export import export_tables
from granite.records import Run
from granite.scenario import load_scenarios
from granite.sweep import ScriptedBackend, gold_model, run_model

READ_BACK = """
import json, sys
from granite.export import export_inspect
from granite.records import Run
from inspect_ai.log import list_eval_logs, read_eval_log
run, out = sys.argv[1:]
file = export_inspect(Run(run), out)
assert len(list_eval_logs(out)) == 1
log = read_eval_log(str(file))
assert log.eval.viewer.trust_content is False # the viewer shows plain text
print(json.dumps([log.status, log.eval.model, {s.name: s.metrics["mean"].value for s in log.results.scores}, [
    {"id": s.id, "epoch": s.epoch, "scores": {k: v.value for k, v in s.scores.items()}, "metadata": s.metadata, "limit": s.limit and s.limit.type, "error": s.error and s.error.message,
     "calls": [[c.function, c.arguments] for m in s.messages if m.role == "assistant" for c in m.tool_calls or []],
     "results": [[m.tool_call_id, m.text, m.error and m.error.message] for m in s.messages if m.role == "tool"],
     "ids": [c.id for m in s.messages if m.role == "assistant" for c in m.tool_calls or []]} for s in log.samples]]))
"""
WRITE = """
import sys
from granite.export import export_inspect
from granite.records import Run
print(export_inspect(Run(sys.argv[1]), sys.argv[2]).name)
"""
ROOT = Path(__file__).parents[1]
README = ROOT / "runs/readme/smarthome-qwen2.5-coder-1.5b"
NASTY = "<script>alert(1)</script>\u202e\x1b[31m"

@pytest.fixture(scope="module")
def inspect_python():
    "A Python that has inspect-ai."
    if importlib.util.find_spec("inspect_ai"): return sys.executable
    if other := os.environ.get("GRANITE_INSPECT_PYTHON"): return other
    pytest.skip("inspect-ai is not installed here and GRANITE_INSPECT_PYTHON does not name an environment that has granite[inspect]")

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A scripted run, and beside its trials a timeout, an error and a bad call with a nasty result."
    path = tmp_path_factory.mktemp("runs") / "scripted"
    options = {"models": ["scripted"], "domains": ["smarthome"], "granularities": ["L4", "L1"], "scenarios": ["smarthome-001"], "meters": "off"}
    run_model(check_experiment(options), "scripted", path, backend=ScriptedBackend(gold_model(load_scenarios(load_domain("smarthome")))))
    trial = json.loads(Run(path).lines()[0])
    bad = {**trial["tool_calls"][0], "kind": "operation_error", "is_error": True, "result": NASTY}
    changes = [{"status": "timeout"}, {"status": "error", "error": {"kind": "runtime", "message": "it broke"}}, {"tool_calls": [bad, *trial["tool_calls"][1:]]},
               {"status": "infra", "error": {"kind": "infra", "message": "server gone"}, "model_calls": [], "tool_calls": []}]
    with Run(path).open() as run:
        for n, change in enumerate(changes, 1):
            other = {**trial, "repetition": n, "key": f"{n:016x}", **change}
            run.add_plan({("scripted", "smarthome", "L4", "smarthome-001", n): other["key"]})
            run.append(other)
    return Run(path)

def test_csv_holds_no_formula(run, tmp_path):
    trial = json.loads(run.lines()[0])
    bad = {**trial["tool_calls"][0], "name": "=HYPERLINK(0)", "kind": "unknown_tool", "is_error": True, "result": "-2+3", "arguments": {}}
    with Run(tmp_path / "odd").open() as odd: odd.append({**trial, "tool_calls": [bad]})
    written = [row for file in export_tables(odd, tmp_path, "csv") for row in csv.DictReader(file.read_text().splitlines())]
    call = next(row for row in written if "arguments" in row)
    assert (call["name"], call["result"]) == ("'=HYPERLINK(0)", "'-2+3") and float(call["latency_s"]) == bad["latency_s"]
    assert not [cell for row in written for cell in row.values() if cell[:1] in tuple("=+-@\t\r\n") and cell]

def test_inspect_reads_it_back(run, inspect_python, tmp_path):
    done = subprocess.run([inspect_python, "-c", READ_BACK, str(run.path), str(tmp_path / "logs")], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    status, model, means, samples = json.loads(done.stdout.splitlines()[-1])
    trials = run.trials()
    assert (status, model, len(samples)) == ("success", "scripted", len(trials) == 6 and 6)
    by_place = {(s["id"], s["epoch"]): s for s in samples}
    for trial in trials:
        s = by_place[f"{trial.scenario} {trial.level}", trial.repetition + 1]
        assert s["calls"] == [[c.name, c.arguments] for c in trial.tool_calls]
        assert [r[0] for r in s["results"]] == s["ids"] and len(set(s["ids"])) == len(s["ids"])
        assert [r[1] for r in s["results"]] == [c.result for c in trial.tool_calls]
        assert (s["metadata"]["domain"], s["metadata"]["level"], s["metadata"]["scenario"]) == (trial.domain, trial.level, trial.scenario)
    at = lambda n: by_place["smarthome-001 L4", n + 1]
    assert at(0)["scores"] == {"TC": 1, "F1": 1, "ArgAcc": 1} and at(0)["error"] is None
    assert at(1)["limit"] == "time" and at(2)["error"] == "runtime: it broke"
    assert at(3)["results"][0][2] == f"operation_error: {NASTY}" and at(3)["metadata"]["bad_operation"] == 1
    assert at(4)["scores"] == {} and at(4)["error"] == "infra: server gone"
    assert set(means) == {"TC", "F1", "ArgAcc"}

@pytest.fixture
def viewer(inspect_python, run, tmp_path):
    "Inspect's viewer on loopback over two logs, the README's run and the scripted one: look(log, sample, epoch) -> what the page says."
    if not CHROMIUM: pytest.skip("no chromium on this machine")
    modules, shots = node_modules(), WORK / "shots"
    shots.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    write = lambda path: subprocess.run([inspect_python, "-c", WRITE, str(path), str(tmp_path)], capture_output=True, text=True, check=True, env=environment, timeout=300).stdout.split()[-1]
    logs = {"readme": write(README), "scripted": write(run.path)}
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    server = subprocess.Popen([Path(inspect_python).with_name("inspect"), "view", "start", "--log-dir", tmp_path, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def look(log, sample, epoch):
        done = subprocess.run(["node", HERE / "viewer.mjs", f"http://127.0.0.1:{port}", CHROMIUM, modules, shots / f"inspect-{log}.png", logs[log], sample, str(epoch)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)
    try:
        deadline = time.monotonic() + 120
        while True:
            try: socket.create_connection(("127.0.0.1", port), 1).close(); break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the viewer did not start"
                time.sleep(0.3)
        yield look
    finally:
        server.terminate()
        server.wait(20)

@pytest.mark.slow
def test_the_viewer_shows_a_tool_call(viewer):
    trial = next(t for t in Run(README).trials() if any(c.kind == "ok" for c in t.tool_calls))
    call = next(c for c in trial.tool_calls if c.kind == "ok")
    page = viewer("readme", f"{trial.scenario} {trial.level}", trial.repetition + 1)
    assert not page["errors"] and trial.request in page["text"] and call.name in page["text"]
    for name, value in call.arguments.items(): assert f"{name}: {json.dumps(value)}" in page["text"], (name, page["text"])
    for name, value in json.loads(call.result).items(): assert f"{name}:\n{value}" in page["text"], (name, page["text"])

@pytest.mark.slow
def test_the_viewer_runs_nothing_that_a_tool_wrote(viewer):
    page = viewer("scripted", "smarthome-001 L4", 4)
    assert not page["errors"] and "alert(1)" not in page["scripts"] and "<script>alert(1)</script>" in page["text"], page
