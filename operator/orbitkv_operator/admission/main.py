"""The command `orbitkv-webhook`. Exit codes: 0 stopped; 1 it failed and is to be started again; 2 a wrong setting."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from orbitkv_operator.admission.settings import load_settings
from orbitkv_operator.logs import set_up_logging
from orbitkv_operator.settings import SettingsError

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the webhook until SIGTERM or SIGINT; return the exit code."""
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        for problem in error.problems:
            print(f"orbitkv-webhook: {problem}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level)

    from kubernetes.config.config_exception import ConfigException

    from orbitkv_operator.admission.webhook import Webhook
    from orbitkv_operator.cluster.api import load_client

    try:
        webhook = Webhook(settings, load_client())
    except (ConfigException, OSError) as error:  # no cluster, or a port that is taken; the message says which
        logger.error("the webhook cannot start", extra={"error": str(error)})
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: webhook.stop())
    logger.info("starting", extra={"namespace": settings.namespace, "payload": settings.payload_image})
    return 0 if webhook.run() else 1


if __name__ == "__main__":
    sys.exit(main())
