# Made by `make generate`.
import grpc
import grpc.aio

from orbitkv_agent.csi import registration_pb2

class RegistrationStub:
    GetInfo: grpc.UnaryUnaryMultiCallable[registration_pb2.InfoRequest, registration_pb2.PluginInfo]
    NotifyRegistrationStatus: grpc.UnaryUnaryMultiCallable[registration_pb2.RegistrationStatus, registration_pb2.RegistrationStatusResponse]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

class RegistrationServicer:
    def GetInfo(self, request: registration_pb2.InfoRequest, context: grpc.ServicerContext) -> registration_pb2.PluginInfo: ...
    def NotifyRegistrationStatus(self, request: registration_pb2.RegistrationStatus, context: grpc.ServicerContext) -> registration_pb2.RegistrationStatusResponse: ...

def add_RegistrationServicer_to_server(
    servicer: RegistrationServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
