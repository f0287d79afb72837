"""Two runs compared: planted differences are found, no cell is dropped without a word, and the command says all of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from test_cli import on_a_terminal

from granite.cli import main
from granite.compare import SideBySide, calls_made, compare, difference_lines, left_out_rows
from granite.domain import load_domain
from granite.experiment import check_experiment
from granite.records import Run
from granite.scenario import load_scenarios
from granite.simulate import MODELS, simulate, write_simulated
from granite.sweep import ScriptedBackend, gold_model, run_model

README = Path(__file__).parents[1] / "runs" / "readme" / "smarthome-qwen2.5-coder-1.5b"
SCENARIOS = [f"smarthome-00{n}" for n in range(1, 6)]
PLANTED = {("smarthome-002", "L1"), ("smarthome-003", "L4")} # where B does nothing

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Runs `a` and `b` of the same cells, both scripted; b fails where it was planted."
    folder, home = tmp_path_factory.mktemp("runs"), load_scenarios(load_domain("smarthome"))
    options = check_experiment({"models": ["scripted"], "domains": ["smarthome"], "granularities": ["L4", "L1"], "scenarios": SCENARIOS, "meters": "off"})
    for name, wrong in (("a", lambda scenario, level: False), ("b", lambda scenario, level: (scenario.id, level) in PLANTED)):
        run_model(options, "scripted", folder / name, backend=ScriptedBackend(gold_model(home, wrong=wrong)))
    return folder

def lines_of(path):
    return [json.loads(line) for line in Run(path).lines()]

def write(path, trials, manifest=None):
    "A run folder with these trials."
    path.mkdir(parents=True)
    (path / "trials.jsonl").write_text("".join(json.dumps(t) + "\n" for t in trials))
    if manifest is not None: (path / "manifest.json").write_text(json.dumps(manifest))
    return path

def seeded(a, b, seed=0, **options):
    return compare(a, b, np.random.default_rng(seed), **options)

def test_planted_differences_are_found(folder):
    found = seeded(folder / "a", folder / "b")
    assert {(r.scenario, r.level) for r in found.changed.itertuples()} == PLANTED
    assert set(found.changed.tc_a) == {1} and set(found.changed.tc_b) == {0}
    everything, L1 = found["all"], found["L1"]
    assert everything.means["tc"] == pytest.approx((1, 0.8)) and L1.means["tc"] == pytest.approx((1, 0.8))
    assert everything.differences["tc"].value == pytest.approx(-0.2) and everything.differences["arg_acc"].value < 0 and everything.differences["any_bad_call"].value == 0
    assert (everything.mcnemar.only_first, everything.mcnemar.only_second, everything.mcnemar.p) == (2, 0, 0.5)
    both = list(zip(lines_of(folder / "a"), lines_of(folder / "b")))
    assert all(x["scenario"] == y["scenario"] and x["level"] == y["level"] for x, y in both)
    assert everything.same_calls == 8 and everything.same_state == sum(x["end_state"] == y["end_state"] for x, y in both)
    assert [o.pairs for o in found.outcomes] == [5, 5, 10] and not len(found.left_out)

def test_the_other_way_round(folder):
    there, back = seeded(folder / "a", folder / "b"), seeded(folder / "b", folder / "a")
    assert back["all"].differences["tc"].value == pytest.approx(0.2) and back["L4"].mcnemar.only_second == 1
    assert set(back.changed.tc_a) == {0} and len(there.changed) == len(back.changed)

def test_the_interval_resamples_scenarios(folder):
    found = seeded(folder / "a", folder / "b", seed=7)
    counts = np.random.default_rng(7).multinomial(5, [1 / 5] * 5, size=2000)
    for level, differences in (("all", [0, -0.5, -0.5, 0, 0]), ("L1", [0, -1, 0, 0, 0]), ("L4", [0, 0, -1, 0, 0])):
        e = found[level].differences["tc"]
        assert [e.low, e.high] == pytest.approx(list(np.quantile(counts @ differences / 5, [0.025, 0.975])))
        assert (e.unit, e.units, e.draws, e.generator) == ("scenarios", 5, 2000, "PCG64 seed 7")
    real = seeded(README, folder / "a", seed=7) # F1 takes many values there, so that 95% is not 90%
    uneven = real.pairs[real.pairs.level == "L4"].set_index("scenario").eval("f1_b - f1_a").loc[SCENARIOS]
    e, sample = real["L4"].differences["f1"], counts @ uneven / 5
    assert [e.low, e.high] == pytest.approx(list(np.quantile(sample, [0.025, 0.975]))) != pytest.approx(list(np.quantile(sample, [0.05, 0.95])))

def test_no_cell_is_dropped_without_a_word(folder, tmp_path):
    a, b = lines_of(folder / "a"), []
    for trial in a:
        if trial["scenario"][-1] == "5": trial["scenario_digest"] = "former"
    for trial in lines_of(folder / "b"):
        place = trial["scenario"][-1], trial["level"]
        if place[0] == "5": trial["scenario_digest"] = "former"
        if place == ("1", "L1"): continue
        if place == ("2", "L4"): trial |= {"status": "infra", "error": {"kind": "infra", "message": "server gone"}}
        if place[0] == "4": trial["scenario_digest"] = "another"
        if place[1] == "L1": trial["interface_digest"] = "another"
        b.append(trial)
    b.append(b[0] | {"repetition": 1, "key": "1" * 16})
    found = seeded(write(tmp_path / "a", a, Run(folder / "a").manifest), write(tmp_path / "b", b, Run(folder / "b").manifest))
    assert {r["left out"]: r["trials"] for r in left_out_rows(found)} == {"only in A": 1, "only in B": 1, "infrastructure fault": 1, "another scenario or first state": 2}
    assert left_out_rows(found)[2]["where"] == "L4 1; 0 in A, 1 in B"
    assert len(found.pairs) + len(found.left_out) == len(found.cells) == 11
    assert found["all"].pairs == 6 and (found["L1"].other_interface, found["L4"].other_interface) == (3, 0)
    told = difference_lines(found)
    assert told[0] == "! interface: 1 of 2 changed (smarthome L1); these pairs are kept and marked"
    assert told[1] == "! scenario: 1 of 5 changed (smarthome-004); these are left out"
    assert told[2:] == ["! scores: 2 pairs ran on a scenario or first state that has changed since; the present gold standard judges them", "the manifests agree in model, options, versions and host"]

def test_calls_are_compared_as_bytes(folder):
    trial = next(t for t in Run(folder / "a").trials() if any(c.arguments for c in t.tool_calls))
    first, *rest = trial.tool_calls
    other = lambda **change: replace(trial, tool_calls=[replace(first, **change), *rest])
    assert calls_made(trial) == calls_made(other(result="other", id=first.id, latency_s=9.0))
    assert calls_made(trial) != calls_made(other(name="other")) and calls_made(trial) != calls_made(other(arguments=first.arguments | {"more": 1}))
    assert calls_made(other(arguments={"x": 1})) != calls_made(other(arguments={"x": 1.0})) != calls_made(other(arguments={"x": "1.0"}))
    assert rest and calls_made(trial) != calls_made(replace(trial, tool_calls=[*rest, first]))
    written = lambda text: replace(other(kind="parse", arguments={}), model_calls=[replace(trial.model_calls[0], index=first.model_call, tool_calls=[{"id": first.id, "name": first.name, "arguments": text}])])
    assert calls_made(written("{broken")) != calls_made(written("{broken otherwise"))

def test_one_scenario_has_no_interval(folder, tmp_path):
    one = lambda name: write(tmp_path / name, [t for t in lines_of(folder / name) if t["scenario"] == SCENARIOS[1]])
    e = seeded(one("a"), one("b"))["all"].differences["tc"]
    assert e.value == -0.5 and e.low is None and e.note == "no interval: only 1 scenario"

def test_the_command_prints_the_same_twice(folder, capsys):
    argv = ["compare", "a", str(folder / "b"), "--out", str(folder), "--draws", "500", "--seed", "3"]
    assert main(argv) == 0
    first = capsys.readouterr()
    assert main(argv) == 0 and capsys.readouterr() == first and not first.err
    lines = first.out.splitlines()
    assert lines[0] == f"A: {folder / 'a'}, model scripted"
    assert any(line.split() == ["L1", "smarthome-002", "0", "lost", "ok", "ok"] for line in lines)
    assert "500 resamples of 5 scenarios; PCG64 seed 3" in first.out and "only in A" in first.out and "\x1b" not in first.out
    assert main([*argv[:5], "--level", "L4"]) == 0
    out = capsys.readouterr().out
    assert "smarthome-003" in out and "smarthome-002" not in out

def test_show_stands_side_by_side(folder, capsys):
    assert main(["compare", "a", "b", "--out", str(folder), "--show", "smarthome-002", "--level", "L1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 160
    request, = (line for line in lines if line.startswith("request"))
    left, right = request.split(" | ")
    assert left.rstrip() == right.rstrip() != ""
    assert any(" | " in line and "task complete" in line.split(" | ")[0] and "task not complete" in line.split(" | ")[1] for line in lines)

def test_show_fits_the_terminal(folder):
    text, code = on_a_terminal("compare", "a", "b", "--out", str(folder), "--show", "smarthome-002")
    assert code == 0 and 90 < max(map(len, text.splitlines())) <= 100

@pytest.mark.parametrize("argv,says", [
    (["a", "a"], "{folder}/a: this is one run, named twice; there is nothing to compare"),
    (["a", "{folder}/../{name}/a"], "{folder}/a: this is one run, named twice; there is nothing to compare"),
    (["a", "nowhere"], "there is no run 'nowhere' in {folder}; there are: a, b"),
    (["a", "b", "--level", "L2"], "{folder}/a and {folder}/b have no condition in common at L2"),
    (["a", "b", "--show", "smarthome-009"], "neither run has a trial of smarthome-009"),
    (["a", "b", "--draws", "5"], "argument --draws: '5': a whole number from 100 up is needed; see granite compare --help"),
    (["a", "b", "--seed", "-1"], "argument --seed: '-1': a whole number from 0 up is needed; see granite compare --help"),
    (["a"], "the following arguments are required: RUN_B; see granite compare --help"),
])
def test_a_mistake_is_one_line(folder, argv, says, capsys):
    known = {"folder": folder, "name": folder.name}
    try: code = main(["compare", *(word.format(**known) for word in argv), "--out", str(folder)])
    except SystemExit as e: code = e.code
    out, err = capsys.readouterr()
    assert (code, out, err) == (2, "", f"granite compare: {says.format(**known)}\n")

def test_nothing_to_compare(folder, tmp_path, capsys):
    a = lines_of(folder / "a")
    write(tmp_path / "empty", [])
    write(tmp_path / "other", [t | {"scenario_digest": "another"} for t in a])
    write(tmp_path / "models", [a[0], a[0] | {"model": "second", "key": "2" * 16}])
    write(tmp_path / "elsewhere", [t for t in a if t["scenario"] == SCENARIOS[0]])
    write(tmp_path / "others", [t for t in a if t["scenario"] != SCENARIOS[0]])
    write_simulated(simulate(models=MODELS[:1], domains=("smarthome",), repetitions=1), tmp_path / "simulated")
    for one, two, says in ((folder / "a", tmp_path / "empty", f"{tmp_path}/empty: no finished trial, so there is nothing to compare"),
                           (tmp_path / "elsewhere", tmp_path / "others", f"{tmp_path}/elsewhere and {tmp_path}/others have no condition in common"),
                           (folder / "a", tmp_path / "other", f"{folder}/a and {tmp_path}/other have no pair that can be compared: 10 another scenario or first state"),
                           (folder / "a", tmp_path / "models", f"{tmp_path}/models: trials of scripted, second; a comparison wants runs of one model each"),
                           (folder / "a", tmp_path / "simulated", f"{tmp_path}/simulated: simulated trials hold no calls of a model, so there is nothing to compare")):
        assert main(["compare", str(one), str(two)]) == 2
        assert capsys.readouterr().err == f"granite compare: {says}\n"

def test_text_of_a_run_is_neither_html_nor_markup(folder, tmp_path):
    evil = "<script>alert(1)</script> [x](javascript:y) `*\x1b[2J"
    bad = [t | {"model": evil, "answer": evil} for t in lines_of(folder / "b")]
    found = seeded(folder / "a", write(tmp_path / "bad", bad, {"options": {evil: evil}}))
    shown, beside = found._repr_markdown_(), SideBySide(found.a, found.b, SCENARIOS[0])
    assert not any(mark in shown for mark in ("<", "](", "`", "\x1b"))
    assert "<script" not in beside._repr_html_() and "&lt;script" in beside._repr_html_()
    assert "\x1b" not in beside.text() + "".join(difference_lines(found))
