"""Trials in another order, and interrupted, give the same traces: with a real model on the embedded engine."""
import msgspec
import pytest

from granite.experiment import check_experiment
from granite.models import is_here, resolve
from granite.records import Run
from granite.sweep import Isolation, Sweep, make_ready, run_model, run_all, rehearse, usable

MODEL = "smollm2-135m"
pytestmark = pytest.mark.skipif(not is_here(resolve(MODEL)), reason=f"{MODEL} is not here: granite models pull {MODEL}")


def experiment(tmp_path, **more):
    return check_experiment({"models": [MODEL], "domains": ["smarthome"], "granularities": ["L2", "L1"], "scenarios": ["smarthome-001", "smarthome-002", "smarthome-003", "smarthome-004"], "meters": "off",
                             "max_tokens": 40, "max_agent_turns": 2, "context_tokens": 4096, "out": str(tmp_path)} | more)


def without_times(trial):
    "A trial, times aside."
    drop = {"started_at", "started_mono", "wall_s", "start_s", "latency_s"}
    timed = lambda k: k in drop or k.endswith("_ms") or "per_" in k
    def clean(value):
        if isinstance(value, dict): return {k: clean(v) for k, v in value.items() if not timed(k)}
        return [clean(v) for v in value] if isinstance(value, list) else value
    return clean(msgspec.to_builtins(trial))


def traces(run): return {t.key: without_times(t) for t in run.trials()}


def in_order(tmp_path, name, order):
    "A run of the cells in a given order."
    chosen = experiment(tmp_path)
    with Run(tmp_path / name).open() as run, usable(chosen, MODEL) as backend:
        ready = make_ready(chosen, backend)
        cells = order(ready.cells)
        run.add_plan({c.place: c.key for c in cells})
        rehearse(cells[0])
        run_all(Sweep(run, chosen, backend, ready.access, ready.schema_tokens(), isolate=Isolation(backend, ready.protocol)), cells)
    return run


@pytest.mark.slow
def test_forwards_backwards_and_interrupted(tmp_path):
    forwards = run_model(experiment(tmp_path), MODEL, tmp_path / "forwards")
    assert forwards.manifest["options"]["isolation"] == "strict" and forwards.completeness()["done"] == 8
    backwards = in_order(tmp_path, "backwards", lambda cells: cells[::-1])
    class Enough(Exception): pass
    def stop(done, total, trial):
        if done == 3: raise Enough
    with pytest.raises(Enough): run_model(experiment(tmp_path), MODEL, tmp_path / "interrupted", progress=stop)
    assert Run(tmp_path / "interrupted").completeness()["done"] == 3
    interrupted = run_model(experiment(tmp_path), MODEL, tmp_path / "interrupted")
    expected = traces(forwards)
    assert len(expected) == 8 and traces(backwards) == expected and traces(interrupted) == expected
    first = [t.model_calls[0].timings for t in forwards.trials()]
    print("prompt tokens read in the first call of each trial:", [t["prompt_n"] for t in first], "from the slot:", [t["cache_n"] for t in first])
    assert all(t["cache_n"] > t["prompt_n"] for t in first), "the saved prefix was used"


@pytest.mark.slow
def test_two_slots_each_start_from_the_prefix(tmp_path):
    run = run_model(experiment(tmp_path, concurrency=2), MODEL, tmp_path / "slots")
    assert run.manifest["options"]["isolation"] == "slots" and run.completeness()["done"] == 8
    trials = run.trials()
    spans = sorted((t.started_mono, t.started_mono + t.wall_s) for t in trials)
    assert any(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:])), "two trials at once"
    first = [t.model_calls[0].timings for t in trials]
    assert all(t["cache_n"] > t["prompt_n"] for t in first), "each slot held the saved prefix"
