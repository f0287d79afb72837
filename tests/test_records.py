"""Run folders under real faults: kill -9, two writers, a full disk, a read-only folder, many trials."""
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from granite.records import DiskError, RecordError, Run, RunBusy

ROOT = Path(__file__).resolve().parents[1]
TRIAL = {
    "key": "k", "model": "toy", "domain": "home", "level": "L4", "scenario": "home-001", "repetition": 0,
    "started_at": "2026-11-30T18:00:00Z", "started_mono": 1.0, "wall_s": 2.0, "status": "ok", "protocol": "native",
    "interface_digest": "a", "scenario_digest": "b", "seed_digest": "c", "request": "Switch the lamp on.",
    "model_calls": [{"index": i, "start_s": float(i), "latency_s": 0.5, "content": "word " * 40, "prompt_tokens": 300,
                     "tool_calls": [{"id": "c", "name": "set_lamp", "arguments": '{"lamp_id": "LA001"}'}]} for i in range(5)],
    "tool_calls": [{"index": i, "model_call": i, "id": "c", "name": "set_lamp", "arguments": {"lamp_id": "LA001", "power": "on"}, "kind": "ok",
                    "is_error": False, "result": json.dumps([{"id": f"LA{j:03}", "power": "off", "room": "hall"} for j in range(9)]),
                    "start_s": 1.0, "latency_s": 0.01} for i in range(4)],
    "end_state": {"changed": {"lamps": {"LA001": {"id": "LA001", "power": "on"}}}}}


def trial(number, **other):
    return TRIAL | {"key": f"{number:016x}", "repetition": number} | other


