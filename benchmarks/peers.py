"""Our overhead beside Inspect's: the same 5 model calls and 4 MCP tool calls, the same model server, the same MCP server.

    python benchmarks/peers.py                # 20 samples; installs inspect-ai into a virtual environment of its own
    python benchmarks/peers.py --smoke        # two samples
    python benchmarks/peers.py --venv DIR     # an environment that has inspect-ai already

Inspect starts the MCP server over stdio for every sample, as its documentation shows; ours runs with its default (memory)
and over stdio too, so that both the usual and the like-for-like ratio can be read.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from overhead import DOMAIN, LEVEL, instant_server, measure, run_sync, work  # noqa: E402

TASK = '''
import json, os, sys, time
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, get_model
from inspect_ai.solver import solver
from inspect_ai.tool import mcp_connection, mcp_server_stdio

python, root, url, request, rounds, folder = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]

@solver
def agent():
    async def solve(state, generate):
        server = mcp_server_stdio(command=python, args=["-m", "granite.cli", "serve", "%s", "%s"], env={"PYTHONPATH": root})
        async with mcp_connection(server):
            state.tools = await server.tools()
            return await generate(state, tool_calls="loop")
    return solve

task = Task(dataset=[Sample(input=request, id=i) for i in range(rounds + 1)], solver=agent())
model = get_model("openai-api/instant/toy", base_url=url, api_key="none")
log = eval(task, model=model, max_samples=1, display="none", log_dir=folder, log_level="error")[0]
out = {"status": log.status, "error": log.error and log.error.message, "seconds": [], "calls": []}
for s in log.samples or []:
    out["seconds"].append(s.total_time)
    out["calls"].append([sum(m.role == "assistant" for m in s.messages), sum(m.role == "tool" and not m.error for m in s.messages)])
print("RESULT", json.dumps(out))
''' % (DOMAIN, LEVEL)


def inspect_venv(folder):
    "A fresh virtual environment with inspect-ai; the path of its python."
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = Path(folder) / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "inspect-ai", "openai", "mcp"], check=True, timeout=900)
    return python


def inspect_seconds(python, url, request, rounds, limit_s=1800):
    "Seconds of each sample in Inspect; the first is dropped."
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run([python, "-c", TASK, sys.executable, str(Path(__file__).parents[1]), url, request, str(rounds), folder], capture_output=True, text=True, timeout=limit_s, cwd=folder)
    found = [line for line in said.stdout.splitlines() if line.startswith("RESULT ")]
    if not found: raise SystemExit(f"Inspect did not run: {said.stderr.strip().splitlines()[-1:] or said.returncode}")
    result = json.loads(found[0][7:])
    if result["status"] != "success" or any(c != [5, 4] for c in result["calls"]): raise SystemExit(f"Inspect did other work: {result}")
    return result["seconds"][1:]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="two samples")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--venv", help="virtual environment that has inspect-ai")
    args = parser.parse_args(argv)
    rounds = 2 if args.smoke else args.rounds
    with tempfile.TemporaryDirectory() as folder, instant_server(work()[2]) as url:
        python = Path(args.venv) / "bin" / "python" if args.venv else inspect_venv(folder)
        theirs = statistics.median(inspect_seconds(python, url, work()[1].user_prompt, rounds))
        ours = {t: statistics.median(run_sync(measure(url, t, rounds, 2, 1))[0]) for t in ("memory", "stdio")}
    print(f"inspect stdio {theirs * 1e3:.1f} ms median")
    for transport, seconds in ours.items(): print(f"granite {transport} {seconds * 1e3:.1f} ms median, {theirs / seconds:.1f} times less")
    return 0


if __name__ == "__main__": sys.exit(main())
