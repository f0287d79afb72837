"""Telemetry under faults: a sampler that is killed, slow and vanishing GPUs, counters that start again, and what sampling costs."""
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from fake_nvml import FakeCard, FakeNvml

from granite.meters import CurveMeter, NvidiaMeter, ProcessMeter, discover_meters, nvidia_meters
from granite.telemetry import Sampler, energy_per_trial, read_telemetry, resources_per_trial

ROOT = Path(__file__).parent.parent


def trial(sampler, key, seconds):
    "A trial that only waits."
    start, at = time.monotonic(), time.time()
    sampler.mark(key, "start")
    time.sleep(seconds)
    sampler.mark(key, "end")
    return dict(key=key, started_mono=start, started_at=datetime.fromtimestamp(at, timezone.utc).isoformat(), wall_s=time.monotonic() - start)


def counting_card(watts=50.0, **more):
    zero = time.monotonic()
    return FakeCard(power_mw=int(watts * 1000), energy_mj=lambda t: (t - zero) * watts * 1000, **more)


def test_counter_and_integrated_power_agree_on_a_stand_in_card():
    with Sampler(nvidia_meters(FakeNvml([counting_card(50), counting_card(30)]))) as s:
        t = trial(s, "t", 1.5)
        time.sleep(0.2)
    e = energy_per_trial(s.frame(), [t]).iloc[0]
    assert e.energy_counter_j == pytest.approx(80 * t["wall_s"], rel=0.02)
    assert e.energy_integrated_j == pytest.approx(80 * t["wall_s"], rel=0.02)
    assert e.energy_source == "nvidia:0 counter + nvidia:1 counter"
    r = resources_per_trial(s.frame(), [t]).iloc[0]
    assert r.gpu_utilisation_pct == pytest.approx(37) and r.gpu_memory_mib == 2 * 5120 and r.gpu_temperature_c == 54 and r.gpu_throttled_share == 1


def test_slow_calls_delay_only_their_own_meter():
    slow = FakeNvml([counting_card(50, delay_s=0.06)])
    with Sampler([*nvidia_meters(slow), CurveMeter(lambda t: 1.0, "quick", kind="system")], 0.05) as s:
        time.sleep(1.0)
        t = trial(s, "t", 4.0)
        time.sleep(1.0)
    df = s.frame()
    card, quick = df[df.meter == "nvidia:0"], df[df.meter == "curve:quick"]
    assert len(quick) > 60 and quick.mono.diff().quantile(0.9) < 0.15      # 50 ms, on a busy machine
    assert card.read_ms.median() > 150                                     # three calls of 60 ms each
    e = energy_per_trial(df, [t]).iloc[0]
    assert e.energy_j == pytest.approx(50 * t["wall_s"], rel=0.05) and e.energy_samples < 30


def test_a_reading_that_hangs_does_not_hold_the_run():
    class Hung(CurveMeter):
        def read(self): time.sleep(30); return {}
    before = time.monotonic()
    with Sampler([Hung(lambda t: 1.0, "hung")], 0.1) as s: t = trial(s, "t", 0.3)
    assert time.monotonic() - before < 5
    e = energy_per_trial(s.frame(), [t]).iloc[0]
    assert np.isnan(e.energy_j) and e.energy_missing


def test_vanished_gpu_is_missing_from_there_on():
    nvml = FakeNvml([counting_card(50)])
    with Sampler(nvidia_meters(nvml), 0.05) as s:
        time.sleep(0.3)
        first = trial(s, "first", 0.8)
        time.sleep(0.3)
        nvml.cards[0].fails = "NVML_ERROR_GPU_IS_LOST"
        second = trial(s, "second", 0.8)
    e = energy_per_trial(s.frame(), [first, second])
    assert e.energy_j[0] == pytest.approx(50 * first["wall_s"], rel=0.1)
    assert np.isnan(e.energy_j[1]) and e.energy_missing[1] == "nvidia:0: GPU is lost"
    assert (s.frame().missing.notna()).sum() == 1                          # it is not asked again


