"""What the doctor finds: planted facts, real servers and models in the states that it warns about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rich.console import Console

import machines
from conftest import Server, carried_redis_server, wait_until
from damaged import copy_with_forms
from gristmill.embedded import find_redis_server
from gristmill.errors import ExitCode, InvalidRequestError
from gristmill_worker.doctor import broker, machine, report
from gristmill_worker.doctor.finding import Finding, Level, worst
from gristmill_worker.doctor.machine import check_machine
from gristmill_worker.doctor.model import check_licences, check_model
from gristmill_worker.doctor.worker import check_workers
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.settings import Settings
from gristmill_worker.topology.facts import Facts, read_facts
from topologies import Cluster, Watched

VNNI = frozenset({"avx2", "avx512f", "avx512_vnni"})
OLD = frozenset({"avx2"})


def only(findings: list[Finding], check: str) -> Finding:
    found = [finding for finding in findings if finding.check == check]
    assert len(found) == 1, findings
    return found[0]


def settings(model: Path | str = "m", **more: object) -> Settings:
    return Settings.model_validate({"queue": "q", "model": model, **more})


class TestMachine:
    """Settings of kernels that are not here, as the kernel would tell them."""

    def examine(self, root: Path, facts: Facts, features: frozenset[str] = VNNI) -> list[Finding]:
        return list(check_machine(facts, features, root))

    def test_a_machine_in_order_has_nothing_to_mend(self, tmp_path: Path) -> None:
        made = machines.xeon_2_sockets(tmp_path)
        made.write("proc/sys/kernel/numa_balancing", 0)
        made.write("proc/sys/vm/overcommit_memory", 1)
        made.write("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never")
        for cpu in made.cpus:
            made.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
        findings = self.examine(tmp_path, read_facts(tmp_path, made.cpus))
        assert worst(findings) is Level.OK, findings
        assert not any(finding.fix for finding in findings)
        assert only(findings, "governor").found == "performance on 80 CPUs"

    @pytest.mark.parametrize(
        ("files", "level", "found"),
        [
            (
                {"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"},
                Level.WARNING,
                "powersave on 2",
            ),
            ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, Level.OK, "dynamic"),
            (
                {
                    "scaling_governor": "powersave",
                    "scaling_driver": "amd-pstate-epp",
                    "energy_performance_preference": "balance_power",
                },
                Level.WARNING,
                "powersave (balance_power)",
            ),
            ({"scaling_governor": "schedutil"}, Level.OK, "schedutil"),
            ({}, Level.NOTE, "not to be seen"),
        ],
    )
    def test_a_slow_clock_is_found(
        self, tmp_path: Path, files: dict[str, str], level: Level, found: str
    ) -> None:
        made = machines.xeon_2_sockets(tmp_path)
        for cpu in (0, 1):
            for name, text in files.items():
                made.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/{name}", text)
        finding = only(self.examine(tmp_path, read_facts(tmp_path, {0, 1})), "governor")
        assert (finding.level, bool(finding.fix)) == (level, level is Level.WARNING)
        assert found in finding.found

    def test_numa_balancing_matters_where_there_are_nodes(self, tmp_path: Path) -> None:
        several, one = tmp_path / "several", tmp_path / "one"
        for root, make in ((several, machines.xeon_2_sockets), (one, machines.laptop)):
            made = make(root)
            made.write("proc/sys/kernel/numa_balancing", 1)
            findings = self.examine(root, read_facts(root, made.cpus))
            if root is several:
                assert only(findings, "NUMA balancing").level is Level.WARNING
                assert "sysctl kernel.numa_balancing=0" in only(findings, "NUMA balancing").fix
            else:
                assert not any(finding.check == "NUMA balancing" for finding in findings)

    def test_cores_without_memory_of_their_node_are_found(self, tmp_path: Path) -> None:
        made = machines.xeon_2_sockets(tmp_path)
        status = tmp_path / "proc/self/status"
        status.write_text(status.read_text().replace("Mems_allowed_list:\t0-1", "Mems_allowed_list:\t0"))
        findings = self.examine(tmp_path, read_facts(tmp_path, {0, 1, 3}))
        assert "CPUs 1,3 belong" in only(findings, "NUMA memory").found
        assert made.cpus[:2] == [0, 1]

    @pytest.mark.parametrize(
        ("cpu_max", "level"),
        [
            ("50000 100000", Level.WARNING),
            ("150000 100000", Level.WARNING),
            ("200000 100000", Level.NOTE),
            ("1600000 100000", Level.OK),
        ],
    )
    def test_a_limit_of_cpus_is_judged(self, tmp_path: Path, cpu_max: str, level: Level) -> None:
        made = machines.container(tmp_path, cpu_max=cpu_max)
        finding = only(self.examine(tmp_path, read_facts(tmp_path, made.cpus)), "CPU limit")
        assert finding.level is level
        assert "/sys/fs/cgroup/cpu.max" in finding.found

    @pytest.mark.parametrize(("throttled", "level"), [(5, Level.OK), (400, Level.WARNING)])
    def test_throttling_is_found(self, tmp_path: Path, throttled: int, level: Level) -> None:
        made = machines.container(tmp_path)
        made.write("sys/fs/cgroup/cpu.stat", f"usage_usec 1\nnr_periods 1000\nnr_throttled {throttled}")
        finding = only(self.examine(tmp_path, read_facts(tmp_path, made.cpus)), "throttling")
        assert finding.level is level

    def test_huge_pages_that_nothing_uses_are_found(self, tmp_path: Path) -> None:
        made = machines.container(tmp_path)
        for total, level in ((100, Level.NOTE), (8192, Level.WARNING)):
            for name in ("nr_hugepages", "free_hugepages"):
                made.write(f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}", total)
            findings = self.examine(tmp_path, read_facts(tmp_path, made.cpus))
            assert only(findings, "huge pages").level is level

    @pytest.mark.parametrize(("mode", "level"), [(0, Level.NOTE), (1, Level.OK), (2, Level.WARNING)])
    def test_overcommit_is_judged(self, tmp_path: Path, mode: int, level: Level) -> None:
        made = machines.laptop(tmp_path)
        made.write("proc/sys/vm/overcommit_memory", mode)
        findings = self.examine(tmp_path, read_facts(tmp_path, made.cpus))
        assert only(findings, "overcommit").level is level

    @pytest.mark.parametrize(
        ("features", "level"),
        [(VNNI, Level.OK), (VNNI | {"amx_int8"}, Level.OK), (OLD, Level.NOTE), (frozenset(), Level.WARNING)],
    )
    def test_instructions_are_judged(self, features: frozenset[str], level: Level) -> None:
        assert machine.check_features(features, "x86_64").level is level
        assert machine.check_features(features, "aarch64").level is Level.NOTE


class TestWorkers:
    @pytest.mark.parametrize(
        ("given", "level", "found", "fix"),
        [
            ({}, Level.OK, "40 of 1 thread(s), on CPUs 0-39", ""),
            (
                {"cores": [0, 2, 40], "workers": 1, "threads": 2},
                Level.OK,
                "1 of 2 thread(s), on CPUs 0,2",
                "",
            ),
            ({"cores": [0, 99]}, Level.PROBLEM, "may not use CPUs 99", "choose among 0-79"),
            ({"cores": [0, 1], "threads": 2}, Level.PROBLEM, "no worker of 2 cores fits", "topology"),
            ({"cores": [0, 40], "workers": 2}, Level.PROBLEM, "at most 1 worker(s) of 1", "topology"),
        ],
    )
    def test_what_does_not_fit_the_cores_is_found(
        self, tmp_path: Path, given: dict[str, Any], level: Level, found: str, fix: str
    ) -> None:
        facts = read_facts(tmp_path, machines.xeon_2_sockets(tmp_path).cpus)
        [finding], [core_sets] = check_workers([settings(**given)], facts)
        assert finding.level is level
        assert bool(core_sets) is (level is Level.OK)
        assert found in finding.found
        assert fix in finding.fix

    def test_more_threads_than_the_limit_are_found(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.container(tmp_path).cpus)
        [finding], _ = check_workers([settings(threads=2)], facts)
        assert finding.level is Level.PROBLEM
        assert "its limit is 1.5 CPUs" in finding.found

    def test_configurations_divide_the_cores_as_run_does(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.laptop(tmp_path).cpus)
        findings, shares = check_workers([settings(workers=2), settings(threads=2)], facts)
        assert [finding.found for finding in findings] == [
            "2 of 1 thread(s), on CPUs 0,2",
            "2 of 2 thread(s), on CPUs 4,6,8,10",
        ]
        assert [len(core_sets) for core_sets in shares] == [2, 2]
        [finding], shares = check_workers([settings(workers=8), settings(workers=8)], facts)
        assert finding.level is Level.PROBLEM
        assert shares == [[], []]

    def test_workers_on_efficiency_cores_beside_fast_ones_are_found(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.laptop(tmp_path).cpus)
        assert check_workers([settings(workers=6)], facts)[0][0].level is Level.OK
        [finding], _ = check_workers([settings(workers=7)], facts)
        assert (finding.level, finding.found[-32:]) == (Level.WARNING, "some of them on efficiency cores")


class TestModel:
    def examine(self, given: Settings, features: frozenset[str] = VNNI) -> list[Finding]:
        return list(check_model(given, read_facts(), features))

    def test_a_model_in_order_is_named_with_engine_memory_and_licences(self, tiny_classifier: Path) -> None:
        findings = self.examine(settings(tiny_classifier))
        assert worst(findings) is Level.NOTE, findings
        assert only(findings, "engine").found.startswith("openvino fp32 (fp32)")
        assert only(findings, "precision").level is Level.NOTE  # the CPU could do int8
        assert only(findings, "costs").fix.startswith(f"gristmill-worker tune {tiny_classifier}")
        assert "Apache" in only(findings, "engine licence").found
        assert only(findings, "memory").level is Level.OK

    def test_a_damaged_file_is_a_problem(self, tiny_classifier: Path, tmp_path: Path) -> None:
        model = copy_with_forms(tiny_classifier, tmp_path / "model", {"other": lambda _: None})
        (model / "other.onnx").write_bytes(b"changed")
        finding = self.examine(settings(model))[1]
        assert (finding.check, finding.level) == ("model files", Level.PROBLEM)
        assert "form other" in finding.found
        assert "--name other --force" in finding.fix
        (model / manifests.MODEL_FILE).write_bytes(b"changed")
        (finding,) = self.examine(settings(model))
        assert (finding.check, finding.level) == ("model files", Level.PROBLEM)
        assert "was changed" in finding.found

    def test_a_model_that_is_not_there_is_a_problem(self, tmp_path: Path) -> None:
        (finding,) = self.examine(settings(tmp_path / "none"))
        assert finding.level is Level.PROBLEM
        assert "model import" in finding.found

    def test_int8_without_instructions_for_it_is_found(self, tiny_classifier: Path, tmp_path: Path) -> None:
        model = copy_with_forms(tiny_classifier, tmp_path / "model", {"int8-x": lambda _: None})
        given = settings(model, engine="onnxruntime", form="int8-x")
        assert only(self.examine(given, OLD), "precision").level is Level.WARNING
        assert only(self.examine(given, VNNI), "precision").level is Level.OK

    def test_a_form_without_a_verdict_is_named(self, tiny_classifier: Path, tmp_path: Path) -> None:
        model = copy_with_forms(tiny_classifier, tmp_path / "model", {"int8-x": lambda _: None})
        finding = only(self.examine(settings(model)), "not trusted")
        assert "onnxruntime int8-x (int8): it was never checked" in finding.found

    def test_a_precision_that_the_cpu_does_not_have_is_a_problem(self, tiny_classifier: Path) -> None:
        finding = only(self.examine(settings(tiny_classifier, precision="bf16"), OLD), "engine")
        assert finding.level is Level.PROBLEM
        assert "AVX512_BF16" in finding.found

    def test_an_engine_for_evaluation_only_is_a_warning(self, tiny_classifier: Path) -> None:
        form = manifests.load(tiny_classifier).select("fp32")
        engine, model = check_licences(Variant(tiny_classifier, "deepsparse", "fp32", form))
        assert (engine.level, engine.check) == (Level.WARNING, "engine licence")
        assert "evaluation only" in engine.found
        assert model.check == "model licence"

    @pytest.mark.parametrize(
        ("limit_mb", "level"), [(100_000, Level.OK), (1500, Level.WARNING), (200, Level.WARNING)]
    )
    def test_memory_that_is_too_small_is_found(
        self, tiny_classifier: Path, tmp_path: Path, limit_mb: int, level: Level
    ) -> None:
        facts = read_facts(tmp_path, machines.container(tmp_path, cpu_max="max 100000").cpus)
        limits = replace(facts.limits, memory_bytes=limit_mb << 20)
        facts = replace(facts, limits=limits, memory_bytes=1 << 40)
        findings = list(check_model(settings(tiny_classifier), facts, VNNI, workers=8))
        assert only(findings, "memory").level is level


class TestRedis:
    def test_a_redis_in_order_has_no_warning(self, own_redis: Server) -> None:
        findings = list(broker.check_redis(own_redis.url))
        assert worst(findings) is Level.NOTE, findings
        assert only(findings, "persistence").found == "append-only file, every write"
        assert only(findings, "Redis version").found.startswith("Redis ")
        assert f"median of {broker.PINGS} PINGs" in only(findings, "Redis latency").found
        assert only(findings, "clock").level is Level.OK

    def test_a_redis_that_loses_requests_is_found(self, own_redis: Server) -> None:
        with Redis.from_url(own_redis.url) as redis:
            redis.config_set("maxmemory-policy", "allkeys-lru")
            redis.config_set("appendonly", "no")
            findings = list(broker.check_redis(own_redis.url))
            assert only(findings, "eviction").level is Level.PROBLEM
            assert "maxmemory-policy noeviction" in only(findings, "eviction").fix
            assert only(findings, "persistence").level is Level.WARNING
            redis.config_set("save", "3600 1")
            assert only(list(broker.check_redis(own_redis.url)), "persistence").found == "snapshots alone"

    def test_a_redis_that_refuses_writes_is_a_problem(self, own_redis: Server) -> None:
        with Redis.from_url(own_redis.url) as redis:
            (own_redis.folder / "dump.rdb").mkdir()
            redis.config_set("save", "3600 1000000")
            redis.execute_command("BGSAVE")
            wait_until(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err")
            redis.execute_command("REPLICAOF", "127.0.0.1", "1")
            findings = list(broker.check_redis(own_redis.url))
        assert "MISCONF" in findings[0].found or own_redis.program == carried_redis_server()  # answers PING
        assert "the snapshot failed" in only(findings, "persistence").found
        role = only(findings, "role")
        assert (role.level, role.fix) == (Level.PROBLEM, "use its primary: 127.0.0.1:1")

    def test_a_redis_that_is_almost_full_is_found(self, own_redis: Server) -> None:
        with Redis.from_url(own_redis.url) as redis:
            used = int(redis.info("memory")["used_memory"])
            redis.config_set("maxmemory", 2 * used)
            assert only(list(broker.check_redis(own_redis.url)), "Redis memory").level is Level.OK
            redis.config_set("maxmemory", used)
            assert only(list(broker.check_redis(own_redis.url)), "Redis memory").level is Level.WARNING

    def test_what_a_user_may_not_see_is_a_note(self, own_redis: Server) -> None:
        with Redis.from_url(own_redis.url) as redis:
            redis.execute_command("ACL", "SETUSER", "few", "on", ">secret", "+ping")
            redis.execute_command("ACL", "SETUSER", "some", "on", ">secret", "+ping", "+info")
        path = own_redis.url.removeprefix("unix://")
        findings = list(broker.check_redis(f"unix://few:secret@{path}"))
        assert [(finding.check, finding.level) for finding in findings] == [
            ("Redis", Level.NOTE),
            ("Redis latency", Level.OK),
            ("clock", Level.NOTE),
        ]
        assert "not permitted to look" in findings[0].found
        findings = list(broker.check_redis(f"unix://some:secret@{path}"))
        assert only(findings, "persistence").found == "append-only file, how often is not to be seen"
        assert only(findings, "clock").level is Level.OK
        (refused,) = broker.check_redis(f"unix://few:wrong@{path}")
        assert refused.level is Level.PROBLEM
        assert "users.acl" in refused.fix

    def test_a_redis_that_is_away_is_a_problem(self, own_redis: Server) -> None:
        own_redis.stop()
        (finding,) = broker.check_redis(own_redis.url)
        assert (finding.check, finding.level) == ("Redis", Level.PROBLEM)
        assert "is not available" in finding.found

    def test_every_primary_of_a_cluster_is_looked_at(self, tmp_path: Path) -> None:
        with Cluster(find_redis_server(), tmp_path) as cluster:
            for port in cluster.ports:
                cluster.add_users(port)
            findings = list(broker.check_redis(cluster.url_of("worker")))
            kept = [finding for finding in findings if finding.check == "persistence"]
            assert sorted(finding.found.partition(": ")[0] for finding in kept) == sorted(
                f"127.0.0.1:{port}" for port in cluster.nodes
            )
            assert {finding.level for finding in kept} == {Level.WARNING}
            assert worst(findings) is Level.WARNING, findings
            alone = list(broker.check_redis(f"redis://127.0.0.1:{cluster.nodes[0]}"))
            assert only(alone, "cluster").level is Level.PROBLEM
            assert "redis+cluster://" in only(alone, "cluster").fix
            cluster.ask(cluster.nodes[0], "CLUSTER", "DELSLOTS", 5)
            cluster.kill(cluster.nodes[1])
            findings = list(broker.check_redis(f"redis+cluster://127.0.0.1:{cluster.nodes[0]}"))
            assert "no node serves 1 of 16384 slots" in findings[0].found
            away = only(findings, "Redis")
            assert (away.level, away.found.partition(": ")[0]) == (
                Level.PROBLEM,
                f"127.0.0.1:{cluster.nodes[1]}",
            )

    def test_the_primary_that_sentinels_name_is_looked_at(self, tmp_path: Path) -> None:
        with Watched(find_redis_server(), tmp_path) as watched:
            findings = list(broker.check_redis(watched.url))
            assert worst(findings) is Level.WARNING  # of persistence
            assert not any(finding.check == "role" for finding in findings)
            watched.kill(watched.data[1])
            primary = watched.at(watched.data[0])
            wait_until(lambda: primary.info("replication")["connected_slaves"] == 0)
            assert only(list(broker.check_redis(watched.url)), "role").found == "a primary without replicas"

    def test_a_url_that_is_none_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError):
            list(broker.check_redis("http://localhost"))

    def test_versions_are_judged(self) -> None:
        assert broker.check_version({"redis_version": "6.0.16"}).level is Level.PROBLEM
        assert broker.check_version({"redis_version": "10.0.1"}).level is Level.OK
        valkey = {"server_name": "valkey", "redis_version": "7.2.4", "valkey_version": "8.1.3"}
        assert broker.check_version(valkey) == Finding("Redis version", Level.OK, "Valkey 8.1.3")

    @pytest.mark.parametrize(("fsync", "level"), [("everysec", Level.NOTE), ("no", Level.WARNING)])
    def test_how_often_the_file_is_synchronised_is_judged(self, fsync: str, level: Level) -> None:
        assert broker.check_persistence({"aof_enabled": "1"}, fsync).level is level

    @pytest.mark.parametrize(("ahead_s", "level"), [(0.2, Level.OK), (-3, Level.WARNING), (7, Level.WARNING)])
    def test_clocks_that_differ_are_found(self, ahead_s: float, level: Level) -> None:
        finding = broker.check_skew(ahead_s)
        assert finding.level is level
        assert ("ahead" in finding.found) is (ahead_s > 0)


def doctor(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill_worker", "doctor", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **env}
    )


class TestCommand:
    def test_this_machine_with_a_model_and_a_redis_has_no_problem(
        self, redis_url: str, tiny_classifier: Path
    ) -> None:
        done = doctor("--model", tiny_classifier, "--redis", redis_url, "--json")
        assert done.returncode == ExitCode.OK, done.stdout + done.stderr
        shown = json.loads(done.stdout)
        checks = [finding["check"] for finding in shown["findings"]]
        for name in ("CPU features", "cores", "workers", "model files", "engine", "Redis version", "clock"):
            assert name in checks
        assert shown["worst"] in ("note", "warning")

    def test_problems_have_an_exit_code_and_warnings_if_asked(
        self, own_redis: Server, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        config = tmp_path / "c.yaml"
        config.write_text(f"{{queue: q, model: {tiny_classifier}, redis: '{own_redis.url}'}}")
        with Redis.from_url(own_redis.url) as redis:
            redis.config_set("appendfsync", "no")
        lenient, strict = doctor(config), doctor(config, "--strict")
        assert (lenient.returncode, strict.returncode) == (ExitCode.OK, ExitCode.FAILURE)
        lines = [line.split("\t") for line in lenient.stdout.splitlines()[:-1]]
        assert {len(line) for line in lines} == {4}
        assert any(line[:2] == ["warning", "persistence"] for line in lines)
        assert lenient.stdout.splitlines()[-1].startswith("problem: 0, warning: ")
        second = tmp_path / "second.yaml"
        second.write_text(config.read_text().replace("queue: q", f"queue: q2, workers: {1 << 15}"))
        both = doctor(config, second)
        assert both.returncode == ExitCode.FAILURE
        assert both.stdout.count("\tmodel files\t") == 2
        assert both.stdout.count("\tRedis latency\t") == 1  # it is the same for both
        own_redis.stop()
        assert doctor(config).returncode == ExitCode.FAILURE

    def test_what_nobody_named_is_not_looked_at(self) -> None:
        done = doctor("--json", GRISTMILL_REDIS="", GRISTMILL_MODEL="")
        assert done.returncode == ExitCode.OK
        assert not any(
            finding["check"].startswith(("Redis", "model", "engine"))
            for finding in json.loads(done.stdout)["findings"]
        )
        named = doctor(GRISTMILL_MODEL="/nowhere", GRISTMILL_REDIS="redis://127.0.0.1:1")
        assert named.returncode == ExitCode.FAILURE
        assert named.stdout.splitlines()[-1].startswith("problem: 2, ")

    def test_wrong_arguments_and_settings_end_as_everywhere(self, tmp_path: Path) -> None:
        assert doctor("--nonsense").returncode == ExitCode.USAGE
        assert doctor(tmp_path / "none.yaml").returncode == ExitCode.USAGE
        assert doctor("--redis", "http://x").returncode == ExitCode.USAGE
        wrong = tmp_path / "c.yaml"
        wrong.write_text("{queue: q, model: m, thread: 2}")
        done = doctor(wrong)
        assert done.returncode == ExitCode.BAD_INPUT
        assert "thread: Extra inputs" in done.stderr

    def test_a_terminal_gets_a_table(self) -> None:
        findings = [Finding("governor", Level.WARNING, "powersave [on] 2 CPUs", "mend it")]
        terminal = Console(file=StringIO(), force_terminal=True, width=100)
        report.show(terminal, findings)
        shown = terminal.file.getvalue()  # type: ignore[attr-defined]
        assert "powersave [on] 2 CPUs" in shown
        assert "what to do" in shown
