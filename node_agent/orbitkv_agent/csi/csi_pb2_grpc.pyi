# Made by `make generate`.
import grpc
import grpc.aio

from orbitkv_agent.csi import csi_pb2

class IdentityStub:
    GetPluginInfo: grpc.UnaryUnaryMultiCallable[csi_pb2.GetPluginInfoRequest, csi_pb2.GetPluginInfoResponse]
    GetPluginCapabilities: grpc.UnaryUnaryMultiCallable[csi_pb2.GetPluginCapabilitiesRequest, csi_pb2.GetPluginCapabilitiesResponse]
    Probe: grpc.UnaryUnaryMultiCallable[csi_pb2.ProbeRequest, csi_pb2.ProbeResponse]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

class IdentityServicer:
    def GetPluginInfo(self, request: csi_pb2.GetPluginInfoRequest, context: grpc.ServicerContext) -> csi_pb2.GetPluginInfoResponse: ...
    def GetPluginCapabilities(self, request: csi_pb2.GetPluginCapabilitiesRequest, context: grpc.ServicerContext) -> csi_pb2.GetPluginCapabilitiesResponse: ...
    def Probe(self, request: csi_pb2.ProbeRequest, context: grpc.ServicerContext) -> csi_pb2.ProbeResponse: ...

def add_IdentityServicer_to_server(
    servicer: IdentityServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...

class NodeStub:
    NodePublishVolume: grpc.UnaryUnaryMultiCallable[csi_pb2.NodePublishVolumeRequest, csi_pb2.NodePublishVolumeResponse]
    NodeUnpublishVolume: grpc.UnaryUnaryMultiCallable[csi_pb2.NodeUnpublishVolumeRequest, csi_pb2.NodeUnpublishVolumeResponse]
    NodeGetCapabilities: grpc.UnaryUnaryMultiCallable[csi_pb2.NodeGetCapabilitiesRequest, csi_pb2.NodeGetCapabilitiesResponse]
    NodeGetInfo: grpc.UnaryUnaryMultiCallable[csi_pb2.NodeGetInfoRequest, csi_pb2.NodeGetInfoResponse]
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...

class NodeServicer:
    def NodePublishVolume(self, request: csi_pb2.NodePublishVolumeRequest, context: grpc.ServicerContext) -> csi_pb2.NodePublishVolumeResponse: ...
    def NodeUnpublishVolume(self, request: csi_pb2.NodeUnpublishVolumeRequest, context: grpc.ServicerContext) -> csi_pb2.NodeUnpublishVolumeResponse: ...
    def NodeGetCapabilities(self, request: csi_pb2.NodeGetCapabilitiesRequest, context: grpc.ServicerContext) -> csi_pb2.NodeGetCapabilitiesResponse: ...
    def NodeGetInfo(self, request: csi_pb2.NodeGetInfoRequest, context: grpc.ServicerContext) -> csi_pb2.NodeGetInfoResponse: ...

def add_NodeServicer_to_server(
    servicer: NodeServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