def test_a_driver_that_stumbles_once_goes_on():
    nvml = FakeNvml([counting_card(50)])
    with Sampler(nvidia_meters(nvml), 0.05) as s:
        time.sleep(0.3); nvml.cards[0].fails = "NVML_ERROR_TIMEOUT"; time.sleep(0.07); nvml.cards[0].fails = None
        t = trial(s, "t", 0.8)
        time.sleep(0.2)
    assert energy_per_trial(s.frame(), [t]).energy_j[0] == pytest.approx(50 * t["wall_s"], rel=0.1)


def test_counter_reset_falls_back_to_power():
    card = counting_card(50)
    nvml = FakeNvml([card])
    with Sampler(nvidia_meters(nvml), 0.1) as s:
        start, at = time.monotonic(), time.time()
        time.sleep(0.5)
        zero = time.monotonic()
        card.energy_mj = lambda t: (t - zero) * 50_000
        time.sleep(0.5)
        t = dict(key="t", started_mono=start, started_at=datetime.fromtimestamp(at, timezone.utc).isoformat(), wall_s=time.monotonic() - start)
        time.sleep(0.2)
    e = energy_per_trial(s.frame(), [t]).iloc[0]
    assert e.energy_source == "nvidia:0 power" and e.energy_j == pytest.approx(50 * t["wall_s"], rel=0.05)


@pytest.mark.parametrize("card", [FakeCard(lacks={"power", "instant", "energy"}, vgpu=True), FakeCard(mig=True), FakeCard(power_mw=0, lacks={"energy"})], ids=["vgpu", "mig", "zero"])
def test_no_power_is_missing_and_never_zero(card):
    with Sampler(nvidia_meters(FakeNvml([card]))) as s: t = trial(s, "t", 0.5)
    e = energy_per_trial(s.frame(), [t]).iloc[0]
    assert np.isnan(e.energy_j) and np.isnan(e.mean_power_w) and e.energy_missing.startswith("nvidia:0: ")
    assert not (s.frame().power_w == 0).any()


