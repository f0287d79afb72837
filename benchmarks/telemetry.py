"""What sampling costs: share of one core, how even the sampling is and how fast pieces are written.

    python benchmarks/telemetry.py [seconds] > result.json

Meters: those of this host and a stand-in for an NVIDIA card (Python, so its calls cost what Python costs, not what a driver does).
"""
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from fake_nvml import FakeCard, FakeNvml  # noqa: E402

from granite.meters import ProcessMeter, discover_meters, nvidia_meters  # noqa: E402
from granite.telemetry import Sampler, read_telemetry  # noqa: E402
from granite.timeseries import exporting  # noqa: E402


def measure(meters, seconds, period_s=0.1, export=False):
    "Cost and spacing of one sampler on those meters."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "telemetry.parquet"
        before = time.process_time()
        with Sampler(meters, period_s, path) as sampler:
            if export:
                with exporting(sampler, 0): time.sleep(seconds)
            else: time.sleep(seconds)
            cost, process = sampler.cost(), time.process_time() - before
        df = read_telemetry(path)
        spacing = df[df.meter == meters[0].name].mono.diff().dropna() * 1e3
        return dict(meters=[m.name for m in meters], samples=len(df), threads_share_of_one_core=cost["share_of_one_core"],
                    whole_process_share_of_one_core=process / cost["elapsed_s"], read_ms_median=float(df.read_ms.median()),
                    spacing_ms={f"p{q}": float(spacing.quantile(q / 100)) for q in (5, 50, 95, 99)}, bytes_per_sample=path.stat().st_size / max(len(df), 1))


def main(seconds=30.0):
    here = lambda: [m for m in discover_meters() if not m.missing]
    card = lambda n=1: nvidia_meters(FakeNvml([FakeCard() for _ in range(n)]))
    server = ProcessMeter(os.getpid(), "model-server", children=True)
    return dict(host=dict(cpus=os.cpu_count(), machine=platform.machine(), python=platform.python_version(), load=os.getloadavg()), seconds=seconds, period_s=0.1,
                host_only=measure(here(), seconds), one_card=measure([*card(), *here(), server], seconds),
                one_card_exported=measure([*card(), *here(), server], seconds, export=True), eight_cards=measure([*card(8), *here(), server], seconds))


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0), indent=1))
