"""How fast runs become frames and tables, and how much memory they take. Simulated trials; nothing here is a result.

    python benchmarks/analysis.py            # 8,748 trials, then 1,000,000
    python benchmarks/analysis.py --smoke    # a small design, for CI: checks that everything runs, judges no time

Seconds are wall clock with CPU seconds beside them: on a busy machine only the second is worth comparing.
"""
import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

DRAWS = 2000


def timed(work):
    "Result, wall seconds, CPU seconds."
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, round(time.perf_counter() - wall, 2), round(time.process_time() - cpu, 2)


def frames_from_disk(repetitions):
    "The three frames of a simulated run that lies on disk."
    from granite.frames import calls_frame, model_calls_frame, trials_frame
    from granite.records import Run
    from granite.simulate import simulate, write_simulated
    with tempfile.TemporaryDirectory() as folder:
        path = write_simulated(simulate(repetitions=repetitions), Path(folder) / "simulated").path
        size = (path / "trials.jsonl").stat().st_size / 1e6
        (trials, calls, asked), wall, cpu = timed(lambda: (trials_frame(Run(path)), calls_frame(Run(path)), model_calls_frame(Run(path))))
    return trials, {"trials": len(trials), "tool_calls": len(calls), "model_calls": len(asked), "trace_mb": round(size, 1), "wall_s": wall, "cpu_s": cpu}


def tables_of(trials, draws):
    "The tables of the paper: I to V with intervals, paired tests, regression, correlations."
    from granite import tables
    from granite.stats import odds_ratios
    rng = np.random.default_rng(0)
    return [tables.model_table(trials, rng, draws), tables.level_table(trials, rng, draws), tables.size_table(trials, rng, draws),
            tables.energy_table(trials, rng, draws=draws), tables.efficiency_table(trials), tables.correlation_table(trials, rng),
            tables.best_level_table(trials, rng, draws), tables.domain_table(trials), odds_ratios(tables.usable(trials))]


def plain_loop(means, draws, seed=0):
    "What one would write first: resample the models of a frame, draw after draw."
    rng, models = np.random.default_rng(seed), means.index.to_numpy()
    found = [means.loc[rng.choice(models, len(models))].mean() for _ in range(draws)]
    return np.quantile(np.array(found), [0.025, 0.975], axis=0)


def against_loop(trials, draws):
    "Table II's intervals, vectorised and as a pandas loop over draws."
    from granite.stats import bootstrap_table, cluster_means
    metrics = ["tc", "f1", "arg_acc"]
    loop, loop_wall, loop_cpu = timed(lambda: [plain_loop(cluster_means(trials, metric), draws) for metric in metrics])
    table, wall, cpu = timed(lambda: bootstrap_table(trials, metrics, np.random.default_rng(0), by="level", draws=draws))
    ours = np.array([[e.low, e.high] for _, _, e in table.rows])
    apart = float(np.abs(np.hstack(loop).T - ours).max())
    return {"draws": draws, "loop_wall_s": loop_wall, "loop_cpu_s": loop_cpu, "wall_s": wall, "cpu_s": cpu,
            "ratio_cpu": round(loop_cpu / max(cpu, 1e-3), 1), "largest_difference_of_an_end": round(apart, 3)}


def large(trials_wanted, draws, answer):
    "Everything for many trials, in a process of its own, so that its peak memory is its own."
    from granite.frames import trials_frame
    from granite.simulate import simulate
    repetitions = max(1, round(trials_wanted / 2916))
    trials, frame_wall, frame_cpu = timed(lambda: trials_frame(simulate(repetitions=repetitions)))
    _, wall, cpu = timed(lambda: tables_of(trials, draws))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    answer.put({"trials": len(trials), "frame_cpu_s": frame_cpu, "tables_wall_s": wall, "tables_cpu_s": cpu, "peak_gib": round(peak, 2)})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small design, no judgement of time")
    parser.add_argument("--large", type=int, default=1_000_000, help="trials of the large design (default: 1,000,000; 0: none)")
    options = parser.parse_args()
    draws, repetitions, many = (200, 1, 30_000) if options.smoke else (DRAWS, 3, options.large)
    trials, frames = frames_from_disk(repetitions)
    _, wall, cpu = timed(lambda: tables_of(trials, draws))
    found = {"frames": frames, "tables": {"draws": draws, "wall_s": wall, "cpu_s": cpu}, "bootstrap": against_loop(trials, draws)}
    if many:
        answer = multiprocessing.get_context("spawn").Queue()
        child = multiprocessing.get_context("spawn").Process(target=large, args=(many, draws, answer))
        child.start(); found["large"] = answer.get(timeout=1800); child.join()
    print(json.dumps({"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)} | found, indent=1))
    missed = [what for what, bad in {
        "frames below 3 s": frames["cpu_s"] > 3, "tables below 5 s": cpu > 5, "20 times faster than the loop": found["bootstrap"]["ratio_cpu"] < 20,
        "below 4 GiB": many and found["large"]["peak_gib"] > 4}.items() if bad]
    if found["bootstrap"]["largest_difference_of_an_end"] > 0.05: raise SystemExit("the two bootstraps disagree")
    if missed and not options.smoke: raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__": main()
