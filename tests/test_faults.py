"""What happens to a trial and to a sweep when model servers, models, tool servers, disks and people misbehave."""
import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from granite.agent import MARK, Controls, ModelAccess, end_server, run_sync, run_trial
from granite.domain import load_domain
from granite.experiment import check_experiment
from granite.level import LEVELS
from granite.records import DiskError, Run, RunBusy
from granite.scenario import load_scenarios
from granite.sweep import Sweep, SweepStopped, gold_model, run_model
from misbehaving import ModelServer, gold

HERE = Path(__file__).parent
HOME = load_domain("smarthome")
FIRST = next(s for s in load_scenarios(HOME) if s.id == "smarthome-001")
L3 = LEVELS["L3"](HOME)
TOOLS = sorted(L3.tools)
BOOM = {"status": 500, "error": "out of memory"}
LIST = ("home_status", {"action": "list_rules"})


def access(url, timeout_s=20.0):
    return ModelAccess("toy", {"model": "openai/toy", "api_base": url, "api_key": "none", "timeout": timeout_s, "num_retries": 0, "max_tokens": 64})


def play(script, controls=Controls(), timeout_s=20.0):
    "One trial of smarthome-001 at L3 against a server with that script; the trial and the server."
    with ModelServer(script) as server:
        return run_sync(run_trial("0" * 16, FIRST, L3, access(server.url, timeout_s), controls)), server


def experiment(models, tmp_path, **more):
    return check_experiment({"models": models, "domains": ["smarthome"], "granularities": ["L3"], "scenarios": ["smarthome-001", "smarthome-002", "smarthome-003"],
                             "meters": "off", "max_tokens": 64, "out": str(tmp_path / "runs"), "agent_timeout_seconds": 20} | more)


@pytest.fixture
def no_pause(monkeypatch):
    async def pause(seconds): pass
    monkeypatch.setattr("granite.sweep.pause_after", lambda trial, attempt: 0.0)


def outcomes(run): return [(t.scenario[-3:], t.attempt, t.status) for t in run.every_trial()]


# --- one trial: the model's server ------------------------------------------------------------------------------------

