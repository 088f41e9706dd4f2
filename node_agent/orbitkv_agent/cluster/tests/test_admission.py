from __future__ import annotations

import base64
import json
import logging
import stat
from pathlib import Path

import pytest

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    Arenas,
    Done,
    EngineReport,
    GetStatus,
    Hello,
    MapArenas,
    Ping,
    Pong,
    Refusal,
    RenewToken,
    RetiredArenas,
    Status,
    SyncArenas,
)
from orbitkv_agent.cluster import admission
from orbitkv_agent.cluster.tests.fake_apiserver import AUDIENCE, TOKEN_REVIEWS, FakeApiserver
from orbitkv_agent.cluster.tests.world import ClusterWorld
from orbitkv_agent.sessions.errors import Rejected
from orbitkv_agent.sessions.server import SocketTakenError
from orbitkv_agent.tests.harness import Client, hashes

MINUTE = 60.0


def ended_with(client: Client) -> Refusal:
    """What a connection was told when the agent ended it."""
    client.world.until(client.closed)
    refusal = client.replies.get(0)
    assert isinstance(refusal, Refusal), "the connection was not ended with a reason"
    return refusal


def pass_time(world: ClusterWorld, seconds: float) -> None:
    """Let time pass in steps that the agent's rounds see, and reviews come back."""
    for _ in range(int(seconds / admission.ROUND_S) + 1):
        world.advance(admission.ROUND_S)
        world.pump(20)


# ------------------------------------------------------------------------------------------- at hello


def test_a_pod_with_a_token_gets_a_session(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    assert client.call(Ping(), Pong).ok
    assert api.audiences == [[AUDIENCE]]


def test_without_a_token_there_is_no_session(world: ClusterWorld, api: FakeApiserver) -> None:
    refusal = world.refused(token=b"")
    assert (refusal.kind, refusal.message.split(":")[0]) == (ErrorKind.DENIED, "token-missing")
    assert "orbitkv.token_path" in refusal.message
    assert not api.requests[TOKEN_REVIEWS]


def test_a_token_that_the_apiserver_does_not_know_is_denied(world: ClusterWorld) -> None:
    refusal = world.refused(token=b"forged")
    assert (refusal.kind, refusal.message) == (ErrorKind.DENIED, "token-invalid: unknown token")


def test_a_token_for_another_audience_is_denied(world: ClusterWorld, api: FakeApiserver) -> None:
    api.token("other", audiences=["https://kubernetes.default.svc"])
    assert (
        "token-audience: it is not made for the audience orbitkv.io/cluster-1" in world.refused(token=b"other").message
    )


def test_a_token_of_another_node_is_denied(world: ClusterWorld, api: FakeApiserver) -> None:
    api.token("away", node="node-b")
    refusal = world.refused(token=b"away")
    assert refusal.kind == ErrorKind.DENIED
    assert refusal.message.startswith("token-node: ")
    assert "a pod on node node-b; this agent serves node node-a" in refusal.message


def test_a_token_that_no_pod_has_is_denied(world: ClusterWorld, api: FakeApiserver) -> None:
    api.token("account")
    del api.tokens["account"]["user"]["extra"]["authentication.kubernetes.io/pod-uid"]
    assert world.refused(token=b"account").message.startswith("token-unbound: it is not bound to a pod")


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": ["https://kubernetes.default.svc"]}, "token-audience"),
        ({"aud": "vault"}, "token-audience"),
        ({"aud": [AUDIENCE]}, "token-invalid"),
        ({}, "token-invalid"),
        ([], "token-invalid"),
        ("no object", "token-invalid"),
    ],
)
def test_a_token_that_is_not_accepted_says_by_itself_what_it_was_made_for(
    world: ClusterWorld, claims: object, reason: str
) -> None:
    """The apiserver's answer is the same for a forged token and for one of another audience."""
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")
    assert world.refused(token=b"e30." + body + b".x").message.startswith(f"{reason}: ")


def test_what_a_plugin_says_of_its_engine_is_kept_for_its_pod(world: ClusterWorld) -> None:
    client = world.client()
    client.call(EngineReport("vllm 0.32.0", "setting-invalid", "orbitkv.mode is 'x'"), Done)
    (seen,) = world.cluster.admission.visits.seen(world.agent.instances, world.agent.loop.now())
    assert (seen.visit.pod.name, seen.visit.engine, seen.word.reason) == ("engine-0", "vllm 0.32.0", "setting-invalid")


def test_a_cache_namespace_that_does_not_exist_is_denied(world: ClusterWorld) -> None:
    refusal = world.refused("team-a/other")
    assert refusal.kind == ErrorKind.DENIED
    assert "no CacheNamespace 'team-a/other' that refers to ManagerPool default" in refusal.message


def test_a_cache_namespace_of_another_pool_is_none_of_ours(world: ClusterWorld, api: FakeApiserver) -> None:
    api.put("team-a/elsewhere", "two", pool="other")
    assert world.refused("team-a/elsewhere").kind == ErrorKind.DENIED


