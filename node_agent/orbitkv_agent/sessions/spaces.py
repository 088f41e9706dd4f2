"""Under which keys an instance's pages are stored and found."""

from __future__ import annotations

from orbitkv_agent.guards import guard
from orbitkv_agent.sessions.instances import Instance, Registration
from orbitkv_agent.store.cache import PageCache
from orbitkv_agent.store.index import KeySpace


class KeySpaces:
    """Opens the key spaces of instances and of proofs.

    A key space is (cache namespace, identity of model and workers, key generation of the instance, reset generation of
    the namespace, hash length): bytes are never found under anything else.
    """

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache

    def of(self, instance: Instance, hash_bytes: int) -> KeySpace:
        """The key space of a sealed instance."""
        space = instance.spaces.get(hash_bytes)
        if space is not None and not space.closed:
            return space
        assert instance.identity is not None, "an instance that is not sealed has no key space"
        named = guard("key-space")
        space = self._cache.open_key_space(
            instance.namespace,
            (instance.identity if named else "", hash_bytes),
            instance.key_generation if named else "",
            shards=instance.shards,
            hash_bytes=hash_bytes,
        )
        instance.spaces[hash_bytes] = space
        return space

    def of_proof(self, registration: Registration, hash_bytes: int) -> KeySpace:
        """Where a registration's proof pages are: its own, and only until the proof is reported."""
        space = registration.proof_spaces.get(hash_bytes)
        if space is None or space.closed:
            space = registration.proof_spaces[hash_bytes] = self._cache.open_key_space(
                registration.instance.namespace,
                (f"proof of registration {registration.number}", hash_bytes),
                "",
                shards=1,
                hash_bytes=hash_bytes,
            )
        return space

    def drop_proofs(self, registration: Registration) -> None:
        """Forget what proofs saved."""
        for space in registration.proof_spaces.values():
            if not space.closed:
                self._cache.drop_key_space(space)
        registration.proof_spaces.clear()
