"""Telemetry through a real Prometheus and a real Netdata, on a scripted sweep whose joules are known."""
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

import pytest

from granite.meters import CurveMeter, Meter, ProcessMeter, SystemMeter
from granite.telemetry import Sampler, energy_per_trial
from granite.timeseries import Chart, exporting, read_netdata, read_prometheus

ROOT = Path(__file__).parent.parent
PROMETHEUS = shutil.which("prometheus")
NETDATA = shutil.which("netdata") or next((p for p in ("/usr/sbin/netdata",) if Path(p).exists()), None)
pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(url, process, seconds=30):
    "Until the address answers; the process' own words if it does not."
    for _ in range(seconds * 5):
        try: return urllib.request.urlopen(url, timeout=2).read()
        except OSError: time.sleep(0.2)
        if process.poll() is not None: break
    pytest.fail(f"{url} does not answer: {Path(process.log).read_text()[-2000:]}")


def start(command, log):
    process = subprocess.Popen(command, stdout=open(log, "w"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    process.log = log
    return process


def stop(process):
    process.terminate()
    try: process.wait(10)
    except subprocess.TimeoutExpired: process.kill(); process.wait(5)


class Loads:
    "40 W at rest, 70 W inside a trial; and the counter that belongs to it."
    def __init__(self): self.spans, self.zero = [], time.monotonic()
    def watts(self, t): return 70. if any(a <= t < b for a, b in self.spans) else 40.
    def joules(self, t): return 40 * (t - self.zero) + 30 * sum(max(0, min(t, b) - a) for a, b in self.spans)


class Card(CurveMeter):
    "A card that gives everything the dashboard shows."
    def read(self): return super().read() | dict(utilisation_pct=80., memory_mib=4096., temperature_c=61.)


def scripted_sweep(loads, mark, levels=("L4", "L3", "L2", "L1"), seconds=2.5, rest=0.5):
    "One trial a level that only waits; returns what joins it to samples."
    trials = []
    for level in levels:
        begin, at = time.monotonic(), time.time()
        loads.spans.append((begin, begin + seconds))
        mark(f"key-{level}", "model", domain="smarthome", level=level)
        time.sleep(seconds)
        mark(f"key-{level}", "end")
        loads.spans[-1] = (begin, time.monotonic())
        trials.append(dict(key=f"key-{level}", started_mono=begin, wall_s=loads.spans[-1][1] - begin,
                           started_at=datetime.fromtimestamp(at, timezone.utc).isoformat(), level=level))
        time.sleep(rest)
    return trials


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    "A Prometheus that scrapes an exporter with the committed configuration (ports apart), and the sweep it saw."
    if not PROMETHEUS: pytest.skip("prometheus is not installed (apt-get install prometheus)")
    tmp, port, target = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    config = (ROOT / "deploy/prometheus.yml").read_text()
    assert "127.0.0.1:9464" in config and "scrape_interval: 1s" in config
    config = config.replace("127.0.0.1:9464", f"127.0.0.1:{target}").replace("scrape_interval: 1s", "scrape_interval: 250ms").replace("scrape_timeout: 900ms", "scrape_timeout: 250ms")
    (tmp / "prometheus.yml").write_text(config)
    process = start([PROMETHEUS, f"--config.file={tmp}/prometheus.yml", f"--storage.tsdb.path={tmp}/data", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], str(tmp / "log"))
    url, loads = f"http://127.0.0.1:{port}", Loads()
    try:
        wait_for(f"{url}/-/ready", process)
        meters = [Card(loads.watts, "card", joules=loads.joules), Meter("rapl", "J", "cpu", missing="no RAPL domain"), ProcessMeter(), SystemMeter()]
        with Sampler(meters, 0.1, labels=dict(run="scripted", model="demo")) as sampler, exporting(sampler, target):
            for _ in range(60):        # Prometheus takes some seconds to look at its first target
                if query(url, 'granite_power_watts'): break
                time.sleep(0.25)
            else: pytest.fail(f"Prometheus scraped nothing: {Path(process.log).read_text()[-2000:]}")
            time.sleep(0.5)
            begin = time.time()
            sampler.baseline(2.0)
            trials = scripted_sweep(loads, sampler.mark)
            time.sleep(1)
            yield dict(url=url, begin=begin, end=time.time(), trials=trials, sampled=sampler.frame(), sampler=sampler)
    finally: stop(process)


def query(url, expression):
    reply = urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode(dict(query=expression))}", timeout=10)
    return json.load(reply)["data"]["result"]


def test_prometheus_agrees_with_the_sampler(prometheus):
    p = prometheus
    read = read_prometheus(p["url"], p["begin"], p["end"], step_s=0.1, match='run="scripted"')
    energy, direct = energy_per_trial(read, p["trials"]), energy_per_trial(p["sampled"], p["trials"])
    assert set(energy.energy_clock) == {"wall"} and set(direct.energy_clock) == {"monotonic"}
    for there, here, trial in zip(energy.itertuples(), direct.itertuples(), p["trials"]):
        truth = 70 * trial["wall_s"]
        assert here.energy_j == pytest.approx(truth, rel=0.03)
        assert there.energy_j == pytest.approx(truth, rel=0.12)     # a scrape every 250 ms: an edge may be off by one
        assert there.energy_samples >= 5 and there.energy_coverage > 0.99
        assert there.energy_above_idle_j == pytest.approx(30 * trial["wall_s"], rel=0.3)
    assert (read.missing == "no RAPL domain").any()


def test_each_sample_is_read_once_at_its_own_time(prometheus):
    p = prometheus
    read = read_prometheus(p["url"], p["begin"], p["end"], step_s=0.1)
    card = read[(read.meter == "curve:card") & read.power_w.notna()]
    assert not card.wall.duplicated().any()
    assert card.wall.diff().median() == pytest.approx(0.25, abs=0.05)


def test_energy_by_level_is_on_the_exporter(prometheus):
    p = prometheus
    by_level = {r["metric"]["level"]: float(r["value"][1]) for r in query(p["url"], 'sum by (level) (granite_energy_joules_total{phase="model"})')}
    for trial in p["trials"]: assert by_level[trial["level"]] == pytest.approx(70 * trial["wall_s"], rel=0.1)


def test_labels_stay_bounded(prometheus):
    p = prometheus
    names = {n for r in query(p["url"], '{__name__=~"granite_.*"}') for n in r["metric"]}
    assert names <= {"__name__", "job", "instance", "meter", "kind", "run", "model", "domain", "level", "phase", "reason"}
    assert not any("key-" in v for r in query(p["url"], '{__name__=~"granite_.*"}') for v in r["metric"].values())


def test_dashboard_queries_are_answered(prometheus):
    "Every expression of the dashboard is valid and shows something."
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    empty = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r"\$\{?(run|model)\}?", ".*", target["expr"]).replace("$__rate_interval", "5s")
            assert "$" not in expression, expression
            if not query(prometheus["url"], expression): empty.add(panel["title"])
    assert not empty
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query": continue
        selector = re.match(r"label_values\((.*), *\w+\)$", variable["definition"]).group(1)
        assert query(prometheus["url"], selector.replace("$run", ".*")), variable["definition"]


