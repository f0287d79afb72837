"""What it costs that no trial sees what ran before it: the same trials on the embedded engine, kept apart in three ways.

    python benchmarks/isolation.py                            # qwen2.5-coder-0.5b, 8 trials a way, three rounds in turn
    python benchmarks/isolation.py --model smollm2-135m --smoke

shared: the engine keeps what it remembers, and its host-side cache of earlier prompts is on. restore: the prefix of the interface is put back before
each trial (`isolation: strict`). erase: the slot is emptied before each trial, which reads the tools again. Starting the engine is
not counted; reading each prefix once is. From another state of the cache a model writes other words, and more or fewer of them: compare
the time for each token written, not the sums alone. What putting the state back takes by itself is said beside it, as the median of
all trials but the first of an interface, which reads the prefix.
"""
import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from granite.experiment import check_experiment  # noqa: E402
from granite.records import Run  # noqa: E402
from granite.sweep import Isolation, Sweep, make_ready, rehearse, run_all, usable  # noqa: E402


def erase(backend):
    "Empty the slot before each attempt."
    return lambda cell, slot: backend.engine.slot("erase", number=slot)


def timed(isolate):
    "The same, and a list that gets the seconds of each call but the first of an interface."
    took, seen = [], set()
    def call(cell, slot):
        start = time.perf_counter()
        isolate(cell, slot)
        if cell.interface.level in seen: took.append(time.perf_counter() - start)
        seen.add(cell.interface.level)
    return isolate and call, took


def measure(model, way, scenarios, folder):
    "Seconds for all trials; prompt tokens read and tokens written a trial; ms a token, and to put the state back."
    experiment = check_experiment({"models": [model], "domains": ["smarthome"], "granularities": ["L4", "L1"], "scenarios": scenarios, "max_tokens": 128, "max_agent_turns": 4,
                                   "meters": "off", "isolation": "shared" if way == "shared" else "strict", "out": folder})
    with Run(Path(folder) / way).open() as run, usable(experiment, model) as backend:
        ready = make_ready(experiment, backend)
        rehearse(ready.cells[0])
        isolate, took = timed({"shared": None, "restore": Isolation(backend, ready.protocol), "erase": erase(backend)}[way])
        start = time.perf_counter()
        run_all(Sweep(run, experiment, backend, ready.access, ready.schema_tokens(), isolate=isolate), ready.cells)
        seconds, calls = time.perf_counter() - start, [m for t in run.trials() for m in t.model_calls]
    read, wrote = sum((m.timings or {}).get("prompt_n", 0) for m in calls), sum(m.completion_tokens or 0 for m in calls)
    return seconds, read / len(ready.cells), wrote / len(ready.cells), 1e3 * seconds / max(wrote, 1), 1e3 * statistics.median(took or [0])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="four trials, one round")
    args = parser.parse_args(argv)
    scenarios, rounds = (["smarthome-001", "smarthome-002"], 1) if args.smoke else ([f"smarthome-00{i}" for i in (1, 2, 3, 4)], args.rounds)
    found = {way: [] for way in ("shared", "restore", "erase")}
    for _ in range(rounds):
        for way in found:
            with tempfile.TemporaryDirectory() as folder: found[way].append(measure(args.model, way, scenarios, folder))
            seconds, read, wrote, each, back = found[way][-1]
            print(f"{way}: {seconds:.1f} s, {read:.0f} prompt tokens read and {wrote:.0f} written a trial, {each:.0f} ms for each token written, {back:.0f} ms to put the state back", flush=True)
    median = lambda way, i: statistics.median(row[i] for row in found[way])
    for way in ("restore", "erase"): print(f"{way} / shared: {median(way, 0) / median('shared', 0):.2f} in all, {median(way, 3) / median('shared', 3):.2f} for each token written")
    return 0


if __name__ == "__main__": sys.exit(main())
