"""Which mode the agent works in."""

from __future__ import annotations

import pytest

from orbitkv.cuda import CudaUnavailableError
from orbitkv_agent import devices
from orbitkv_agent.devices import choose_mode
from orbitkv_agent.devices.cuda.tests.fake_gpu import FakeGpu


def no_driver() -> FakeGpu:
    raise CudaUnavailableError("there is no CUDA driver here")


@pytest.mark.parametrize("driver", [no_driver, lambda: FakeGpu(0)], ids=["no driver", "no GPU"])
def test_without_a_gpu_auto_is_host_mode_and_cuda_is_an_error(driver: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LibCuda", driver)
    assert choose_mode("auto") is None
    with pytest.raises(CudaUnavailableError, match=r"no GPU|no CUDA driver"):
        choose_mode("cuda")


def test_with_a_gpu_auto_is_cuda_and_host_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(devices, "LibCuda", lambda: gpu)
    assert choose_mode("auto") is gpu and choose_mode("cuda") is gpu
    monkeypatch.setattr(devices, "LibCuda", no_driver)
    assert choose_mode("host") is None
