"""Reports of agents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from orbitkv_crds.agent_api import reports_pb2, reports_pb2_grpc


class Kept(reports_pb2_grpc.ReportsServicer):
    def __init__(self) -> None:
        self.reports: list[reports_pb2.Report] = []

    def Push(self, request: reports_pb2.Report, context: grpc.ServicerContext) -> reports_pb2.Ack:
        self.reports.append(request)
        return reports_pb2.Ack(interval_seconds=30)


def report() -> reports_pb2.Report:
    cache = reports_pb2.CacheNamespace(
        namespace="team-a",
        name="qwen",
        uid="u",
        observed_generation=3,
        dram=reports_pb2.Tier(used_bytes=1 << 40),
        pods=[reports_pb2.Pod(namespace="team-a", name="vllm-0", uid="p", sessions=2)],
        last_hour=reports_pb2.LastHour(requested_tokens=10, hit_tokens=9),
    )
    return reports_pb2.Report(
        pool="pool", node="node-1", sequence=1, state=reports_pb2.AGENT_STATE_SERVING, cache_namespaces=[cache]
    )


def test_report_reaches_the_other_side_whole() -> None:
    kept = Kept()
    server = grpc.server(ThreadPoolExecutor(1))
    reports_pb2_grpc.add_ReportsServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ack = reports_pb2_grpc.ReportsStub(channel).Push(report(), timeout=10)
    finally:
        server.stop(None).wait()
    assert ack.interval_seconds == 30
    assert kept.reports == [report()]


def test_field_of_a_newer_agent_is_passed_over() -> None:
    newer = report().SerializeToString() + b"\xfa\x3e\x03new"  # field 1007, three bytes
    assert reports_pb2.Report.FromString(newer).node == "node-1"


def test_report_of_a_thousand_caches_is_one_message() -> None:
    big = report()
    for index in range(999):
        big.cache_namespaces.append(big.cache_namespaces[0])
        big.cache_namespaces[-1].name = f"{'n' * 245}-{index:06}"
    assert len(big.SerializeToString()) < 1 << 20  # gRPC takes up to 4 MiB


def test_numbers_that_no_field_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        reports_pb2.Tier(used_bytes=-1)
