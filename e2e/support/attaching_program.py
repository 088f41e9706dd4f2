"""What runs in an injected pod in tests of what is missing: an engine that computes all the while, and attaches as the
plugin for vLLM does, with the plugin's own code.

    python -c PROGRAM

Prints what the plugin logs, and each second one JSON object: how much was computed and whether the cache is attached.
"""

import json
import logging
import os
import sys
import time

from orbitkv.client import CacheManagerClient
from orbitkv.config import PluginConfig
from orbitkv.vllm.attachment import Attachment, connect


class Attached:
    """A client, as the connector's halves keep it attached."""

    def __init__(self, client: CacheManagerClient) -> None:
        self.client = client
        self.boot_id = client.boot_id

    def alive(self) -> bool:
        """Whether the agent is there."""
        return self.client.lost is None and self.client.peer_alive() and self.client.health()[0]

    def close(self) -> None:
        """Leave it."""
        self.client.close()


def main() -> None:
    """Computes for ever."""
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    config = PluginConfig.load({}, os.environ, injected=True)
    engine = Attachment("engine", lambda: Attached(connect(config, "engine", 2000)))
    engine.start()
    computed = 0
    while True:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            computed += sum(range(1000))
            time.sleep(0.01)
        print(json.dumps({"computed": computed, "attached": engine.published is not None}), flush=True)


if __name__ == "__main__":
    main()
