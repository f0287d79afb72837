"""What the harness costs: trials of 5 model calls and 4 MCP tool calls against a model server that answers at once.

    python benchmarks/overhead.py             # 100 trials a transport after 10 to warm up; exit code 1 above 75 ms (memory)
    python benchmarks/overhead.py --smoke     # a few, without limits

Nothing in these trials thinks, so all of the time is overhead: ADK, LiteLLM, MCP, the trace. CPU time counts our process and its
children but not the model server; on a busy machine it is the figure to compare. stdio and http start a server process for every trial.
"""
import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from granite.agent import Controls, ModelAccess, run_sync, run_trial  # noqa: E402
from granite.domain import load_domain  # noqa: E402
from granite.level import load_level  # noqa: E402
from granite.scenario import load_scenarios  # noqa: E402

DOMAIN, LEVEL, LIMIT_MS = "smarthome", "L4", 75.0


def work():
    "The interface, a scenario with four gold calls, and those calls."
    domain = load_domain(DOMAIN)
    scenario = next(s for s in load_scenarios(domain) if len(s.gold(LEVEL)) == 4)
    return load_level(LEVEL)(domain), scenario, [(c.tool, c.arguments) for c in scenario.gold(LEVEL)]


@contextlib.contextmanager
def instant_server(calls):
    "The URL of a model server in a process of its own."
    process = subprocess.Popen([sys.executable, "-S", str(Path(__file__).with_name("instant.py")), json.dumps(calls)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try: yield process.stdout.readline().strip()
    finally: process.stdin.close(); process.wait(10)


def cpu_s(): return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


async def measure(url, transport, rounds, warm, at_once):
    "Seconds of each trial, CPU seconds a trial, elapsed seconds a trial."
    interface, scenario, calls = work()
    access, controls, walls = ModelAccess("toy", {"model": "openai/toy", "api_base": url, "api_key": "none", "num_retries": 0}), Controls(transport=transport), []
    async def one():
        start = time.perf_counter()
        trial = await run_trial("0" * 16, scenario, interface, access, controls)
        walls.append(time.perf_counter() - start)
        if (trial.status, len(trial.model_calls), len(trial.tool_calls)) != ("ok", 5, 4): raise SystemExit(f"a trial went wrong: {trial.status} {trial.error}")
    async def several(n):
        left = iter(range(n))
        async def worker():
            for _ in left: await one()
        await asyncio.gather(*(worker() for _ in range(at_once)))
    await several(warm)
    walls.clear()
    cpu, start = cpu_s(), time.perf_counter()
    await several(rounds)
    return walls, (cpu_s() - cpu) / rounds, (time.perf_counter() - start) / rounds


def line(transport, at_once, walls, cpu, each):
    "One line of the report."
    tenths = statistics.quantiles(walls, n=10) if len(walls) > 1 else walls * 9
    text = f"{transport} {statistics.median(walls) * 1e3:.1f} ms median, {tenths[8] * 1e3:.1f} p90, {cpu * 1e3:.1f} CPU ms a trial"
    return text if at_once == 1 else f"{text}, {each * 1e3:.1f} ms a trial with {at_once} at once"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few rounds, no limits")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--transports", nargs="+", default=["memory", "http", "stdio"])
    args = parser.parse_args(argv)
    rounds, warm, median = (3, 1, 0.0) if args.smoke else (args.rounds, 10, 0.0)
    with instant_server(work()[2]) as url:
        for transport in args.transports:
            for at_once in (1, 8):
                n, w = (rounds, warm) if transport == "memory" else (min(rounds, 20), 1) # a process for every trial
                walls, cpu, each = run_sync(measure(url, transport, max(n, at_once if not args.smoke else n), w, at_once))
                print(line(transport, at_once, walls, cpu, each), flush=True)
                if (transport, at_once) == ("memory", 1): median = statistics.median(walls) * 1e3
    if not args.smoke and median > LIMIT_MS: print(f"memory: {median:.1f} ms is above the target of {LIMIT_MS:g} ms", file=sys.stderr); return 1
    return 0


if __name__ == "__main__": sys.exit(main())
