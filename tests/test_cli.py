"""The `granite` command as a person or a script meets it: pages, exit codes, one line for a mistake, no colours in a pipe."""

import os
import pty
import re
import subprocess
import sys

import pytest

from granite.cli import main, parser

COMMANDS = ["models", "verify", "plan", "run", "serve", "monitor", "score", "show", "compare", "report", "export"]
GRANITE = [sys.executable, "-m", "granite.cli"]

def granite(*argv, **options):
    "Run the command with pipes."
    return subprocess.run([*GRANITE, *argv], capture_output=True, text=True, timeout=120, **options)

def on_a_terminal(*argv, **env):
    "What the command writes to a terminal, and its exit code."
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*GRANITE, *argv], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **env})
    os.close(theirs)
    out = b""
    while True:
        try: part = os.read(ours, 4096)
        except OSError: break
        if not part: break
        out += part
    os.close(ours)
    return out.decode(), process.wait(60)

def commands():
    return parser()._subparsers._group_actions[0].choices

def test_help_is_a_page():
    page = granite("--help").stdout
    assert list(commands()) == COMMANDS
    for command in COMMANDS: assert re.search(rf"^  {command} ", page, re.M), command
    assert "Exit codes: 0 good" in page and max(map(len, page.splitlines())) <= 120

def test_options_are_named_alike_and_explained():
    meaning = {}
    for command, page in commands().items():
        for action in page._actions:
            name = (action.option_strings or [action.dest])[-1]
            if name not in ("what", "domain", "level", "run", "--run", "--help"): assert action.help, (command, name)
            if name.startswith("--"): meaning.setdefault(name, set()).add(action.help)
    assert {name for name, texts in meaning.items() if len(texts) > 1} == set()
    assert meaning["--out"] and meaning["--level"]

@pytest.mark.parametrize("argv,says", [
    ([], "granite: the following arguments are required: COMMAND; see granite --help"),
    (["fly"], "granite: argument COMMAND: invalid choice: 'fly'"),
    (["serve", "smarthome"], "granite serve: the following arguments are required: LEVEL; see granite serve --help"),
    (["verify", "smarthouse"], "granite verify: domain 'smarthouse': not known"),
    (["verify", "smarthome", "--level", "L9"], "granite verify: level 'L9': not known"),
    (["plan", "nothing.yaml"], "granite plan: "),
    (["run", "no-such-model"], "granite run: "),
    (["score", "nowhere"], "granite score: there is no run 'nowhere' in runs; there are: "),
    (["show", "nowhere", "smarthome-001"], "granite show: there is no run 'nowhere'"),
    (["report", "nowhere"], "granite report: "),
    (["export", "nowhere", "--csv"], "granite export: there is no run 'nowhere' in runs"),
    (["export", "nowhere"], "granite export: as what? choose --inspect, --parquet, --csv or --card"),
    (["models", "pull", "no-such-model"], "granite models: "),
    (["monitor"], "granite monitor: the following arguments are required: --prometheus; see granite monitor --help"),
])
def test_a_mistake_is_one_line(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try: code = main(argv)
    except SystemExit as e: code = e.code
    out, err = capsys.readouterr()
    assert code == (1 if argv[:1] == ["run"] else 2)
    assert err.startswith(says) and err.count("\n") == 1 and not out

def test_no_colours_or_bars_in_a_pipe():
    done = granite("verify", "smarthome", "--level", "L4")
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    assert done.stderr == "" and done.stdout.rstrip().endswith("all 8 checks hold")
    assert "\x1b" not in granite("score", "nowhere").stderr

def test_a_terminal_gets_a_bar_and_colours():
    text, code = on_a_terminal("verify", "smarthome", "--level", "L4")
    assert code == 0 and "\x1b" in text and "verify" in text and "smarthome-001" in text
    text, code = on_a_terminal("score", "nowhere")
    assert code == 2 and text.startswith("\x1b[31mgranite score\x1b[0m: ")
    assert on_a_terminal("score", "nowhere", NO_COLOR="1")[0].startswith("granite score: ")

def test_head_may_close_the_pipe():
    done = subprocess.run(["bash", "-c", 'set -o pipefail; "$0" -m granite.cli models | head -1', sys.executable], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("key") and "Traceback" not in done.stderr


def test_out_wins_over_the_folder_in_the_file(tmp_path, capsys):
    file = tmp_path / "e.yaml"
    file.write_text(f"models: [smollm2-135m]\ndomains: [smarthome]\nscenarios: [smarthome-001]\nout: {tmp_path}/theirs\n")
    for argv, folder in ((["plan", str(file)], "theirs"), (["plan", str(file), "--out", str(tmp_path / "mine")], "mine")):
        assert main(argv) == 0
        assert f"{tmp_path}/{folder}/smollm2-135m: 0 done, 4 open" in capsys.readouterr().out
