"A run of study B is killed at any instant and continued: nothing is lost, nothing is asked twice."
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from granite.toolcall.generate import Completion, Condition, load_replies, run_conditions, tidy

CHILD = """
import sys, time
from granite.toolcall.generate import Completion, Condition, run_conditions
class Slow:
    key, facts = "slow", {"sha256": "0" * 64}
    def chat(self, messages): return messages[-1]["content"]
    def complete(self, text, decoding, seed, schema=None, prefix=""):
        time.sleep(0.01)
        return Completion(f"{len(text)} {seed}", "stop")
run_conditions(Slow(), [Condition(), Condition("chat", "sampling")], sys.argv[1], repair=False)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_continued(tmp_path, seed):
    rng, rounds = random.Random(seed), 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "slow")], env=None)
        try:
            wait = None if rounds == 3 else 4 + rng.random() * 2
            child.wait(120 if wait is None else wait)
            break
        except subprocess.TimeoutExpired: child.kill(); child.wait(10)
        rounds += 1
        if rng.random() < 0.5 and (tmp_path / "slow" / "replies.jsonl").exists():
            with open(tmp_path / "slow" / "replies.jsonl", "ab") as f: f.write(b'{"key": "torn')
    assert child.returncode == 0
    records = tidy(tmp_path / "slow" / "replies.jsonl")
    assert len(records) == len({r["key"] for r in records}) == 200
    assert len(load_replies(tmp_path)) == 200
    assert all(r["reply"].endswith(str(r["seed"])) for r in records)
    assert json.loads((tmp_path / "slow" / "manifest.json").read_text())["conditions"] == ["base-chat-sampling-none-0", "base-raw-greedy-none-0"]


class Failing:
    "Fails once, as a server that died would"
    key, facts, left = "failing", {"sha256": "1" * 64}, 5
    def chat(self, messages): return messages[-1]["content"]
    def complete(self, text, decoding, seed, schema=None, prefix=""):
        self.left -= 1
        if not self.left: raise ConnectionError("gone")
        return Completion("{}", "stop")


def test_a_fault_is_no_reply(tmp_path):
    model = Failing()
    with pytest.raises(ConnectionError): run_conditions(model, [Condition()], tmp_path, limit=10)
    assert len(tidy(tmp_path / "replies.jsonl")) == 4
    assert run_conditions(model, [Condition()], tmp_path, limit=10) == 6


def test_records_name_no_machine(tmp_path):
    run_conditions(Failing(), [Condition()], tmp_path, limit=2)
    written = (tmp_path / "replies.jsonl").read_text() + (tmp_path / "manifest.json").read_text()
    assert str(Path.home()) not in written and str(tmp_path) not in written
