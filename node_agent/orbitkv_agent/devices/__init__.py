"""Where the bytes are and who copies them."""

from __future__ import annotations

import logging

from orbitkv.cuda import CudaUnavailableError, Driver, LibCuda

logger = logging.getLogger(__name__)


def choose_mode(mode: str) -> Driver | None:
    """Return the CUDA driver to work with, or None for host mode.

    Args:
        mode: "host", "cuda", or "auto": CUDA where there is a GPU.

    Raises:
        CudaUnavailableError: "cuda" was asked for, and there is no driver or no GPU.
    """
    if mode == "host":
        return None
    try:
        driver = LibCuda()
        if not driver.gpus():
            raise CudaUnavailableError("the CUDA driver shows no GPU to this process")
    except CudaUnavailableError as error:
        if mode == "cuda":
            raise
        logger.info("host mode: %s", error)
        return None
    return driver
