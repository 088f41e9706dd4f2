from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_STATE_UNSPECIFIED: _ClassVar[AgentState]
    AGENT_STATE_STARTING: _ClassVar[AgentState]
    AGENT_STATE_SERVING: _ClassVar[AgentState]
    AGENT_STATE_DRAINING: _ClassVar[AgentState]

class VisitState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VISIT_STATE_UNSPECIFIED: _ClassVar[VisitState]
    VISIT_STATE_CONNECTED: _ClassVar[VisitState]
    VISIT_STATE_ATTACHED: _ClassVar[VisitState]
    VISIT_STATE_REFUSED: _ClassVar[VisitState]
    VISIT_STATE_OFF: _ClassVar[VisitState]
    VISIT_STATE_LEFT: _ClassVar[VisitState]
AGENT_STATE_UNSPECIFIED: AgentState
AGENT_STATE_STARTING: AgentState
AGENT_STATE_SERVING: AgentState
AGENT_STATE_DRAINING: AgentState
VISIT_STATE_UNSPECIFIED: VisitState
VISIT_STATE_CONNECTED: VisitState
VISIT_STATE_ATTACHED: VisitState
VISIT_STATE_REFUSED: VisitState
VISIT_STATE_OFF: VisitState
VISIT_STATE_LEFT: VisitState

class Report(_message.Message):
    __slots__ = ("pool", "node", "pod_name", "pod_uid", "boot_id", "sequence", "release", "state", "dram", "cache_namespaces", "problems", "cache_namespaces_synced", "live_settings_digest", "pods", "refusals", "gpus")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACES_SYNCED_FIELD_NUMBER: _ClassVar[int]
    LIVE_SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    node: str
    pod_name: str
    pod_uid: str
    boot_id: str
    sequence: int
    release: str
    state: AgentState
    dram: Tier
    cache_namespaces: _containers.RepeatedCompositeFieldContainer[CacheNamespace]
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    cache_namespaces_synced: bool
    live_settings_digest: str
    pods: _containers.RepeatedCompositeFieldContainer[PodVisit]
    refusals: _containers.ScalarMap[str, int]
    gpus: int
    def __init__(self, pool: _Optional[str] = ..., node: _Optional[str] = ..., pod_name: _Optional[str] = ..., pod_uid: _Optional[str] = ..., boot_id: _Optional[str] = ..., sequence: _Optional[int] = ..., release: _Optional[str] = ..., state: _Optional[_Union[AgentState, str]] = ..., dram: _Optional[_Union[Tier, _Mapping]] = ..., cache_namespaces: _Optional[_Iterable[_Union[CacheNamespace, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ..., cache_namespaces_synced: _Optional[bool] = ..., live_settings_digest: _Optional[str] = ..., pods: _Optional[_Iterable[_Union[PodVisit, _Mapping]]] = ..., refusals: _Optional[_Mapping[str, int]] = ..., gpus: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class CacheNamespace(_message.Message):
    __slots__ = ("namespace", "name", "uid", "observed_generation", "reset_generation", "dram", "sessions", "engines", "attached_pods", "pods", "last_hour", "problems", "decision")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESET_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_PODS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    observed_generation: int
    reset_generation: int
    dram: Tier
    sessions: int
    engines: int
    attached_pods: int
    pods: _containers.RepeatedCompositeFieldContainer[Pod]
    last_hour: LastHour
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    decision: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., observed_generation: _Optional[int] = ..., reset_generation: _Optional[int] = ..., dram: _Optional[_Union[Tier, _Mapping]] = ..., sessions: _Optional[int] = ..., engines: _Optional[int] = ..., attached_pods: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[Pod, _Mapping]]] = ..., last_hour: _Optional[_Union[LastHour, _Mapping]] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ..., decision: _Optional[str] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("namespace", "name", "uid", "sessions")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    sessions: int
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., sessions: _Optional[int] = ...) -> None: ...

class PodVisit(_message.Message):
    __slots__ = ("namespace", "name", "uid", "cache_namespace", "state", "reason", "message", "engine", "sessions", "engines", "requested_tokens", "hit_tokens", "age_seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    cache_namespace: str
    state: VisitState
    reason: str
    message: str
    engine: str
    sessions: int
    engines: int
    requested_tokens: int
    hit_tokens: int
    age_seconds: int
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., cache_namespace: _Optional[str] = ..., state: _Optional[_Union[VisitState, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., engine: _Optional[str] = ..., sessions: _Optional[int] = ..., engines: _Optional[int] = ..., requested_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., age_seconds: _Optional[int] = ...) -> None: ...

class LastHour(_message.Message):
    __slots__ = ("requested_tokens", "hit_tokens")
    REQUESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requested_tokens: int
    hit_tokens: int
    def __init__(self, requested_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: int
    def __init__(self, interval_seconds: _Optional[int] = ...) -> None: ...
