"""Who may read the agent's metrics: whose token the apiserver accepts, and whose user may GET /metrics."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from orbitkv_agent.cluster.apiserver import ApiError

logger = logging.getLogger(__name__)

ALLOWED_S: Final = 600.0
"""A yes is remembered for so long,"""
DENIED_S: Final = 30.0
"""a no only for so long: rights may just be on their way."""
_CHECKS_A_SECOND: Final = 5.0
_BURST: Final = 5.0
"""Tokens that are checked at once after a rest: several readers may come at the same moment."""
_MOST: Final = 1024
PATH: Final = "/metrics"


class _Verdict(NamedTuple):
    status: int
    words: str
    until: float


class MetricsGate:
    """Called in the threads of requests.

    Args:
        may_get: asks the apiserver whether a token is valid and its user may GET a path; raises ApiError.
    """

    def __init__(
        self, may_get: Callable[[str, str], tuple[bool, bool]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._may_get = may_get
        self._clock = clock
        # Invariant: `_verdicts` holds only what the apiserver said; `_checks` is how often it might have been asked at
        # `_counted`. The lock is not held while it is asked.
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, _Verdict] = {}
        self._checks = _BURST
        self._counted = clock()

    def __call__(self, authorization: str) -> tuple[int, str]:
        """Return an HTTP status for a header `Authorization` (200: go on) and words."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return 401, "metrics are for those who may GET /metrics in this cluster: send a bearer token"
        digest = hashlib.sha256(token.encode()).digest()
        now = self._clock()
        with self._lock:
            known = self._verdicts.get(digest)
            if known is not None and now < known.until:
                return known.status, known.words
            self._checks = min(_BURST, self._checks + (now - self._counted) * _CHECKS_A_SECOND)
            self._counted = now
            if self._checks < 1:
                return 429, "too many tokens are being checked; try again"
            self._checks -= 1
        try:
            valid, allowed = self._may_get(token, PATH)
        except ApiError as error:
            logger.warning("a reader of metrics could not be checked: %s", error)
            return 503, f"the token cannot be checked now: {error}"
        if allowed:
            verdict = _Verdict(200, "", now + ALLOWED_S)
        elif valid:
            verdict = _Verdict(
                403, f"this user may not GET {PATH} (a ClusterRole with nonResourceURLs)", now + DENIED_S
            )
        else:
            verdict = _Verdict(401, "the apiserver does not accept this token", now + DENIED_S)
        with self._lock:
            if len(self._verdicts) >= _MOST:
                self._verdicts.clear()
            self._verdicts[digest] = verdict
        return verdict.status, verdict.words