def test_scrape_configuration_is_valid():
    tool = shutil.which("promtool")
    if not tool: pytest.skip("promtool is not installed (apt-get install prometheus)")
    checked = subprocess.run([tool, "check", "config", str(ROOT / "deploy/prometheus.yml")], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stdout + checked.stderr


NETDATA_CONF = """
[global]
    run as user = root
[directories]
    config = {tmp}
    stock config = {tmp}
    log = {tmp}
    cache = {tmp}
    lib = {tmp}
    lock = {tmp}
[db]
    mode = ram
    update every = 1
    retention = 600
[ml]
    enabled = no
[health]
    enabled = no
[registry]
    enabled = no
[cloud]
    enabled = no
[plugins]
    enable running new plugins = no
    timex = no
    tc = no
    idlejitter = no
    diskspace = no
    cgroups = no
    slabinfo = no
    netdata monitoring = no
    checks = no
    proc = yes
    statsd = yes
[web]
    bind to = 127.0.0.1:{port}
[statsd]
    bind to = udp:127.0.0.1:{statsd}
    update every (flushInterval) = 1
    private charts hidden = no
"""


@pytest.fixture(scope="module")
def netdata(tmp_path_factory):
    "A Netdata that is fed a scripted sweep's power through its statsd collector."
    if not NETDATA: pytest.skip("netdata is not installed (apt-get install netdata-core)")
    tmp, port, statsd = tmp_path_factory.mktemp("netdata"), free_port(), free_port()
    (tmp / "netdata.conf").write_text(NETDATA_CONF.format(tmp=tmp, port=port, statsd=statsd))
    (tmp / ".opt-out-from-anonymous-statistics").touch()
    process = start([NETDATA, "-D", "-c", str(tmp / "netdata.conf"), "-P", str(tmp / "pid")], str(tmp / "log"))
    url, loads = f"http://127.0.0.1:{port}", Loads()
    feed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        wait_for(f"{url}/api/v1/info", process)
        sampler = Sampler([CurveMeter(loads.watts, "card")], 0.1)
        sampler.listeners.append(lambda row: row.get("power_w") and feed.sendto(f"granite.power:{row['power_w']:.3f}|g".encode(), ("127.0.0.1", statsd)))
        with sampler:
            time.sleep(4)
            begin = time.time()
            trials = scripted_sweep(loads, sampler.mark, levels=("L4", "L3"), seconds=5.0, rest=2.0)
            time.sleep(2)
            yield dict(url=url, begin=begin - 2, end=time.time(), trials=trials)
    finally:
        stop(process)
        feed.close()


def test_netdata_joins_to_trials(netdata):
    n = netdata
    charts = json.loads(urllib.request.urlopen(f"{n['url']}/api/v1/charts", timeout=10).read())["charts"]
    mine, = [id for id in charts if "granite.power" in id or "granite_power" in id]
    read = read_netdata(n["url"], n["begin"], n["end"], [Chart(mine, "power_w", meter="netdata:card")])
    for row, trial in zip(energy_per_trial(read, n["trials"]).itertuples(), n["trials"]):
        assert row.energy_j == pytest.approx(70 * trial["wall_s"], rel=0.12)   # a mean a second
        assert row.energy_source == "netdata:card power" and row.energy_samples >= 4


def test_netdata_default_charts(netdata):
    read = read_netdata(netdata["url"], netdata["begin"], netdata["end"])
    system = read[read.meter == "system"]
    assert len(system) >= 8 and system.utilisation_pct.between(0, 100.5).all() and (system.memory_mib.dropna() > 50).all()
    assert energy_per_trial(read, netdata["trials"]).energy_missing.notna().all()   # no GPU chart here: missing, not 0