@pytest.mark.parametrize("fault, status, kind, says", [
    (BOOM, "infra", "infra", "out of memory"),
    ({"status": 503, "error": "loading model"}, "infra", "infra", "loading model"),
    ({"status": 429, "error": "slow down", "headers": {"Retry-After": "7"}}, "infra", "infra", "slow down"),
    ({"status": 401, "error": "bad key"}, "infra", "infra", "bad key"),
    ({"status": 404, "error": "model not found"}, "infra", "infra", "not found"),
    ({"status": 400, "error": "registry.ollama.ai/library/toy does not support tools"}, "error", "no_tool_support", "does not support tools"),
    ({"status": 400, "error": "the request exceeds the available context size, try increasing it"}, "error", "context", "context size"),
    ({"status": 400, "error": "maximum context length is 8192 tokens"}, "error", "context", "context length"),
    ({"status": 400, "error": "unknown field"}, "error", "runtime", "unknown field"),
    ({"hang": 5}, "timeout", "timeout", "agent_timeout_seconds"),
    ({"cut": True}, "infra", "infra", ""),
    ({"raw": b"<html>Bad Gateway</html>"}, "infra", "infra", ""),
    ({"raw": b""}, "infra", "infra", ""),
    ({"raw": b"{}"}, "infra", "infra", ""),
    ({"raw": b'{"choices": []}'}, "infra", "infra", ""),
    ({"raw": b'{"choices": null, "error": "cuda"}'}, "infra", "infra", ""),
], ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_a_fault_of_the_model_server(fault, status, kind, says):
    timeout_s = 1.0 if "hang" in fault else 20.0
    trial, server = play([{"tool_calls": [LIST]}, fault], timeout_s=timeout_s)
    assert (trial.status, trial.error.kind) == (status, kind), trial.error
    assert says in trial.error.message and "\n" not in trial.error.message
    assert len(server.bodies) == 2, "asked again behind our back"
    assert [c.kind for c in trial.tool_calls] == ["ok"] and trial.model_calls[-1].error or says == ""
    assert trial.end_state == {"changed": {}}
    if "headers" in fault: assert "retry after 7 s" in trial.model_calls[-1].error


def test_connection_refused():
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    trial = run_sync(run_trial("0" * 16, FIRST, L3, access(f"http://127.0.0.1:{port}/v1"), Controls()))
    assert (trial.status, trial.error.kind) == ("infra", "infra") and trial.model_calls[0].error


# --- one trial: what the model says -----------------------------------------------------------------------------------

def test_an_empty_reply_and_one_that_is_only_thinking():
    trial, _ = play([{"content": ""}])
    assert (trial.status, trial.answer, trial.tool_calls) == ("ok", "", [])
    trial, _ = play([{"content": None}])
    assert (trial.status, trial.answer) == ("ok", "")
    trial, server = play([{"content": "", "reasoning_content": "Which room is it?"}])
    assert (trial.status, trial.answer, trial.model_calls[0].thinking) == ("ok", "", "Which room is it?") and len(server.bodies) == 1
    trial, _ = play([{"content": "<think>Hm.</think>"}])
    assert trial.tool_calls == [] and trial.status == "ok"


@pytest.mark.parametrize("name, arguments, kind, repaired", [
    ("home_status", "{action: list_rules", "parse", False), ("home_status", '["list_rules"]', "parse", False), ("home_status", "7", "parse", False), ("home_status", "null", "parse", False),
    ("home_status", "{'action': 'list_rules'}", "ok", True), ("home_status", '```json\n{"action": "list_rules"}\n```', "ok", True),
    ("home_status", None, "schema_violation", False), ("home_status", "", "schema_violation", False), ("home_status", {"action": "list_rules", "colour": "red"}, "schema_violation", False),
    ("home_status", {"action": "get_room_status", "room": "attic"}, "operation_error", False), ("open_garage", {}, "unknown_tool", False), ("", {}, "unknown_tool", False), ("Home_Status", {"action": "list_rules"}, "unknown_tool", False)])
def test_a_call_that_is_wrong_goes_back_as_an_error(name, arguments, kind, repaired):
    trial, server = play([{"tool_calls": [(name, arguments)]}, {"tool_calls": [LIST]}, {"content": "There are rules."}])
    assert [c.kind for c in trial.tool_calls] == [kind, "ok"]
    assert (trial.status, trial.answer, trial.model_calls[0].repaired) == ("ok", "There are rules.", repaired)
    assert trial.model_calls[0].tool_calls[0]["arguments"] == (arguments if isinstance(arguments, str) else json.dumps(arguments) if arguments is not None else ""), "the raw text is kept"
    shown = server.bodies[1]["messages"][-1]
    assert shown["role"] == "tool" and ("error" in json.loads(shown["content"])) == (kind != "ok")


def test_the_same_call_forever_ends_at_the_turn_limit():
    trial, server = play([{"tool_calls": [LIST]}], Controls(max_agent_turns=5))
    assert (trial.status, trial.error.kind, len(server.bodies), len(trial.tool_calls)) == ("turn_limit", "turn_limit", 5, 5)


# --- one trial: the tool server ---------------------------------------------------------------------------------------

def tools(fault, **more): return Controls(transport="stdio", server_command=f"{sys.executable} {HERE / 'misbehaving.py'} tools {{domain}} {{level}} {fault}", **more)


ONE_CALL = [{"tool_calls": [LIST]}, {"content": "There are rules."}]


@pytest.mark.parametrize("fault, says", [("hang", "imed out"), ("die", "losed"), ("nostart", "did not start"), ("fewer", "lists"), ("deaf", "did not start")])
def test_a_tool_server_that_fails_is_not_the_models_fault(fault, says, monkeypatch):
    if fault == "deaf": monkeypatch.setattr("granite.agent.START_SECONDS", 3.0)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    trial, server = play(ONE_CALL, tools(fault, tool_timeout_seconds=3))
    assert (trial.status, trial.error.kind) == ("infra", "infra") and says in trial.error.message and "\n" not in trial.error.message, trial.error
    assert len(server.bodies) == (1 if fault in ("hang", "die") else 0) and trial.wall_s < 90
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before, "a tool server is left behind"


def test_a_server_left_over_from_a_broken_start_is_ended():
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(wait, env=os.environ | {MARK: "this"}) as left, subprocess.Popen(wait, env=os.environ | {MARK: "another"}) as other:
        end_server("this")
        assert left.wait(5) == -signal.SIGKILL and other.poll() is None
        other.kill()


def test_a_tool_server_that_prints_to_stdout():
    trial, _ = play(ONE_CALL, tools("print", tool_timeout_seconds=120))
    assert (trial.status, [c.kind for c in trial.tool_calls], trial.answer) == ("ok", ["ok"], "There are rules.")


def test_a_tool_that_returns_two_megabytes():
    trial, server = play(ONE_CALL, tools("big", tool_timeout_seconds=120))
    assert (trial.status, [c.kind for c in trial.tool_calls]) == ("ok", ["ok"])
    assert len(trial.tool_calls[0].result) > 2_000_000 and len(server.bodies[1]["messages"][-1]["content"]) > 2_000_000


def test_a_command_that_is_not_there():
    trial, _ = play(ONE_CALL, Controls(transport="stdio", server_command="no-such-program {domain}"))
    assert trial.status == "infra" and "did not start" in trial.error.message


# --- a sweep ----------------------------------------------------------------------------------------------------------

def test_faults_in_the_middle_of_a_sweep_leave_the_rest_unharmed(tmp_path, no_pause):
    faults = iter([BOOM, {"cut": True}, None, None, None, {"raw": b"{"}])
    def script(body, n): return next(faults, None) or gold(body)
    with ModelServer(script) as server: run = run_model(experiment([server.key], tmp_path), server.key)
    assert run.completeness() == {"planned": 3, "done": 3, "infra": 0, "open": 0, "stale": 0}
    assert [o for o in outcomes(run) if o[2] != "infra"] == [("001", 3, "ok"), ("002", 2, "ok"), ("003", 1, "ok")] or len(outcomes(run)) == 6
    assert all(t.status == "ok" for t in run.trials())


def test_retry_after_is_honoured(tmp_path):
    script = lambda body, n: {"status": 429, "error": "slow down", "headers": {"Retry-After": "3"}} if n == 0 else gold(body)
    with ModelServer(script) as server: run = run_model(experiment([server.key], tmp_path, scenarios=["smarthome-001"]), server.key)
    assert outcomes(run)[-1] == ("001", 2, "ok") and 3 <= server.times[1] - server.times[0] < 9


def test_the_circuit_breaker_stops_a_server_that_only_fails(tmp_path, no_pause):
    with ModelServer([BOOM]) as server:
        with pytest.raises(SweepStopped, match="three trials in a row failed for reasons outside the model, last: .*out of memory.*; run again to go on"):
            run_model(experiment([server.key], tmp_path, scenarios=None), server.key)
        run = Run(next((tmp_path / "runs").iterdir()))
    assert run.completeness() == {"planned": 9, "done": 0, "infra": 3, "open": 6, "stale": 0} and len(server.bodies) == 9


def test_one_bad_trial_does_not_open_the_circuit(tmp_path, no_pause):
    bad = next(s.user_prompt for s in load_scenarios(HOME) if s.id == "smarthome-002")
    def script(body, n): return BOOM if any(m.get("content") == bad for m in body["messages"]) else gold(body)
    with ModelServer(script) as server:
        run = run_model(experiment([server.key], tmp_path), server.key)
        assert run.completeness() == {"planned": 3, "done": 2, "infra": 1, "open": 0, "stale": 0}
        server.script = gold
        again = run_model(experiment([server.key], tmp_path), server.key)
        assert again.completeness()["done"] == 3 and len(outcomes(again)) == 6


def test_a_server_that_dies_stops_its_model_with_one_line(tmp_path, no_pause):
    with ModelServer(gold) as server:
        def script(body, n):
            if n == 4: server.server.socket.close() # nobody can connect any more
            return gold(body) if n < 4 else {"cut": True}
        server.script = script
        with pytest.raises(SweepStopped, match="No server answers at"): run_model(experiment([server.key], tmp_path), server.key)
    done = Run(next((tmp_path / "runs").iterdir())).completeness()
    assert done["done"] >= 1 and done["infra"] == 1 and done["open"] >= 1


def test_a_timeout_of_a_server_that_is_gone_is_infrastructure(tmp_path, no_pause):
    with ModelServer(gold) as server:
        def script(body, n): server.server.socket.close(); return {"hang": 3}
        server.script = script
        with pytest.raises(SweepStopped, match="No server answers at"): run_model(experiment([server.key], tmp_path, agent_timeout_seconds=1), server.key)
    assert [o[2] for o in outcomes(Run(next((tmp_path / "runs").iterdir())))] == ["infra"] * 3


def test_a_model_without_tools_is_found_before_the_first_trial(tmp_path):
    class NoTools(ModelServer):
        def entry(self, body): return {"status": 400, "error": "toy does not support tools"} if body.get("tools") else super().entry(body)
    with NoTools([{"content": "I cannot."}]) as server:
        run = run_model(experiment([server.key], tmp_path), server.key)
        assert run.manifest["options"]["protocol"] == "prompted" and run.completeness()["done"] == 3
        with pytest.raises(SweepStopped, match="does not support tools.*; use tool_protocol prompted"): run_model(experiment([server.key], tmp_path, tool_protocol="native"), server.key)


def test_two_sweeps_on_one_folder(tmp_path):
    with ModelServer(gold) as server:
        chosen, second = experiment([server.key], tmp_path, scenarios=["smarthome-001"]), []
        def meanwhile(run, cells):
            try: run_model(chosen, server.key)
            except RunBusy as e: second.append(str(e))
        run = run_model(chosen, server.key, planned=meanwhile)
    assert "is writing here; wait for it, stop it, or choose another folder" in second[0] and run.completeness()["done"] == 1


def test_a_disk_that_fills_up_in_the_middle(tmp_path, monkeypatch):
    write, lines = os.write, []
    def full(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("trials.jsonl"):
            lines.append(1)
            if len(lines) == 2: raise OSError(28, "No space left on device")
        return write(fd, data)
    with ModelServer(gold) as server:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(DiskError, match="the disk is full; free some space and start again"): run_model(experiment([server.key], tmp_path), server.key)
        monkeypatch.undo()
        asked = len(server.bodies)
        run = run_model(experiment([server.key], tmp_path), server.key)
    assert outcomes(run) == [("001", 1, "ok"), ("002", 1, "ok"), ("003", 1, "ok")] and len(server.bodies) > asked


# --- the command ------------------------------------------------------------------------------------------------------

def command(path, **options):
    return subprocess.Popen([sys.executable, "-m", "granite.cli", "run", str(path)], cwd=path.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), # who runs the tests may ignore it
                            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))}, **options)


