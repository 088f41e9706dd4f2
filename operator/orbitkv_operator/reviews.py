"""Whose a token is, and what its owner may do: asked of the API, and remembered by the token's hash."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from orbitkv_operator.cluster.api import ACCESS_REVIEWS, TOKEN_REVIEWS, Api

METRICS_SECONDS: Final = 600.0
"""How long it is remembered who may read metrics."""
REFUSED_SECONDS: Final = 10.0
"""How long a refusal is remembered."""
_MOST: Final = 10_000
_LONGEST_TOKEN: Final = 16_384


@dataclass(frozen=True)
class User:
    """Who a token belongs to."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: dict[str, list[str]]

    @property
    def node(self) -> str:
        """Node of the pod that the token is bound to; empty: it is bound to none."""
        return next(iter(self.extra.get("authentication.kubernetes.io/node-name", ())), "")

    @property
    def pod_uid(self) -> str:
        """Uid of the pod that the token is bound to."""
        return next(iter(self.extra.get("authentication.kubernetes.io/pod-uid", ())), "")


@dataclass
class Reviews:
    """Answers from memory where it can. The lock guards `_users` and `_readers`; no request is made under it.

    Only a hash of a token is kept, and no longer than the token is valid.
    """

    api: Api
    clock: Callable[[], float] = time.time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: dict[str, tuple[float, User | None]] = field(default_factory=dict)
    _readers: dict[str, tuple[float, bool | None]] = field(default_factory=dict)

    def user(self, token: str, audience: str | None, forget_after: float | None = None) -> User | None:
        """Return who a token belongs to, or None if it is not valid for `audience` (None: the API's own).

        Args:
            forget_after: seconds after which to ask again; None: when the token ends.

        Raises:
            ApiError: the API cannot be asked.
        """
        if not token or len(token) > _LONGEST_TOKEN:
            return None
        known_as = hashlib.sha256(f"{audience} {token}".encode()).hexdigest()
        now = self.clock()
        with self._lock:
            until, known = self._users.get(known_as, (0.0, None))
        if now < until:
            return known
        found = self._review(token, audience)
        if found is None:
            until = now + REFUSED_SECONDS
        else:
            ends = _expiry(token)
            until = min(now + 3600 if ends is None else ends, now + forget_after if forget_after else float("inf"))
        with self._lock:
            if len(self._users) >= _MOST:
                self._users = {key: item for key, item in self._users.items() if item[0] > now}
            if len(self._users) < _MOST:
                self._users[known_as] = until, found
        return found

    def may_read_metrics(self, token: str) -> bool | None:
        """Return whether a token's owner may get /metrics; None: it is no valid token.

        Raises:
            ApiError: the API cannot be asked.
        """
        known_as = hashlib.sha256(token.encode()).hexdigest()
        now = self.clock()
        with self._lock:
            until, known = self._readers.get(known_as, (0.0, None))
        if now < until:
            return known
        user = self.user(token, None, METRICS_SECONDS)
        allowed = None if user is None else self._may_get(user, "/metrics")
        with self._lock:
            if len(self._readers) >= _MOST:
                self._readers.clear()
            self._readers[known_as] = now + (METRICS_SECONDS if allowed else REFUSED_SECONDS), allowed
        return allowed

    def _review(self, token: str, audience: str | None) -> User | None:
        spec: dict[str, Any] = {"token": token} | ({"audiences": [audience]} if audience else {})
        answer = self.api.create(
            TOKEN_REVIEWS, None, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        )
        status = answer.get("status") or {}
        if not status.get("authenticated") or (audience and audience not in (status.get("audiences") or ())):
            return None
        user = status.get("user") or {}
        return User(
            user.get("username", ""), user.get("uid", ""), tuple(user.get("groups") or ()), user.get("extra") or {}
        )

    def _may_get(self, user: User, path: str) -> bool:
        spec = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": user.extra,
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        answer = self.api.create(ACCESS_REVIEWS, None, body)
        return bool((answer.get("status") or {}).get("allowed"))


def _expiry(token: str) -> float | None:
    """Return when a token that was found valid ends (seconds since the epoch), or None if it does not say."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None
