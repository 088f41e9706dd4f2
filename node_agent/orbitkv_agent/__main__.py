"""`python -m orbitkv_agent` is `orbitkv-agent`."""

import sys

from orbitkv_agent.cli import main

sys.exit(main())