def child(code, *arguments, **options):
    """A python process that imports this file as `t`."""
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\nimport test_records as t\nfrom granite.records import *\n"
    return subprocess.Popen([sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


WRITER = """
    with Run(sys.argv[1]).open() as run:
        done = run.done_keys()
        print("open", len(done), flush=True)
        for n in range(int(sys.argv[2])):
            if t.trial(n)["key"] in done: continue
            run.append(t.trial(n))
            print(n, flush=True)
"""


def test_kill_9_in_the_middle_loses_nothing_and_repeats_nothing(tmp_path):
    folder, confirmed, draw = tmp_path / "run", set(), random.Random(7)
    for _ in range(6):
        before = Run(folder).done_keys()
        process = child(WRITER, folder, 100000)
        assert process.stdout.readline().split() == ["open", str(len(before))]
        for _ in range(draw.randint(1, 25)): confirmed.add(int(process.stdout.readline()))
        time.sleep(draw.random() / 100)
        process.send_signal(signal.SIGKILL)
        confirmed |= {int(line) for line in process.communicate(timeout=20)[0].split()}
        assert {f"{n:016x}" for n in confirmed} <= Run(folder).done_keys()
    with Run(folder).open() as run:
        keys = [t.key for t in run.every_trial()]
    assert len(keys) == len(set(keys)) >= len(confirmed) > 0


def test_a_kill_anywhere_in_the_last_line(tmp_path):
    run = Run(tmp_path)
    with run.open():
        run.append(trial(0, model_calls=[], tool_calls=[]))
        run.append(trial(1, model_calls=[], tool_calls=[], answer="é"))
    data = (tmp_path / "trials.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for end in [*range(first, len(data) - 12, 5), *range(len(data) - 12, len(data) + 1)]:
        (tmp_path / "trials.jsonl").write_bytes(data[:end])
        with run.open(): kept = len(run.every_trial())
        assert kept == (2 if end >= len(data) - 1 else 1)
        assert (tmp_path / "trials.jsonl").read_bytes() == (data if kept == 2 else data[:first])
    torn = (tmp_path / "trials.torn").read_bytes()
    assert all(data[first:end] + b"\n" in torn for end in range(len(data) - 12, len(data) - 1))


def test_a_second_sweep_on_the_same_folder_is_told_who_is_there(tmp_path):
    holder = child("""
        with Run(sys.argv[1]).open():
            print("here", flush=True)
            sys.stdin.read()
    """, tmp_path, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "here\n"
    with pytest.raises(RunBusy, match=rf"process {holder.pid} on .* is writing here; wait for it, stop it, or choose another folder"):
        Run(tmp_path).open()
    assert Run(tmp_path).trials() == []  # reading is not locked
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=20)
    with Run(tmp_path).open() as run: run.append(trial(1))  # a killed process leaves no lock behind


def test_an_exception_while_opening_lets_go_of_the_lock(tmp_path, monkeypatch):
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(DiskError): Run(tmp_path).open()
    (tmp_path / "trials.jsonl").rmdir()
    with Run(tmp_path).open() as run: run.append(trial(1))


def test_threads_do_not_mix_their_lines(tmp_path):
    with Run(tmp_path).open() as run:
        threads = [threading.Thread(target=lambda a=a: [run.append(trial(a * 100 + n)) for n in range(25)]) for a in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(60)
    assert len(Run(tmp_path).done_keys()) == 100


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path, monkeypatch):
    real, taken = os.write, []

    def nearly_full(fd, data):
        if taken: raise OSError(28, "No space left on device")
        taken.append(real(fd, data[:100]))
        return taken[0]

    with Run(tmp_path).open() as run:
        run.append(trial(0))
        before = (tmp_path / "trials.jsonl").read_bytes()
        monkeypatch.setattr(os, "write", nearly_full)
        with pytest.raises(DiskError, match="trials.jsonl: the disk is full; free some space and start again"): run.append(trial(1))
        monkeypatch.undo()
        assert taken == [100]
        assert (tmp_path / "trials.jsonl").read_bytes() == before
        run.append(trial(2))
    assert [t.repetition for t in Run(tmp_path).trials()] == [0, 2]


def can_mount():
    try: return subprocess.run(["unshare", "-rm", "true"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError): return False


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own")
def test_a_real_full_disk(tmp_path):
    code = f"""
        import os, subprocess
        folder = sys.argv[1]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], check=True)
        run, n = Run(folder + "/run").open(), 0
        try:
            while n < 1000: run.append(t.trial(n)); n += 1
        except DiskError as e: print(e)
        assert 0 < n < 1000 and len(run.done_keys()) == n, n
        assert os.path.getsize(folder + "/run/trials.jsonl") == sum(len(l) + 1 for l in run.lines())
        try: run.write_manifest({{"a": "x" * 200000}})
        except DiskError as e: print(e)
        run.close()
        assert sorted(os.listdir(folder + "/run")) == [".lock", "trials.jsonl"], os.listdir(folder + "/run")
        subprocess.run(["mount", "-o", "remount,size=1m", folder], check=True)
        with Run(folder + "/run").open() as run: run.append(t.trial(n))
        assert len(run.done_keys()) == n + 1
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        assert len(Run(folder + "/run").trials()) == n + 1
        for where in ("/run", "/new"):
            try: Run(folder + where).open()
            except DiskError as e: print(e)
    """
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\nimport test_records as t\nfrom granite.records import *\n"
    done = subprocess.run(["unshare", "-rm", sys.executable, "-c", head + textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.removeprefix(str(tmp_path)) for line in done.stdout.splitlines()] == [
        "/run/trials.jsonl: the disk is full; free some space and start again (finished trials are kept)",
        "/run/manifest.json: the disk is full; free some space and start again (finished trials are kept)",
        "/run: this folder is read-only; choose another one", "/new: this folder is read-only; choose another one"]


def test_a_folder_without_write_permission(tmp_path):
    runs = tmp_path / "runs"
    with Run(runs / "old").open() as run: run.append(trial(0))
    for path in (runs / "old", runs): path.chmod(0o555)
    code = """
        import os, filelock
        if os.getuid() == 0: os.setgid(65534); os.setuid(65534)
        for name in ("new", "old"):
            try: Run(sys.argv[1] + "/" + name).open()
            except DiskError as e: print(e)
        print(len(Run(sys.argv[1] + "/old").trials()))
    """
    for parent in [tmp_path, *tmp_path.parents]:  # let the other user as far as here
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/") and parent != Path("/tmp"): parent.chmod(0o755)
    try: out, err = child(code, runs).communicate(timeout=60)
    finally:
        for path in (runs, runs / "old"): path.chmod(0o755)
    assert out.splitlines() == [f"{runs}/new: no permission to write here; choose another folder",
                                f"{runs}/old: no permission to write here; choose another folder", "1"], err


def test_nothing_of_the_environment_s_keys_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-street-9")
    with Run(tmp_path).open() as run:
        run.append(trial(0, status="infra", error={"kind": "infra", "message": "401: sesame-street-9 is not a key"}, answer="sesame-street-9"))
        run.write_manifest({"options": {"api_key": "another", "url": "http://h/?key=sesame-street-9"}})
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"sesame" not in written and b"another" not in written


def test_a_run_of_a_newer_format_is_refused_with_the_line(tmp_path):
    (tmp_path / "trials.jsonl").write_text(json.dumps(TRIAL) + "\n" + json.dumps(TRIAL | {"status": "paused"}) + "\n")
    with pytest.raises(RecordError, match=r"trials.jsonl line 2: not a trial of format 1 \(Invalid enum value 'paused'"): Run(tmp_path).trials()


@pytest.mark.slow
def test_8748_trials_are_read_quickly(tmp_path):
    line = json.dumps(trial(0))
    (tmp_path / "trials.jsonl").write_text("".join(line.replace('"key": "0000000000000000", ', f'"key": "{n:016x}", ').replace('"repetition": 0', f'"repetition": {n}') + "\n" for n in range(8748)))
    run, times = Run(tmp_path), []
    for _ in range(3):
        begin = time.process_time()  # other work on the machine does not count
        assert len(run.trials()) == 8748
        times.append(time.process_time() - begin)
    print(f"8748 trials, {(tmp_path / 'trials.jsonl').stat().st_size / 1e6:.0f} MB: {min(times):.2f} s")
    assert min(times) < 1.5