@pytest.mark.parametrize(
    ("access", "labels", "account", "allowed"),
    [
        ({}, {}, "default", False),
        ({"namespaces": "All"}, {}, "default", True),
        ({"namespaces": "Selector", "selector": {"matchLabels": {"tier": "gold"}}}, {"tier": "gold"}, "default", True),
        ({"namespaces": "Selector", "selector": {"matchLabels": {"tier": "gold"}}}, {"tier": "tin"}, "default", False),
        ({"namespaces": "All", "serviceAccounts": ["engine"]}, {}, "default", False),
        ({"namespaces": "All", "serviceAccounts": ["engine"]}, {}, "engine", True),
    ],
)
def test_access_rules_decide_about_pods_of_other_namespaces(
    tmp_path: Path, api: FakeApiserver, access: dict[str, object], labels: dict[str, str], account: str, allowed: bool
) -> None:
    api.put("team-a/qwen", "one", access=access)
    api.put_namespace("team-b", **labels)
    token = api.token("b", "engine-b", "team-b", account=account)
    with ClusterWorld(tmp_path, api, token) as world:
        world.until_ready()
        if allowed:
            assert world.client().call(Ping(), Pong).ok
        else:
            refusal = world.refused()
            assert refusal.kind == ErrorKind.DENIED
            assert refusal.message.startswith("access-denied: CacheNamespace team-a/qwen: ")


def test_no_answer_from_the_apiserver_can_be_told_from_a_no(world: ClusterWorld, api: FakeApiserver) -> None:
    api.refuse = 503
    refusal = world.refused()
    assert refusal.kind == ErrorKind.UNAVAILABLE
    assert "attach again later" in refusal.message
    api.refuse = 0
    assert world.client().call(Ping(), Pong).ok


def test_before_the_first_list_engines_are_told_to_come_again(tmp_path: Path, api: FakeApiserver) -> None:
    api.refuse = 503
    with ClusterWorld(tmp_path, api) as world:
        assert world.refused().kind == ErrorKind.UNAVAILABLE
        assert "not known yet" in world.agent.not_ready()


def test_one_token_is_reviewed_once_a_minute(world: ClusterWorld, api: FakeApiserver) -> None:
    for _ in range(5):
        world.client().drop()
    assert api.requests[TOKEN_REVIEWS] == 1
    world.advance(MINUTE)
    world.client()
    assert api.requests[TOKEN_REVIEWS] == 2


def test_a_token_that_many_show_at_once_is_reviewed_once(world: ClusterWorld, api: FakeApiserver) -> None:
    clients = [world.client(hello=False) for _ in range(8)]
    for client in clients:
        client.post(Hello(cache_namespace="team-a/qwen", token=b"good"))
    world.until(lambda: len([each for each in world.agent.server.sessions if each.is_open]) == 8)
    assert api.requests[TOKEN_REVIEWS] == 1


