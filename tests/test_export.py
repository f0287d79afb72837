"""A run as a log of Inspect, read back with Inspect's own API.

inspect-ai pins fsspec and botocore, so it does not fit into the environment that constraints.txt describes. Where it is
installed it is used; otherwise GRANITE_INSPECT_PYTHON may name the Python of an environment that has `granite[inspect]`."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
print(json.dumps([log.status, log.eval.model, {s.name: s.metrics["mean"].value for s in log.results.scores}, [
    {"id": s.id, "epoch": s.epoch, "scores": {k: v.value for k, v in s.scores.items()}, "metadata": s.metadata, "limit": s.limit and s.limit.type, "error": s.error and s.error.message,
     "calls": [[c.function, c.arguments] for m in s.messages if m.role == "assistant" for c in m.tool_calls or []],
     "results": [[m.tool_call_id, m.text, m.error and m.error.message] for m in s.messages if m.role == "tool"],
     "ids": [c.id for m in s.messages if m.role == "assistant" for c in m.tool_calls or []]} for s in log.samples]]))
"""
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
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
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
