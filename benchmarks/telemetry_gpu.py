"""Counter against integrated power on a real NVIDIA card: idle, a load of known length, idle. About 50 seconds.

    python benchmarks/telemetry_gpu.py [seconds of load] > result.json

Needs nvidia-ml-py and a CUDA driver, nothing else: the load fills GPU memory through the driver's own API, so neither torch nor pandas is asked for.
"""
import ctypes
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from granite.meters import nvidia_meters  # noqa: E402


def load_gpu(seconds, spans, megabytes=1024):
    "Fill GPU memory for so long; appends (start, end) in monotonic seconds."
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *args):
        code = getattr(cuda, name)(*args)
        if code: raise RuntimeError(f"{name} returned {code}")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(megabytes << 20))
    words, start, value = ctypes.c_size_t(megabytes << 18), time.monotonic(), 0
    while time.monotonic() < start + seconds:
        for value in range(50): call("cuMemsetD32_v2", memory, ctypes.c_uint(value), words)
        call("cuCtxSynchronize")
    spans.append((start, time.monotonic()))
    call("cuMemFree_v2", memory)


def joules(samples, a, b):
    "Energy between a and b: by the counter, by trapezoids over sampled power, and how many samples."
    at = lambda x, q: next(p[q] + (n[q] - p[q]) * (x - p["t"]) / (n["t"] - p["t"]) for p, n in zip(samples, samples[1:]) if p["t"] <= x <= n["t"])
    inside = [dict(t=a, power_w=at(a, "power_w")), *(s for s in samples if a < s["t"] < b), dict(t=b, power_w=at(b, "power_w"))]
    power = sum((n["t"] - p["t"]) * (n["power_w"] + p["power_w"]) / 2 for p, n in zip(inside, inside[1:]))
    counter = at(b, "energy_j") - at(a, "energy_j") if "energy_j" in samples[0] else None
    return dict(seconds=b - a, samples=len(inside) - 2, integrated_j=power, counter_j=counter, mean_w=power / (b - a),
                peak_w=max(s["power_w"] for s in inside), integrated_over_counter=power / counter if counter else None)


def main(seconds=20.0, rest=10.0, period_s=0.1):
    meter = nvidia_meters()[0]
    if meter.missing or "power_w" not in meter.read(): return dict(missing=meter.missing or meter.lacks["power_w"])
    samples, spans, failed, done = [], [], [], threading.Event()

    def work():
        try:
            time.sleep(rest); load_gpu(seconds, spans); time.sleep(rest)
        except (OSError, RuntimeError) as e: failed.append(str(e))
        finally: done.set()
    threading.Thread(target=work, daemon=True).start()
    first = time.monotonic()
    while not done.is_set():
        before = time.monotonic()
        values = meter.read()
        samples.append(values | dict(t=(before + time.monotonic()) / 2, read_ms=(time.monotonic() - before) * 1e3))
        done.wait(period_s)
    if failed: return dict(missing=failed[0])
    (a, b), reads = spans[0], sorted(s["read_ms"] for s in samples)
    steps = sum(n["energy_j"] != p["energy_j"] for p, n in zip(samples, samples[1:])) if "energy_j" in samples[0] else None
    return dict(card=str(meter.model), lacks=meter.lacks, idle=joules(samples, first + 1, a - 1), load=joules(samples, a, b), last_5_s_of_load=joules(samples, b - 5, b),
                two_seconds_of_load=joules(samples, a + 3, a + 5), read_ms=dict(median=reads[len(reads) // 2], p95=reads[int(len(reads) * 0.95)]),
                readings=len(samples), readings_where_the_counter_moved=steps)


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0), indent=1))
