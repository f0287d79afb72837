"""`granite verify` from the command line: exit codes, and faults planted in a copied folder of scenarios."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from granite.cli import main
from granite.domain import domain_names, load_domain
from granite.level import LEVELS
from granite.scenario import load_scenarios, scenario_folder

@pytest.fixture
def copied(tmp_path, monkeypatch):
    "The smart home's scenarios in a folder of one's own: change(n, what) edits one as data."
    folder = tmp_path / "mine" / "smarthome"
    shutil.copytree(scenario_folder(load_domain("smarthome")), folder)
    monkeypatch.setenv("GRANITE_SCENARIOS", str(folder.parent))
    def change(number, what):
        file = folder / f"smarthome-{number:03d}.yaml"
        data = yaml.safe_load(file.read_text())
        what(data)
        file.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    change.folder = folder
    return change

def number_of(fits) -> int:
    "The first scenario of the smart home that fits."
    return next(int(s.id[-3:]) for s in load_scenarios("smarthome") if fits(s))

def writes_at(scenario, level) -> bool:
    interface = LEVELS[level](load_domain("smarthome"))
    return any(interface.writes(c.tool, c.arguments) for c in scenario.gold(level))

def lines(capsys, code, *arguments) -> list[str]:
    "What `granite verify` prints, after a check of its exit code."
    assert main(["verify", *arguments]) == code
    return capsys.readouterr().out.splitlines()

def said(printed, number, level, check) -> list[str]:
    return [line for line in printed if line.startswith(f"smarthome-{number:03d}.yaml {level}: {check}: ")]

# ---- exit codes

def command(*arguments, **env):
    return subprocess.run([sys.executable, "-m", "granite.cli", "verify", *arguments], capture_output=True, text=True, timeout=300, env=os.environ | env)

def test_exit_codes_of_the_command(copied):
    good = command("smarthome", "--level", "L1")
    assert (good.returncode, good.stderr) == (0, ""), good.stderr
    assert good.stdout.splitlines()[-1].startswith("9 scenarios x 1 levels: all ")
    copied(1, lambda s: s.update(difficulty="hard"))
    bad = command("smarthome", "--level", "L4")
    assert bad.returncode == 1 and "smarthome-001.yaml L4: counts: 2 gold calls; expected 8 to 10 for hard" in bad.stdout
    assert bad.stdout.splitlines()[-1] == "9 scenarios x 1 levels: 3 problems"        # two of three counts per difficulty are wrong as well
    wrong = command("smart_home")
    assert wrong.returncode == 2 and wrong.stdout == "" and len(wrong.stderr.splitlines()) == 1
    assert wrong.stderr.startswith("granite verify: domain 'smart_home': not known; expected one of")

@pytest.mark.parametrize("arguments,message", [
    (["smarthome", "--level", "L5"], "level 'L5': not known; expected one of L4, L3, L2, L1"),
    (["nowhere.py"], "domain nowhere.py: no such file"),
    (["smarthome", "--level", "nowhere.py"], "level nowhere.py: no such file")])
def test_wrong_use(capsys, arguments, message):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err

# ---- files that are wrong: exit code 2, one line with file, key and reason

def replaced(old, new): return lambda text: text.replace(old, new, 1)

@pytest.mark.parametrize("edit,message", [
    (replaced("difficulty: easy", "difficulty: trivial"), "smarthome/smarthome-001.yaml: difficulty: "),
    (replaced("user_prompt:", "prompt:"), "smarthome/smarthome-001.yaml: user_prompt: "),
    (replaced("id: smarthome-001", "id: smarthome-1"), "smarthome/smarthome-001.yaml: id: expected 'smarthome-001'"),
    (replaced("gold_standard:", "gold:"), "smarthome/smarthome-001.yaml: gold_standard: "),
    (replaced("- tool:", "- tol:"), "smarthome/smarthome-001.yaml: gold_standard.L4.0.tool: "),
    (lambda text: text + "derive: {no such words: 1}\n", "smarthome/smarthome-001.yaml: derive: 'no such words' does not stand in the request"),
    (lambda text: text + "notes: mine\n", "smarthome/smarthome-001.yaml: notes: "),
    (lambda text: text + "a: [1\n", "smarthome/smarthome-001.yaml: not YAML: "),
    (lambda text: "", "smarthome/smarthome-001.yaml: expected keys such as id"),
], ids=["difficulty", "prompt", "id", "gold", "tool", "derive", "unknown key", "not YAML", "empty"])
def test_file_that_is_wrong(copied, capsys, edit, message):
    file = copied.folder / "smarthome-001.yaml"
    file.write_text(edit(file.read_text()))
    assert main(["verify", "smarthome"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("granite verify: ") and message in err and len(err.splitlines()) == 1

def test_folder_that_is_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRANITE_SCENARIOS", str(tmp_path))
    assert main(["verify", "smarthome"]) == 2
    assert "smarthome: no scenario files; expected smarthome-001.yaml and so on" in capsys.readouterr().err

# ---- gold standards that are wrong: exit code 1, and the fault by scenario, level and check

def test_planted_faults(copied, capsys):
    "Nine faults in nine files, found in one pass."
    easy_write = number_of(lambda s: s.difficulty == "easy" and writes_at(s, "L4"))
    look = number_of(lambda s: not writes_at(s, "L4") and s.objective.observed)
    others = iter(n for n in range(1, 10) if n not in (easy_write, look))
    unknown, extra, twice, named, gone, false_fact, level_named = (next(others) for _ in range(7))

    def call(tool, **arguments): return {"tool": tool, "arguments": arguments}
    copied(easy_write, lambda s: s["gold_standard"]["L2"].pop())                                                   # one level does less
    copied(look, lambda s: s["objective"].update(observed=[]))                                                     # nothing is asked
    copied(unknown, lambda s: s["gold_standard"]["L1"].append(call("smart_house", action="list_rules")))
    copied(extra, lambda s: s["gold_standard"]["L4"][0]["arguments"].update(colour="blue"))
    copied(twice, lambda s: s["gold_standard"]["L3"].insert(0, call("home_configuration", action="set_rule", rule_id="RU003", enabled=True)))
    copied(named, lambda s: s.update(user_prompt=s["user_prompt"] + " Use set_device for it."))
    copied(gone, lambda s: s["gold_standard"].pop("L3"))
    copied(false_fact, lambda s: s["objective"]["observed"].append({"record": "SN099", "field": "value"}) if s["objective"].get("observed") else s["objective"].update(observed=[{"record": "SN099", "field": "value"}]))
    copied(level_named, lambda s: s.update(user_prompt=s["user_prompt"] + " (L2)"))

    printed = lines(capsys, 1, "smarthome")
    assert said(printed, easy_write, "L2", "same state")
    for level in LEVELS: assert said(printed, look, level, "not vacuous")
    assert any("no such tool; expected one of smarthome" in line for line in said(printed, unknown, "L1", "valid"))
    assert any("'colour' was unexpected" in line for line in said(printed, extra, "L4", "valid"))
    assert any("call 1 home_configuration can be left out" in line for line in said(printed, twice, "L3", "minimal"))
    assert any("RU003" in line for line in said(printed, twice, "L3", "derivable"))
    assert any("names 'set_device'" in line for line in said(printed, named, "all levels", "counts"))
    assert any("gold_standard has no L3" in line for line in said(printed, gone, "L3", "valid"))
    for level in LEVELS: assert any("value of SN099" in line for line in said(printed, false_fact, level, "facts"))
    assert any("names 'l2'" in line for line in said(printed, level_named, "all levels", "counts"))
    assert re.fullmatch(r"9 scenarios x 4 levels: \d+ problems", printed[-1])

def test_value_that_cannot_be_known(copied, capsys):
    "A look-up left out at one level: the ids that it showed can no longer be known there."
    number = number_of(lambda s: s.gold("L4")[0].tool.startswith("list_") and any(str(v).startswith("DV") and str(v) not in s.user_prompt for c in s.gold("L4") for v in c.arguments.values()))
    copied(number, lambda s: s["gold_standard"]["L4"].pop(0))
    printed = lines(capsys, 1, "smarthome", "--level", "L4", "--level", "L1")
    assert any("stands neither in the request nor in an earlier result" in line for line in said(printed, number, "L4", "derivable"))
    assert not said(printed, number, "L1", "derivable")

def test_refused_call(copied, capsys):
    "A gold call that the domain refuses is shown with the refusal."
    number = number_of(lambda s: any(c.tool == "set_device" for c in s.gold("L4")))
    def point_elsewhere(s): next(c for c in s["gold_standard"]["L4"] if c["tool"] == "set_device")["arguments"]["device_id"] = "DV099"
    copied(number, point_elsewhere)
    assert any("refused: device_id: there is no device 'DV099'" in line for line in said(lines(capsys, 1, "smarthome", "--level", "L4"), number, "L4", "valid"))

# ---- a domain and a level of one's own

def test_own_level_without_gold(tmp_path, capsys):
    "A level that the scenarios do not know is said so, whatever else is verified."
    own = tmp_path / "two.py"
    own.write_text("from granite.level import Level\nlevel = Level('two', lambda d: {'look': [f for f in d.primitives if f.effect == 'read'], 'do': [f for f in d.primitives if f.effect == 'write']})\n")
    assert main(["verify", "smarthome", "--level", str(own)]) != 0
    assert "gold_standard has no two" in "".join(capsys.readouterr())

# ---- everything, timed

def test_all_domains(capsys):
    began, cpu = time.perf_counter(), time.process_time()
    printed = lines(capsys, 0)
    with capsys.disabled(): print(f"\ngranite verify: {time.perf_counter() - began:.1f} s, {time.process_time() - cpu:.1f} s of processor time")
    assert printed[-1] == f"{9 * len(domain_names())} scenarios x 4 levels: all 8 checks hold"
