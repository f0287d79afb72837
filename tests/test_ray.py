"""A run on a real Ray cluster: two raylets on loopback, one of them killed in the middle."""
import os
import threading
import time
from pathlib import Path

import pytest

os.environ.setdefault("RAY_raylet_start_wait_time_s", "40") # a raylet that gave up on its agents is not waited for longer
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'granite[ray]'")
HERE = Path(__file__).parent

from granite.experiment import check_experiment  # noqa: E402
from granite.records import Run  # noqa: E402
from granite.scenario import load_scenarios  # noqa: E402
from granite.sweep import ScriptedBackend, SweepStopped, gold_model, run_model  # noqa: E402

PAUSE_S = 0.4


def scripted_backend():
    "The gold standard, with a pause before each reply."
    import asyncio
    play = gold_model(load_scenarios("smarthome"), wrong=lambda s, level: s.id == "smarthome-002")
    async def complete(**request):
        await asyncio.sleep(PAUSE_S)
        return await play(**request)
    return ScriptedBackend(complete)


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    old, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), path
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    for left in (3, 2, 1, 0): # Ray gives the agents of a raylet 15 s to start, too little on a busy machine
        try:
            made = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20})
            made.second = made.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            break
        except Exception as e:
            if not left: pytest.skip(f"no raylet starts on this machine now: {e}")
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()
    if old is None: os.environ.pop("PYTHONPATH")
    else: os.environ["PYTHONPATH"] = old


def experiment(tmp_path, **more):
    return check_experiment({"models": ["scripted"], "domains": ["smarthome"], "granularities": ["L3", "L1"], "meters": "off", "out": str(tmp_path)} | more)


def without_times(trial):
    "What a trial says, times and attempts aside."
    import msgspec
    drop = {"started_at", "started_mono", "wall_s", "start_s", "latency_s", "attempt"}
    def clean(value):
        if isinstance(value, dict): return {k: clean(v) for k, v in value.items() if k not in drop}
        return [clean(v) for v in value] if isinstance(value, list) else value
    return clean(msgspec.to_builtins(trial))


def test_two_nodes_one_of_them_killed_and_the_same_results_as_here(cluster, tmp_path):
    from granite.ray_executor import run_on_ray
    here = run_model(experiment(tmp_path / "here"), "scripted", tmp_path / "here" / "r", backend=scripted_backend())
    seen, killed = [], threading.Event()
    def progress(done, total, trial):
        seen.append(time.monotonic())
        if len(seen) == 4: threading.Thread(target=lambda: (cluster.remove_node(cluster.second, allow_graceful=False), killed.set())).start()
    run = run_on_ray(experiment(tmp_path / "ray", executor="ray", workers=2), "scripted", tmp_path / "ray" / "r", progress, make_backend=scripted_backend)
    assert killed.wait(30) and run.completeness() == here.completeness() == {"planned": 18, "done": 18, "infra": 0, "open": 0, "stale": 0}
    assert len(set(run.manifest["model"]["workers"])) == 2, "both nodes worked"
    keys = [t.key for t in run.every_trial()]
    assert len(keys) == len(set(keys)) == 18, "nothing ran twice"
    by_key = {t.key: without_times(t) for t in run.trials()}
    assert by_key == {t.key: without_times(t) for t in here.trials()}
    again = []
    run_on_ray(experiment(tmp_path / "ray", executor="ray", workers=1), "scripted", tmp_path / "ray" / "r", lambda *a: again.append(a), make_backend=scripted_backend)
    assert again == [], "what is done is not run again"


def test_a_model_that_is_not_there_is_one_line(cluster, tmp_path):
    from granite.ray_executor import run_on_ray
    with pytest.raises(SweepStopped, match="no Ray worker is up: .*No server answers"):
        run_on_ray(experiment(tmp_path, executor="ray", workers=1), "openai/away@http://127.0.0.1:9/v1", tmp_path / "r")
