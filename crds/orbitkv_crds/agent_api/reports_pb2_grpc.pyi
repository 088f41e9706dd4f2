# Made by `make generate`.
import grpc
import grpc.aio

from orbitkv_crds.agent_api import reports_pb2

class ReportsStub:
    Push: grpc.UnaryUnaryMultiCallable[reports_pb2.Report, reports_pb2.Ack]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

class ReportsServicer:
    def Push(self, request: reports_pb2.Report, context: grpc.ServicerContext) -> reports_pb2.Ack: ...

def add_ReportsServicer_to_server(
    servicer: ReportsServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
