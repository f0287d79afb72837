"""Scores against every scenario there is, against a slow and plain rewrite, and against arbitrary traces."""
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granite.records import Run
from granite.scenario import load_scenarios, reference
from granite.domain import load_domain
from granite.level import LEVELS
from granite.scores import argument_accuracy, same_value, score_run, score_trial, selection, state_differences
from granite.store import apply_changes, changes
from granite.transcript import Transcript

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = [s for folder in sorted((ROOT / "scenarios").iterdir()) if any(folder.glob("*.yaml")) for s in load_scenarios(folder.name)]


def gold_trace(scenario, level, calls=None):
    """What a faultless agent leaves behind (or one that makes only some of the calls), and the reference."""
    interface = LEVELS[level](load_domain(scenario.domain))
    ref, store = reference(scenario, interface), interface.domain.seed()
    before, made = store.snapshot(), []
    for i, call in enumerate(scenario.gold(level) if calls is None else calls):
        result = json.dumps(interface.call(store, call.tool, call.arguments))
        made.append({"index": i, "model_call": i, "id": f"c{i}", "name": call.tool, "arguments": call.arguments, "kind": "ok", "is_error": False,
                     "result": result, "start_s": float(i), "latency_s": 0.01})
    return ref, {"key": f"{scenario.id}{level}", "model": "gold", "domain": scenario.domain, "level": level, "scenario": scenario.id, "repetition": 0,
                 "started_at": "2026-11-30T18:00:00Z", "started_mono": 0.0, "wall_s": 10.0, "status": "ok", "protocol": "native",
                 "interface_digest": interface.digest, "scenario_digest": scenario.digest, "seed_digest": ref["seed_digest"], "request": scenario.user_prompt,
                 "model_calls": [{"index": 0, "start_s": 0.0, "latency_s": 1.0, "content": "Done."}], "tool_calls": made,
                 "answer": " ".join(scenario.objective.answer), "end_state": {"changed": changes(before, store.snapshot())}}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_the_gold_calls_score_full_marks_and_doing_nothing_does_not(scenario):
    for level in scenario.gold_standard:
        ref, trace = gold_trace(scenario, level)
        row = score_trial(trace, ref, scenario)
        assert {k: row[k] for k in ("tc", "f1", "arg_acc", "arg_acc_best", "zero_call", "any_bad_call", "redundant_calls", "old_reference")} == dict(
            tc=1, f1=1.0, arg_acc=1.0, arg_acc_best=1.0, zero_call=False, any_bad_call=False, redundant_calls=0, old_reference=False), level
        assert row["answer_ok"] in (None, True)
        _, idle = gold_trace(scenario, level, calls=[])
        row = score_trial(idle, ref, scenario)
        assert (row["tc"], row["f1"], row["zero_call_cause"]) == (0, 0.0, "answered"), level
        text = str(Transcript(trace, ref, scenario))
        assert "task complete" in text and "not called so" not in text


def test_a_whole_run_of_all_scenarios_is_scored_and_scored_from_the_file(tmp_path):
    pairs = {(s.id, level): (s, *gold_trace(s, level)) for s in SCENARIOS[:9] for level in s.gold_standard}
    with Run(tmp_path / "gold").open() as run:
        for _, _, trace in pairs.values(): run.append(trace)
    find = {place: (ref, s) for place, (s, ref, _) in pairs.items()}
    rows = score_run(run, find)
    assert len(rows) == len(pairs) and all(r["tc"] == 1 for r in rows)
    assert score_run(run, find) == rows == score_run(run, find, fresh=True)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 2.5, -0.0]) | st.sampled_from(["a", " A", "b", "1", ""]),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3), max_leaves=8)