def test_killed_sampler_leaves_its_samples(tmp_path):
    "kill -9: what was flushed is read, nothing is torn, and the next sampler folds it in."
    path = tmp_path / "telemetry.parquet"
    code = f"""
        import time
        from granite.meters import CurveMeter
        from granite.telemetry import Sampler
        with Sampler([CurveMeter(lambda t: 42.)], 0.02, {str(path)!r}, flush_s=0.3) as s:
            s.mark("k", "start")
            print("up", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert child.stdout.readline().strip() == "up"
        time.sleep(2)
    finally: os.kill(child.pid, signal.SIGKILL); child.wait(10)
    left = read_telemetry(path)
    assert not path.exists() and (left.power_w == 42).sum() > 30 and (left.trial == "k").any()
    with Sampler([CurveMeter(lambda t: 43.0)], 0.05, path): time.sleep(0.3)
    whole = read_telemetry(path)
    assert path.exists() and (whole.power_w == 42).sum() >= (left.power_w == 42).sum() and (whole.power_w == 43).any()
    assert not list(tmp_path.glob(".telemetry*"))


def test_a_full_disk_loses_samples_not_the_run(tmp_path):
    path = tmp_path / "nowhere" / "telemetry.parquet"
    (tmp_path / "nowhere").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="telemetry .* is lost"):
        with Sampler([CurveMeter(lambda t: 42.0)], 0.02, path, flush_s=0.1) as s:
            time.sleep(0.4)
            t = trial(s, "t", 0.3)                  # the run goes on
            path.parent.unlink()
            s.write()                               # and can be written once there is room
            assert (read_telemetry(path).power_w == 42).sum() > 10
            shutil.rmtree(path.parent); path.parent.write_text("again")


@pytest.mark.slow
def test_sampling_costs_under_a_hundredth_of_a_core():
    nvml = FakeNvml([counting_card(50)])
    with Sampler([*nvidia_meters(nvml), *(m for m in discover_meters() if not m.missing), ProcessMeter(os.getpid(), "model-server", children=True)]) as s: time.sleep(10)
    assert s.cost()["share_of_one_core"] < 0.01, s.cost()


NVML_C = """
#include <string.h>
typedef void* dev; typedef struct { unsigned gpu, memory; } util; typedef struct { unsigned long long total, free, used; } mem;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; int valueType, nvmlReturn; union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value; } field;
static unsigned long long joules_mj = 5000000;
int nvmlInit_v2(void){return 0;} int nvmlInitWithFlags(unsigned f){return 0;} int nvmlShutdown(void){return 0;}
const char* nvmlErrorString(int e){return e==3?"Not Supported":"error";}
int nvmlDeviceGetCount_v2(unsigned* n){*n=2;return 0;}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, dev* d){*d=(dev)(long)(i+1);return 0;}
int nvmlDeviceGetName(dev d, char* s, unsigned n){strncpy(s,"Recorded T4",n);return 0;}
int nvmlDeviceGetTotalEnergyConsumption(dev d, unsigned long long* e){if((long)d==2)return 3;joules_mj+=6000;*e=joules_mj;return 0;}
int nvmlDeviceGetPowerUsage(dev d, unsigned* p){if((long)d==2)return 3;*p=61500;return 0;}
int nvmlDeviceGetFieldValues(dev d, int n, field* v){for(int i=0;i<n;i++){v[i].nvmlReturn=(long)d==2?3:0;v[i].value.ui=60250;}return 0;}
int nvmlDeviceGetUtilizationRates(dev d, util* u){u->gpu=88;u->memory=41;return 0;}
int nvmlDeviceGetMemoryInfo(dev d, mem* m){m->total=16ull<<30;m->used=3ull<<30;m->free=13ull<<30;return 0;}
int nvmlDeviceGetTemperature(dev d, int s, unsigned* t){*t=63;return 0;}
int nvmlDeviceGetClockInfo(dev d, int c, unsigned* m){*m=c==2?5001:1590;return 0;}
int nvmlDeviceGetCurrentClocksEventReasons(dev d, unsigned long long* r){*r=4;return 0;}
int nvmlDeviceGetMigMode(dev d, unsigned* c, unsigned* p){return 3;}
int nvmlDeviceGetVirtualizationMode(dev d, int* m){*m=(long)d==2?2:0;return 0;}
"""


def test_the_real_pynvml_on_a_shared_library_that_serves_recorded_values(tmp_path):
    "The package's own bindings, down to the C calls; the second card is a vGPU guest."
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler: pytest.skip("no C compiler to build the stand-in library (apt-get install gcc)")
    (tmp_path / "nvml.c").write_text(NVML_C)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"], check=True, timeout=60)
    code = """
        import json
        from granite.meters import discover_meters
        cards = [m for m in discover_meters() if m.kind == "gpu"]
        first = [m.read() for m in cards]
        print(json.dumps([[m.name, m.model, m.lacks, a, m.read()] for m, a in zip(cards, first)]))
    """
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    (name, model, _, first, second), (_, _, lacks, guest, _) = json.loads(done.stdout)
    assert (name, model) == ("nvidia:0", "Recorded T4")
    assert first == dict(energy_j=0, power_w=60.25, utilisation_pct=88, memory_mib=3072, temperature_c=63, clock_mhz=1590, memory_clock_mhz=5001, throttle=4)
    assert second["energy_j"] == 6
    assert lacks["power_w"] == "a vGPU guest has no power sensor" and "power_w" not in guest and guest["utilisation_pct"] == 88


def test_importing_needs_no_driver_and_no_client():
    code = "import sys, granite.telemetry, granite.timeseries; assert not {'pynvml','psutil','prometheus_client','matplotlib','mcp','litellm'} & set(sys.modules), sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0, done.stderr


def test_monitor_stops_cleanly_on_interrupt():
    code = "from granite.timeseries import monitor; monitor(port=0)"
    child = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) # who runs the tests may ignore it
    try:
        assert "meters at http://127.0.0.1:" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=10)
    finally:
        if child.poll() is None: child.kill()
    assert child.returncode == 0 and err == ""
