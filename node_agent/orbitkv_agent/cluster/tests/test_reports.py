from __future__ import annotations

import datetime
import ipaddress
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes as digests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from orbitkv_agent.cluster import reports
from orbitkv_agent.cluster.settings import ClusterSettings
from orbitkv_agent.cluster.tests.fake_apiserver import FakeApiserver
from orbitkv_agent.cluster.tests.world import ClusterWorld
from orbitkv_agent.observe.demand import Demand, LastHour
from orbitkv_agent.tests.harness import PAGE, TOKENS, hashes
from orbitkv_crds.agent_api import reports_pb2 as pb
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsServicer, add_ReportsServicer_to_server

NAME = "team-a/qwen"
SERVER_NAME = "orbitkv-reports.orbitkv-system.svc"


def certificate() -> tuple[bytes, bytes]:
    """A certificate of the report server that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(SERVER_NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, digests.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private


class Operator(ReportsServicer):
    """Takes reports on a port of this machine."""

    def __init__(self, folder: Path) -> None:
        self.reports: queue.SimpleQueue[tuple[pb.Report, str]] = queue.SimpleQueue()
        self.refuse: grpc.StatusCode | None = None
        self.interval = 0
        self.peers: set[str] = set()
        """The ends of the connections that reports came over."""
        self.folder = folder
        self.server: grpc.Server | None = None
        self.port = 0

    def start(self) -> None:
        """Serve with a new certificate, on the same port."""
        public, private = certificate()
        (self.folder / "ca.crt").write_bytes(public)
        self.server = grpc.server(ThreadPoolExecutor(2))
        add_ReportsServicer_to_server(self, self.server)
        credentials = grpc.ssl_server_credentials([(private, public)])
        self.port = self.server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        self.server.start()

    def stop(self) -> None:
        """Serve no more."""
        assert self.server is not None
        self.server.stop(0).wait()

    def Push(self, request: pb.Report, context: grpc.ServicerContext) -> pb.Ack:
        """Take a report."""
        self.peers.add(context.peer())
        if self.refuse is not None:
            context.abort(self.refuse, "this operator does not act now")
        self.reports.put((request, str(dict(context.invocation_metadata())["authorization"])))
        return pb.Ack(interval_seconds=self.interval)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    operator = Operator(tmp_path)
    operator.start()
    yield operator
    operator.stop()


@pytest.fixture
def reporting(tmp_path: Path, api: FakeApiserver, operator: Operator) -> Iterator[ClusterWorld]:
    (tmp_path / "token").write_text("of-the-pod\n")
    settings: dict[str, Any] = {
        "reports_address": f"127.0.0.1:{operator.port}",
        "reports_server_name": SERVER_NAME,
        "reports_ca_path": str(tmp_path / "ca.crt"),
        "reports_token_path": str(tmp_path / "token"),
        "reports_interval_seconds": 0.05,
    }
    with ClusterWorld(tmp_path, api, cluster=settings) as world:
        world.until_ready()
        yield world


def next_report(world: ClusterWorld, operator: Operator, after: int = 0) -> tuple[pb.Report, str]:
    """A report that was made after this call, or after the one numbered `after`."""
    after = after or world.cluster._sequence
    found: list[tuple[pb.Report, str]] = []

    def came() -> bool:
        while not operator.reports.empty():
            found.append(operator.reports.get())
        return bool(found) and found[-1][0].sequence > after

    world.until(came)
    return found[-1]


def test_a_report_says_who_and_how_the_agent_is(reporting: ClusterWorld, operator: Operator) -> None:
    report, authorization = next_report(reporting, operator)
    assert authorization == "Bearer of-the-pod"
    assert (report.pool, report.node, report.pod_name, report.pod_uid) == ("default", "node-a", "agent", "uid-of-agent")
    assert report.boot_id == reporting.agent.boot_id
    assert (report.state, report.cache_namespaces_synced) == (pb.AGENT_STATE_SERVING, True)
    assert (report.dram.capacity_bytes, report.dram.used_bytes) == (4 << 20, 0)
    assert len(report.live_settings_digest) == 64
    assert not report.cache_namespaces
    assert not report.problems
    assert not report.HasField("gpus")  # host mode


def test_a_report_says_how_many_gpus_the_agent_sees(reporting: ClusterWorld, operator: Operator) -> None:
    for count in (0, 8):
        reporting.agent.gpu_count = count
        report, _ = next_report(reporting, operator)
        assert report.HasField("gpus") and report.gpus == count


def test_a_report_tells_of_each_cache_that_is_used(
    reporting: ClusterWorld, operator: Operator, api: FakeApiserver
) -> None:
    engine = reporting.engine(namespace=NAME)
    engine.save(hashes(1, 2))
    engine.restore(hashes(1, 2, 3))
    report, _ = next_report(reporting, operator)
    (cache,) = report.cache_namespaces
    assert (cache.namespace, cache.name, cache.uid, cache.observed_generation) == ("team-a", "qwen", "one", 1)
    assert (cache.dram.used_bytes, cache.sessions, cache.engines, cache.attached_pods) == (2 * PAGE, 2, 1, 1)
    assert [(pod.namespace, pod.name, pod.uid, pod.sessions) for pod in cache.pods] == [
        ("team-a", "engine-0", "uid-of-engine-0", 2)
    ]
    assert (cache.last_hour.requested_tokens, cache.last_hour.hit_tokens) == (3 * TOKENS, 2 * TOKENS)
    assert cache.decision == "Accepted"
    (pod,) = report.pods
    assert (pod.uid, pod.cache_namespace, pod.state) == ("uid-of-engine-0", NAME, pb.VISIT_STATE_ATTACHED)
    assert (pod.sessions, pod.engines, pod.requested_tokens, pod.hit_tokens) == (2, 1, 3 * TOKENS, 2 * TOKENS)
    assert not report.refusals
    reporting.refused(NAME, token=b"forged")
    assert sum(next_report(reporting, operator)[0].refusals.values()) == 1
    engine.close()
    api.put(NAME, "one", resetGeneration=4)
    reporting.until(lambda: not reporting.agent.cache.stats().used_bytes)
    (cache,) = next_report(reporting, operator)[0].cache_namespaces
    assert (cache.observed_generation, cache.reset_generation) == (2, 4)
    assert (cache.sessions, cache.engines, cache.attached_pods, cache.dram.used_bytes) == (0, 0, 0, 0)


def test_problems_are_reported(reporting: ClusterWorld, operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "live.yaml").write_text("query_budget_percent: 0\n")
    reporting.advance(5)
    (problem,) = next_report(reporting, operator)[0].problems
    assert problem.reason == "LiveSettingsInvalid"
    assert "query_budget_percent" in problem.message


def test_a_certificate_and_a_token_that_are_replaced_are_read_again(
    reporting: ClusterWorld, operator: Operator, tmp_path: Path
) -> None:
    next_report(reporting, operator)
    operator.stop()
    (tmp_path / "token").write_text("a-newer-one")
    operator.start()
    assert next_report(reporting, operator)[1] == "Bearer a-newer-one"


def test_one_connection_serves_until_it_breaks(reporting: ClusterWorld, operator: Operator) -> None:
    for _ in range(3):
        next_report(reporting, operator)
    assert len(operator.peers) == 1
    operator.stop()
    operator.start()
    next_report(reporting, operator)
    assert len(operator.peers) == 2


def test_a_server_of_another_name_is_told_nothing(reporting: ClusterWorld, operator: Operator, tmp_path: Path) -> None:
    public, _ = certificate()
    next_report(reporting, operator)
    (tmp_path / "ca.crt").write_bytes(public)  # of another authority
    reporter = reporting.cluster._reporter
    assert reporter is not None
    reporting.until(lambda: reporter.problem)
    assert "takes no reports: unavailable" in reporter.problem


def test_an_operator_that_refuses_is_tried_again_and_less_often(
    reporting: ClusterWorld, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.refuse = grpc.StatusCode.FAILED_PRECONDITION
    reporter = reporting.cluster._reporter
    assert reporter is not None
    reporting.until(lambda: reporter._failures >= 3)
    assert "failed precondition: this operator does not act now" in reporter.problem
    assert reporting.client().welcome  # the cache goes on
    operator.refuse = None
    next_report(reporting, operator)
    reporting.until(lambda: not reporter.problem)


def test_an_agent_that_is_sent_away_in_a_crowd_comes_again_soon_over_the_same_connection(
    reporting: ClusterWorld, operator: Operator
) -> None:
    next_report(reporting, operator)
    reporter = reporting.cluster._reporter
    assert reporter is not None
    operator.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    reporting.until(lambda: reporter._sent_away >= 3)
    assert (len(operator.peers), reporter._failures, reporter.problem) == (1, 0, "")
    reporting.until(lambda: reporter._failures >= 2)  # it is no crowd, for so long
    assert "resource exhausted" in reporter.problem
    operator.refuse = None
    next_report(reporting, operator)
    reporting.until(lambda: not reporter.problem)


def test_the_operator_sets_the_rhythm(reporting: ClusterWorld, operator: Operator) -> None:
    operator.interval = 3600
    reporter = reporting.cluster._reporter
    assert reporter is not None
    reporting.until(lambda: reporter._interval_s == 3600)


@pytest.mark.parametrize(("failures", "longest"), [(0, 1.2 * 3600), (1, 1.2 * 15)])
def test_an_operator_that_begins_anew_hears_of_everybody_soon_whatever_the_rhythm_was(
    monkeypatch: pytest.MonkeyPatch, failures: int, longest: float
) -> None:
    names = dict.fromkeys(("pool", "node_name", "pod_name", "pod_namespace", "pod_uid"), "x")
    settings = ClusterSettings.model_validate(names)
    reporter = reports.Reporter(settings, make=pb.Report, post=lambda _: None)
    waits: list[float] = []
    monkeypatch.setattr(reporter._wake, "wait", waits.append)
    reporter._interval_s, reporter._failures = 3600, failures
    reporter._wait()
    assert longest / 1.5 <= waits[0] <= longest


def test_engines_that_come_and_go_are_reported_at_once_however_long_the_interval_is(
    reporting: ClusterWorld, operator: Operator
) -> None:
    operator.interval = 3600
    reporter = reporting.cluster._reporter
    assert reporter is not None
    reporting.until(lambda: reporter._interval_s == 3600)
    engine = reporting.engine(namespace=NAME)

    def told(state: int, engines: int) -> bool:
        found = [operator.reports.get()[0] for _ in range(operator.reports.qsize())]
        said = [([pod.state for pod in it.pods], [cache.engines for cache in it.cache_namespaces]) for it in found]
        return ([state], [engines]) in said

    reporting.until(lambda: told(pb.VISIT_STATE_ATTACHED, 1))
    engine.close()
    reporting.until(lambda: told(pb.VISIT_STATE_LEFT, 0))
    reporting.advance(60)
    assert operator.reports.empty(), "nothing has happened since"


def test_the_owner_never_waits_for_the_operator(tmp_path: Path, api: FakeApiserver) -> None:
    """An address that takes connections and says nothing."""
    import socket

    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_bytes(certificate()[0])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = {
            "reports_address": f"127.0.0.1:{silent.getsockname()[1]}",
            "reports_server_name": SERVER_NAME,
            "reports_ca_path": str(tmp_path / "ca.crt"),
            "reports_token_path": str(tmp_path / "token"),
        }
        with ClusterWorld(tmp_path, api, cluster=settings) as world:
            world.until_ready()
            world.until(lambda: world.cluster._sequence)
            began = time.monotonic()
            world.client()
            assert time.monotonic() - began < reports.PUSH_S


def test_the_last_hour_forgets_the_hour_before() -> None:
    demand = {"a": Demand()}
    last_hour = LastHour(demand)
    demand["a"].asked, demand["a"].found = 100, 50
    for _ in range(60):
        last_hour.minute_passed()
    assert last_hour.of("a") == (0, 0)
    demand["a"].asked += 10
    assert last_hour.of("a") == (10, 0)
    for _ in range(59):
        last_hour.minute_passed()
    assert last_hour.of("a") == (10, 0)
    last_hour.minute_passed()
    assert last_hour.of("a") == (0, 0)
    assert last_hour.of("b") == (0, 0)
