"""Dockerfile, compose.yaml and experiment.yaml: read as their tools read them. Nothing is built or started here."""
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from granite.experiment import load_experiment

ROOT = Path(__file__).parents[1]


def test_experiment_yaml_is_study_a():
    experiment = load_experiment(ROOT / "experiment.yaml")
    cells = len(experiment.chosen()) * experiment.repetitions
    assert len(experiment.models) == 9 and len(experiment.domains) == 9 and cells == 972 and cells * 9 == 8748
    assert (experiment.max_agent_turns, experiment.agent_timeout_seconds, experiment.temperature, experiment.max_tokens) == (10, 360.0, 0.0, 4096)
    from granite.models import resolve
    assert all(resolve(m).study_a and resolve(m).serve == "ollama" for m in experiment.models)


def compose(): return yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_compose_has_what_an_edge_host_needs():
    services = compose()["services"]
    assert set(services) == {"granite", "ollama", "prometheus"}
    named = set(compose()["volumes"])
    for name, service in services.items():
        assert "build" in service or "image" in service
        assert not (service.get("network_mode") == "host" and "ports" in service), "the host network publishes nothing"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (ROOT / source).exists() or source in ("./runs", "./figures"), volume
        for port in service.get("ports", []): assert port.startswith("127.0.0.1:"), "only this host may reach it"
    targets = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["127.0.0.1:9464"] and services["prometheus"]["network_mode"] == services["granite"]["network_mode"] == "host"


@pytest.mark.skipif(not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0, reason="no docker compose here")
def test_docker_compose_takes_the_file():
    said = subprocess.run(["docker", "compose", "-f", ROOT / "compose.yaml", "config", "--quiet"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr


def test_dockerfile_copies_what_is_there_and_drops_root():
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith(("#", " "))]
    words = [line.split()[0] for line in lines]
    assert words[0] == "FROM" and words[-2:] == ["ENTRYPOINT", "CMD"]
    assert set(words) <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert words.index("USER") > max(i for i, w in enumerate(words) if w == "RUN") and "root" not in lines[words.index("USER")]
    assert (ROOT / "constraints.txt").is_file() and ".git" in (ROOT / ".dockerignore").read_text().split()