def plainly_equal(a, b):
    """Value equality once more, written as the design says it."""
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None: return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)): return a == b
    if isinstance(a, str) and isinstance(b, str): return a.strip().casefold() == b.strip().casefold()
    if isinstance(a, list) and isinstance(b, list): return len(a) == len(b) and all(map(plainly_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict): return a.keys() == b.keys() and all(plainly_equal(a[k], b[k]) for k in a)
    return False


@given(JSON, JSON)
@settings(max_examples=150, deadline=None)
def test_value_equality_is_what_the_design_says(a, b):
    assert same_value(a, b) == plainly_equal(a, b)
    assert same_value(a, json.loads(json.dumps(a)))


CALLS = st.lists(st.tuples(st.sampled_from("ab"), st.dictionaries(st.sampled_from("xy"), st.integers(0, 1), max_size=2)), max_size=4)


@given(CALLS, CALLS)
@settings(max_examples=120, deadline=None)
def test_the_best_pairing_is_the_best_of_all_pairings(called, gold):
    total = sum(len(arguments) for _, arguments in gold)
    if not total: return
    padded = called + [(None, {})] * max(0, len(gold) - len(called))
    best = max(sum(c[1].get(k) == v for c, g in zip(order, gold) if c[0] == g[0] for k, v in g[1].items()) for order in itertools.permutations(padded, len(gold)))
    found = argument_accuracy(called, gold)
    assert found["arg_acc_best"] == pytest.approx(best / total)
    assert found["arg_acc"] <= found["arg_acc_best"]


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_selection_is_the_harmonic_mean_of_precision_and_recall(called, gold):
    s = selection(called, gold)
    if s["precision"] + s["recall"]: assert s["f1"] == pytest.approx(2 * s["precision"] * s["recall"] / (s["precision"] + s["recall"]))
    assert s["f1"] == selection(called[::-1], gold)["f1"] == selection(gold, called)["f1"]


RECORDS = st.dictionaries(st.sampled_from(["1", "2", "3"]), st.fixed_dictionaries({"v": st.integers(0, 1), "w": st.sampled_from(["a", "A", "b"])}), max_size=3)
SNAPSHOTS = st.dictionaries(st.sampled_from(["lamps", "rules"]), RECORDS, max_size=2)


@given(SNAPSHOTS, SNAPSHOTS, SNAPSHOTS)
@settings(max_examples=120, deadline=None)
def test_the_end_state_is_right_exactly_if_the_whole_states_are_equal(seed, gold, mine):
    def form(state):  # new records without their id, as a multiset
        old = {(k, i, r["v"], r["w"].casefold()) for k, shelf in state.items() for i, r in shelf.items() if i in seed.get(k, {})}
        return old, sorted((k, r["v"], r["w"].casefold()) for k, shelf in state.items() for i, r in shelf.items() if i not in seed.get(k, {}))
    changed = changes(seed, mine)
    assert form(apply_changes(seed, changed)) == form(mine)
    lines = state_differences(changed, {"seed": seed, "end_state": gold})
    assert (lines == []) == (form(mine) == form(gold)), lines


CALL = st.fixed_dictionaries({"index": st.just(0), "model_call": st.integers(-1, 2), "id": st.text(max_size=3), "name": st.sampled_from(["set_lamp", "lamp", ""]),
                              "arguments": st.dictionaries(st.text(max_size=4), JSON, max_size=3), "is_error": st.booleans(), "result": st.text(max_size=20) | JSON.map(json.dumps),
                              "kind": st.sampled_from(["ok", "unknown_tool", "schema_violation", "operation_error", "parse", "infra"]),
                              "start_s": st.floats(-1, 20), "latency_s": st.floats(0, 20), "rescued": st.booleans()})
REPLY = st.fixed_dictionaries({"index": st.integers(0, 2), "start_s": st.floats(0, 9), "latency_s": st.floats(0, 9), "content": st.text(max_size=20),
                               "prompt_tokens": st.none() | st.integers(0, 9), "error": st.none() | st.text(max_size=9), "truncated": st.booleans()})


@given(st.lists(CALL, max_size=4), st.lists(REPLY, max_size=3), st.sampled_from(["ok", "error", "timeout", "turn_limit", "infra"]), st.text(max_size=30), SNAPSHOTS)
@settings(max_examples=150, deadline=None)
def test_any_trace_gets_a_score_and_a_transcript(calls, replies, status, answer, left):
    seed = {"lamps": {"1": {"v": 0, "w": "a"}}}
    ref = {"seed": seed, "end_state": {"lamps": {"1": {"v": 1, "w": "a"}}}, "gold": [{"tool": "set_lamp", "arguments": {"v": 1}}],
           "facts": [{"record": "1", "field": "v", "value": 1, "where": {}}], "writes": [["set_lamp", None], ["lamp", "set"]]}
    scenario = SimpleNamespace(difficulty="easy", objective=SimpleNamespace(ignore=["*.*.w"], answer=["1"], sets=["x"]))
    trace = {"key": "k", "model": "m", "domain": "home", "level": "L4", "scenario": "home-001", "repetition": 0, "started_at": "", "started_mono": 0.0,
             "wall_s": 5.0, "status": status, "protocol": "native", "interface_digest": "", "scenario_digest": "", "seed_digest": "", "request": "?",
             "model_calls": replies, "tool_calls": calls, "answer": answer, "end_state": {"changed": changes(seed, left)}}
    row = score_trial(trace, ref, scenario)
    assert (row["tc"] is None) == (status == "infra")
    for score in ("precision", "recall", "f1", "arg_acc", "arg_acc_best"): assert row[score] is None or 0 <= row[score] <= 1
    assert 0 <= row["harness_s"] <= row["wall_s"]
    assert row["zero_call"] == (not calls and status != "infra")
    assert "<script" not in Transcript(trace, ref, scenario)._repr_html_()
    assert "request" in str(Transcript(trace, ref, scenario))


def test_scoring_imports_neither_a_model_client_nor_mcp():
    code = "import sys, granite.scores, granite.transcript; print([m for m in ('litellm', 'google.adk', 'mcp', 'fastmcp', 'scipy', 'pandas', 'pyarrow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
