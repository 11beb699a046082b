"""What is deployed is what compose, systemd and Kubernetes take, and what the programs offer."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from compose_spec import PyCompose

from gristmill import keys
from gristmill.cli import cli as producer_cli
from gristmill_worker.cli import cli as worker_cli
from gristmill_worker.metrics import render
from gristmill_worker.settings import Settings, load_settings

TOP = Path(__file__).parents[1]
CONFIGS = TOP / "configs"
DOCKERFILES = [TOP / "worker" / "Dockerfile", TOP / "producer" / "Dockerfile"]


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / name).read_text("utf-8")))


def resource(kind: str) -> dict[str, Any]:
    (found,) = [each for each in [*resources("worker.yaml"), *resources("keda.yaml")] if each["kind"] == kind]
    return found


def takes(cli: Any, arguments: list[str]) -> bool:
    """Say whether a command line has a command and its options."""
    return CliRunner().invoke(cli, [arguments[0], "--help"]).exit_code == 0


class TestKubernetes:
    @pytest.mark.parametrize("document", resources("worker.yaml"), ids=lambda each: each["kind"])
    def test_every_resource_is_valid_for_old_and_new_clusters(self, document: dict[str, Any]) -> None:
        for version in ("1.27", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)

    def test_a_resource_with_a_misspelt_field_would_be_found(self) -> None:
        document = resource("Deployment")
        document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, "1.27", strict=True)

    def test_the_settings_in_it_can_be_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "worker.yaml").write_text(resource("ConfigMap")["data"]["worker.yaml"])
        settings = load_settings(tmp_path / "worker.yaml", {}, {})
        pod = resource("Deployment")["spec"]["template"]["spec"]
        assert settings.shutdown_s < pod["terminationGracePeriodSeconds"]
        (port,) = [each["containerPort"] for each in pod["containers"][0]["ports"]]
        assert str(settings.metrics).endswith(f":{port}")
        assert takes(worker_cli, pod["containers"][0]["args"])

    def test_the_pod_gets_cores_of_its_own_under_the_static_policy(self) -> None:
        wanted = resource("Deployment")["spec"]["template"]["spec"]["containers"][0]["resources"]
        assert wanted["requests"] == wanted["limits"]
        assert float(wanted["limits"]["cpu"]).is_integer()

    def test_keda_looks_at_the_streams_and_metrics_that_there_are(self) -> None:
        scaled = resource("ScaledObject")["spec"]
        assert scaled["scaleTargetRef"]["name"] == resource("Deployment")["metadata"]["name"]
        streams = [each["metadata"] for each in scaled["triggers"] if each["type"] == "redis-streams"]
        assert {each["stream"] for each in streams} == set(keys.streams("topics"))
        assert {each["consumerGroup"] for each in streams} == {keys.GROUP}
        (query,) = [each["metadata"]["query"] for each in scaled["triggers"] if each["type"] == "prometheus"]
        (metric,) = re.findall(r"gristmill_\w+", query)
        assert metric in render([], {}).decode()


def test_compose_takes_the_file_and_its_workers_take_their_command() -> None:
    text = (TOP / "docker-compose.yml").read_text("utf-8")
    assert set(PyCompose.from_yaml(text).service_names()) == {"redis", "worker", "producer"}
    with pytest.raises(ValueError, match=r"unknown|invalid|expected"):
        PyCompose.from_yaml(text.replace("read_only: true", "read_only: perhaps"))
    worker = yaml.safe_load(text)["services"]["worker"]
    assert takes(worker_cli, worker["command"])
    names = {name.removeprefix("GRISTMILL_").lower() for name in worker["environment"]}
    assert names <= set(Settings.model_fields)
    assert (TOP / worker["build"]["dockerfile"]).is_file()


def verified(unit: Path) -> str:
    """Return what systemd has to say against a unit."""
    command = ["systemd-analyze", "verify", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


class TestSystemd:
    @pytest.fixture
    def unit(self, tmp_path: Path) -> Path:
        """The unit, with a program that is there."""
        text = (CONFIGS / "systemd" / "gristmill-worker.service").read_text("utf-8")
        path = tmp_path / "gristmill-worker.service"
        path.write_text(text.replace("/opt/gristmill/bin/gristmill-worker", str(shutil.which("true"))))
        return path

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
    def test_the_unit_is_valid_and_hardened(self, unit: Path) -> None:
        assert verified(unit) == ""
        unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=perhaps"))
        assert "kill mode" in verified(unit)

    def test_it_starts_the_command_of_a_machine_and_gives_it_the_time_to_drain(self) -> None:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(CONFIGS / "systemd" / "gristmill-worker.service")
        service = parser["Service"]
        assert takes(worker_cli, shlex.split(service["ExecStart"])[1:])
        assert float(service["TimeoutStopSec"]) > Settings.model_fields["shutdown_s"].default
        assert {"MemoryMax", "Restart", "KillMode", "ExecReload"} <= set(service)


class TestImages:
    @pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
    def test_what_is_copied_is_there_and_nothing_runs_as_root(self, path: Path) -> None:
        lines = path.read_text("utf-8").splitlines()
        copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
        assert all((TOP / name).exists() for names in copied for name in names)
        users = [line.split()[1] for line in lines if line.startswith("USER")]
        assert users
        assert users[-1] not in {"root", "0"}

    def test_their_commands_are_there(self) -> None:
        for path, cli in zip(DOCKERFILES, (worker_cli, producer_cli), strict=True):
            (command,) = re.findall(r'^CMD \["(.*)"\]$', path.read_text("utf-8"), flags=re.MULTILINE)
            assert takes(cli, [command])