@pytest.fixture
def slow_gold():
    "A model server in a process of its own that takes a moment for each reply."
    process = subprocess.Popen([sys.executable, HERE / "misbehaving.py", "model", "0.15"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process.stdout.readline().strip()
    process.stdin.close()
    process.wait(10)


def yaml(path, models, **more):
    path.write_text(json.dumps({"models": models, "domains": ["smarthome"], "granularities": ["L4", "L3"], "meters": "off", "max_tokens": 64} | more)) # JSON is YAML
    return path


def wait_for(trials, folder, process, limit=300):
    end = time.monotonic() + limit
    while time.monotonic() < end and process.poll() is None:
        if sum(len(f.read_bytes().split(b"\n")) - 1 for f in folder.glob("*/trials.jsonl")) >= trials: return
        time.sleep(0.02)
    raise AssertionError(process.communicate(timeout=100))


def children_of(process): return psutil.Process(process.pid).children(recursive=True)


def gone(processes, limit=15): return not psutil.wait_procs(processes, timeout=limit)[1]


@pytest.mark.parametrize("transport", ["memory", "stdio", "http"])
def test_kill_9_and_again_until_all_is_done(tmp_path, slow_gold, transport):
    few = {} if transport == "memory" else {"scenarios": ["smarthome-001", "smarthome-002"]}
    path = yaml(tmp_path / "e.yaml", [f"openai/toy@{slow_gold}"], transport=transport, **few)
    for already in ((2, 7) if transport == "memory" else (1,)):
        process = command(path)
        wait_for(already, tmp_path / "runs", process)
        time.sleep(0.1)
        left = children_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        assert gone(left), "a tool server outlives a killed run"
        file = next((tmp_path / "runs").glob("*/trials.jsonl"))
        with file.open("ab") as f: f.write(b'{"format":1,"key":"half a li') # what a power cut leaves
    out, err = (process := command(path)).communicate(timeout=600)
    assert process.returncode == 0, err
    run = Run(file.parent)
    total = 18 if transport == "memory" else 4
    assert run.completeness() == {"planned": total, "done": total, "infra": 0, "open": 0, "stale": 0}
    keys = [t.key for t in run.every_trial()]
    assert len(keys) == len(set(keys)) == total, "something ran twice"
    assert b"half a li" in (file.parent / "trials.torn").read_bytes()


def test_ctrl_c_ends_in_one_line_and_goes_on_later(tmp_path, slow_gold):
    path = yaml(tmp_path / "e.yaml", [f"openai/toy@{slow_gold}", "smollm2-135m"], granularities=["L3"])
    process = command(path)
    wait_for(2, tmp_path / "runs", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "interrupted; what was finished is on disk" in err and "Traceback" not in err, err
    run = Run(next((tmp_path / "runs").iterdir()))
    assert 2 <= run.completeness()["done"] < 9 and not (run.path / ".owner.json").exists()
    assert len(list((tmp_path / "runs").iterdir())) == 1, "the next model was started after all"
    yaml(path, [f"openai/toy@{slow_gold}"], granularities=["L3"])
    assert command(path).wait(400) == 0 and run.completeness()["done"] == 9


def test_the_sweep_goes_on_to_the_next_model(tmp_path, slow_gold):
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    path = yaml(tmp_path / "e.yaml", [f"openai/away@http://127.0.0.1:{port}/v1", "no-such-model", f"openai/toy@{slow_gold}"], granularities=["L3"], scenarios=["smarthome-001"])
    out, err = (process := command(path)).communicate(timeout=400)
    assert process.returncode == 1 and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("granite run: ")]
    assert len(lines) == 2 and "No server answers at" in lines[0] and "no-such-model" in lines[1], err
    assert sum(r.completeness()["done"] for r in map(Run, (tmp_path / "runs").iterdir())) == 1


def test_a_folder_that_cannot_be_written(tmp_path, slow_gold):
    (tmp_path / "runs").write_text("a file stands here")
    out, err = (process := command(yaml(tmp_path / "e.yaml", [f"openai/toy@{slow_gold}"]))).communicate(timeout=200)
    assert process.returncode == 1 and "a file stands where a folder is needed" in err and "Traceback" not in err, err


# --- a long night -----------------------------------------------------------------------------------------------------

def state():
    gc.collect()
    me = psutil.Process()
    return {"memory_mib": me.memory_info().rss / 2**20, "descriptors": me.num_fds(), "threads": me.num_threads(), "children": len(me.children(recursive=True))}


@pytest.mark.slow
def test_500_trials_in_a_row_leave_memory_descriptors_and_children_flat():
    replies, seen = gold_model([FIRST]), []
    way = ModelAccess("scripted", {"model": "openai/scripted", "api_base": "http://127.0.0.1:9/v1", "api_key": "none"}, "native", replies)
    async def night():
        for n in range(550):
            trial = await run_trial("0" * 16, FIRST, L3, way, Controls())
            assert trial.status == "ok"
            if n >= 49 and n % 50 == 49: seen.append(state())
    run_sync(night())
    for n, s in enumerate(seen): print(f"after {50 * (n + 1)} trials: {s['memory_mib']:.1f} MiB, {s['descriptors']} descriptors, {s['threads']} threads, {s['children']} children")
    first, last = seen[0], seen[-1]
    assert last["descriptors"] <= first["descriptors"] + 1 and last["children"] == first["children"] and last["threads"] <= first["threads"] + 1
    assert last["memory_mib"] - first["memory_mib"] < 10
