"""What schedulers know of a device is what its driver tells."""

from dataclasses import replace

import pytest

from tsfuser.errors import Refusal
from tsfuser.schedule.machine import GPU
from tsfuser.target import driver
from tsfuser.target.cuda import CudaTarget

#: CUdevice_attribute -> value, of an A10.
A10 = {75: 8, 76: 6, 16: 72, 82: 65536, 81: 102400, 97: 101376, 111: 1024, 39: 1536, 1: 1024, 38: 6291456,
       36: 6251000, 37: 384}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """Makes the driver tell of a device."""

    def tell(name, facts):
        monkeypatch.setattr(driver, "_device_attribute", lambda index, attribute: facts[attribute])
        monkeypatch.setattr(driver, "_name", lambda index: name)
        driver.machine.cache_clear()
        driver.capability.cache_clear()
        return CudaTarget.machine("cuda:3")

    yield tell
    driver.machine.cache_clear()
    driver.capability.cache_clear()


def test_all_of_a_record_is_read_from_the_device(told):
    m = told("NVIDIA A10", A10)
    assert (m.name, m.capability, m.multiprocessors, m.registers) == ("NVIDIA A10", 86, 72, 65536)
    assert (m.shared_per_multiprocessor, m.shared_per_block, m.shared_reserved) == (102400, 101376, 1024)
    assert (m.threads_per_multiprocessor, m.block_threads, m.l2) == (1536, 1024, 6291456)
    assert m.bandwidth == pytest.approx(600e9, rel=0.01)
    assert not m.overlaps_launches and not m.has_clusters and m.has_threads


def test_bandwidth_is_by_the_data_sheet_where_the_driver_tells_no_clock(told):
    facts = {**A10, 36: 0}
    assert told("NVIDIA H100 PCIe", facts).bandwidth == 2.04e12
    assert told("NVIDIA H100 80GB HBM3", facts).bandwidth == 3.35e12
    assert told("NVIDIA GB200", facts).bandwidth == told("NVIDIA B200", facts).bandwidth == 8.0e12
    assert told("Some other GPU", facts).bandwidth is None


def test_without_a_driver_kernels_are_planned_for_an_h200(monkeypatch):
    def missing(index, attribute):
        raise Refusal("CUDA tensors need the CUDA driver")

    pytest.importorskip("torch")
    from tsfuser.planning import compile as pipeline

    monkeypatch.setattr(driver, "_name", lambda index: "none")
    monkeypatch.setattr(driver, "_device_attribute", missing)
    driver.machine.cache_clear()
    driver.capability.cache_clear()
    assert pipeline._machine("cuda:0") == replace(GPU, cluster_blocks=8)