def test_a_request_before_the_answer_ends_the_connection(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client(hello=False)
    client.post(Hello(cache_namespace="team-a/qwen", token=b"good"))
    assert client.refused(Ping()).kind == ErrorKind.INVALID
    assert client.closed()


def test_a_client_that_leaves_before_the_answer_leaves_nothing(world: ClusterWorld) -> None:
    client = world.client(hello=False)
    client.post(Hello(cache_namespace="team-a/qwen", token=b"good"))
    client.drop()
    world.until(lambda: not world.agent.server.sessions)
    assert world.client().call(Ping(), Pong).ok


def test_tokens_are_in_no_log(world: ClusterWorld, api: FakeApiserver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = api.token("eyJhbGciOiJSUzI1NiJ9.secret")
    world.client(token=secret)
    world.refused(token=b"eyJhbGciOiJSUzI1NiJ9.wrong")
    api.refuse = 500
    world.refused(token=b"eyJhbGciOiJSUzI1NiJ9.unlucky")
    assert "eyJ" not in caplog.text


# -------------------------------------------------------------------------------------- open sessions


def test_a_session_ends_within_a_minute_of_its_pod(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    del api.tokens["good"]
    pass_time(world, MINUTE)
    assert ended_with(client).kind == ErrorKind.DENIED


def test_a_session_outlives_the_apiserver(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    api.refuse = 503
    pass_time(world, 10 * MINUTE)
    assert client.call(Ping(), Pong).ok
    api.refuse = 0
    pass_time(world, MINUTE)
    assert client.call(Ping(), Pong).ok


def test_a_session_goes_on_with_a_newer_token(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    client.call(RenewToken(api.token("newer")), Done)
    del api.tokens["good"]
    pass_time(world, MINUTE)
    world.until(lambda: api.requests[TOKEN_REVIEWS] >= 2)
    pass_time(world, MINUTE)
    assert client.call(Ping(), Pong).ok


def test_a_newer_token_of_another_pod_ends_the_session(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    client.call(RenewToken(api.token("stolen", "another-pod")), Done)
    pass_time(world, MINUTE)
    assert "another pod than the one before" in ended_with(client).message


def test_a_session_ends_when_its_access_is_revoked(world: ClusterWorld, api: FakeApiserver) -> None:
    client = world.client()
    api.put("team-a/qwen", "one", access={"serviceAccounts": ["somebody-else"]})
    world.until(client.closed)
    refusal = ended_with(client)
    assert refusal.kind == ErrorKind.DENIED
    assert "access.serviceAccounts" in refusal.message


def test_memory_that_a_session_kept_without_access_takes_no_new_page(world: ClusterWorld, api: FakeApiserver) -> None:
    """Also when it said that it had unmapped it."""
    engine = world.engine(namespace="team-a/qwen")
    engine.save(hashes(1))
    (arena,) = world.agent.cache.arenas
    keeper = world.client()
    keeper.call(MapArenas([arena.id]), Arenas)
    keeper.call(SyncArenas([arena.id]), RetiredArenas)
    session = next(each for each in world.agent.server.sessions if arena.id in each.passed_arenas and not each.arenas)
    world.agent.revoke(session, Rejected("access-denied", ErrorKind.DENIED, "not any more"))
    assert ended_with(keeper).message == "access-denied: not any more"
    world.until(lambda: world.agent.cache.arenas.get(arena.id) is None)
    engine.save(hashes(2))
    assert engine.restore(hashes(2)) == 1
    assert engine.restore(hashes(1)) == 0


def test_a_session_ends_when_its_namespace_loses_the_label(tmp_path: Path, api: FakeApiserver) -> None:
    (tmp_path / "live.yaml").write_text("allowed_namespaces: {from: Selector, selector: {matchLabels: {team: a}}}\n")
    with ClusterWorld(tmp_path, api) as world:
        world.until_ready()
        client = world.client()
        api.put_namespace("team-a", team="b")
        world.until(client.closed)
        assert "NamespaceNotAllowed" in ended_with(client).message


# ---------------------------------------------------------------------------- the crowd, and the own pod


def test_the_silent_make_room_for_who_comes_with_a_token(tmp_path: Path, api: FakeApiserver) -> None:
    with ClusterWorld(tmp_path, api, max_strangers=8) as world:
        world.until_ready()
        engine = world.client()
        crowd = [world.connect() for _ in range(50)]
        try:
            assert world.client().call(Ping(), Pong).ok
            assert engine.call(Ping(), Pong).ok
            world.pump(50)
            assert len(world.agent.server.sessions) <= 2 + 8
        finally:
            for connection in crowd:
                connection.close()


def test_the_socket_is_open_to_all_and_its_folder_is_left_as_it_was(tmp_path: Path, api: FakeApiserver) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    inode = folder.stat().st_ino
    with ClusterWorld(tmp_path, api, socket_path=str(folder / "agent.sock")):
        assert [path.name for path in folder.iterdir()] == ["agent.sock"]
        assert stat.S_IMODE((folder / "agent.sock").stat().st_mode) == 0o666
        with pytest.raises(SocketTakenError, match="another agent"):
            ClusterWorld(tmp_path, api, socket_path=str(folder / "agent.sock"))
    assert not list(folder.iterdir())
    assert folder.stat().st_ino == inode


def test_the_silent_are_closed_after_the_time_for_hello(world: ClusterWorld) -> None:
    client = world.client(hello=False)
    world.advance(5.1)
    assert ended_with(client).kind == ErrorKind.TIMEOUT


def test_connections_of_one_pod_are_bounded(tmp_path: Path, api: FakeApiserver) -> None:
    with ClusterWorld(tmp_path, api, max_connections_per_peer=2) as world:
        world.until_ready()
        world.client()
        world.client()
        refusal = world.refused()
        assert refusal.kind == ErrorKind.BUSY
        assert "pod team-a/engine-0 has 2 connections" in refusal.message
        other = api.token("other", "engine-1")
        assert world.client(token=other).call(Ping(), Pong).ok


def test_connections_of_one_tenant_leave_some_to_others_however_many_pods_it_has(
    tmp_path: Path, api: FakeApiserver
) -> None:
    api.put("team-a/more", "two")
    api.put("team-b/qwen", "three")
    api.put_namespace("team-b")
    theirs = api.token("theirs", "engine-b", "team-b")
    with ClusterWorld(tmp_path, api, max_connections=8, max_connections_per_peer=2) as world:
        world.until_ready()
        tokens = [api.token(f"pod-{number}", f"pod-{number}") for number in range(3)]
        for token in tokens[:2]:
            for name in ("team-a/qwen", "team-a/more"):
                world.client(name, token=token)
        refusal = world.refused(token=tokens[2])
        assert refusal.kind == ErrorKind.BUSY
        assert refusal.message.startswith("too-many-connections: the cache namespaces of team-a have as many")
        for _ in range(2):
            assert world.client("team-b/qwen", token=theirs).call(Ping(), Pong).ok


def test_only_the_agents_own_pod_administrates(
    world: ClusterWorld, api: FakeApiserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "may not administrate" in world.client().refused(GetStatus()).message  # root in a pod is nobody here
    monkeypatch.undo()
    assert world.client("", token=b"").call(GetStatus(), Status).body


def test_a_crowd_does_not_fill_the_log(world: ClusterWorld, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        world.refused(token=b"")
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) <= 31
    world.advance(MINUTE)
    caplog.clear()
    world.refused(token=b"")
    assert "none was shown" in caplog.text
