"""Analysis end to end: odd studies, the notebooks under papermill, and the benchmark's small design."""
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from granite import report, tables
from granite.frames import trials_frame
from granite.simulate import MODELS, Planted, simulate, write_simulated

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs" / "analysis").glob("0[1-8]_*.ipynb"))


def few(**options):
    "A small simulated study."
    return simulate(models=MODELS[:3], domains=("fleet", "energy"), scenarios=3, repetitions=2, **options)


def filled(frame, **columns):
    "Columns replaced by one value, in their own type."
    return frame.assign(**{name: pd.array([value] * len(frame), dtype=frame[name].dtype) for name, value in columns.items()})


ODD = {
    "one model": lambda f: f[f.model == MODELS[0].name],
    "one scenario": lambda f: f[f.scenario == "fleet-001"],
    "one trial": lambda f: f.iloc[:1],
    "nothing completed": lambda f: filled(f, tc=0),
    "everything completed": lambda f: filled(f, tc=1),
    "only L1": lambda f: f[f.level == "L1"],
    "two levels": lambda f: f[f.level.isin(["L3", "L4"])],
    "no sizes known": lambda f: filled(f, params_b=None).assign(size_class=pd.Categorical([None] * len(f), ["<8B", ">=8B"], ordered=True)),
    "no tokens reported": lambda f: filled(f, prompt_tokens=None, cached_tokens=None, completion_tokens=None, schema_tokens=None),
    "a model lost to infrastructure": lambda f: f.assign(infra=pd.array((f.model == MODELS[0].name).to_numpy(), dtype=f.infra.dtype)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_studies_give_words_instead_of_warnings(kind):
    study = report.Study([few(metered=True)])
    study.__dict__["trials"] = ODD[kind](study.trials).reset_index(drop=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = report.all_tables(study, draws=50)
        assert "table-2-granularity" in found
        for title, table in found.values():
            assert title.startswith("Simulated:")
            assert not report.readable(table).apply(lambda column: column.str.contains("nan|inf|None", regex=True)).any().any()
        for fig in report.all_figures(study, draws=50).values():
            if fig is not None: fig.canvas.draw(); plt.close(fig)
    assert report.headline(study, found["table-2-granularity"][1])


def test_planted_level_effect_is_found_and_a_null_is_not():
    none = {"L4": 1.0, "L3": 1.0, "L2": 1.0, "L1": 1.0}
    for odds, low, high in (({**none, "L3": 2.0}, 0.05, 0.30), (none, -0.06, 0.06)):
        trials = trials_frame(simulate(repetitions=1, planted=Planted(odds=odds), seed=5))
        means = tables.level_table(trials, np.random.default_rng(0), draws=50).set_index("level").tc
        assert low < means["L3"] - means["L4"] < high


def test_tables_do_not_depend_on_the_order_of_rows():
    trials = trials_frame(few())
    mixed = trials.sample(frac=1, random_state=1).reset_index(drop=True)
    for make in (tables.level_table, tables.model_table, tables.size_table, tables.correlation_table):
        first, second = (make(frame, np.random.default_rng(3)) for frame in (trials, mixed))
        pd.testing.assert_frame_equal(first, second)


def test_report_of_a_run_on_disk(tmp_path, capsys):
    run = write_simulated(few(metered=True), tmp_path / "simulated-0")
    files = report.report([run.path], tmp_path / "out", draws=50)
    names = {path.name for path in files}
    assert {"table-1-models.csv", "table-1-models.tex", "table-4-energy.html", "simulated-figure-8-power.svg", "simulated-figure-4-levels.json"} <= names
    assert all(path.stat().st_size for path in files)
    assert json.loads((tmp_path / "out" / "simulated-figure-4-levels.json").read_text())["simulated"] is True
    assert "Simulated: effect of granularity" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in files}
    report.report([run.path], tmp_path / "out", draws=50)
    assert before == {path: path.read_bytes() for path in files}, "the same runs give the same bytes"


def test_a_run_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no run 'nobody'"): report.open_study("nobody")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_on_given_runs(notebook, tmp_path):
    import papermill
    write_simulated(few(), tmp_path / "simulated-0")
    done = papermill.execute_notebook(str(notebook), str(tmp_path / "done.ipynb"), {"runs": [str(tmp_path / "simulated-0")], "draws": 50}, progress_bar=False, cwd=str(tmp_path))
    text = json.dumps([cell.get("outputs", []) for cell in done.cells])
    assert "`simulated-0` (" in text and "Simulated:" in text


@pytest.mark.slow
def test_benchmark_smoke():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "analysis.py"), "--smoke"], capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-800:]
    assert json.loads(done.stdout)["large"]["peak_gib"] > 0
