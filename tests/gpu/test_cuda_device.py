"""Copies on their own streams: ordered by events, beside the computation, and never by making the host wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from swapper import StagingPool, Swapper
from tests.gpu.libraries import load_libraries
from tests.internals import (
    ComputeDevice,
    CudaDevice,
    CudaFlatBuffer,
    ParameterSpec,
    Unit,
    UnitLayout,
    WeightStore,
    device_for,
    gradient_norm,
)

pytestmark = pytest.mark.gpu

_PAGE = 1 << 20
_LONG_CYCLES = 500_000_000
"""Keeps a GPU busy for a few tenths of a second."""


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def staging_pool(device: CudaDevice) -> Iterator[StagingPool]:
    with StagingPool(_PAGE, 4, device.pin) as opened:
        yield opened


def test_the_device_of_a_gpu_is_a_cuda_device(device: CudaDevice) -> None:
    assert isinstance(device_for(device.torch_device), CudaDevice)
    assert not device.uses_host_memory
    assert type(device_for(torch.device("cpu"))) is ComputeDevice


def test_pages_are_pinned_and_unpinned_again(device: CudaDevice) -> None:
    staging_pool = StagingPool(_PAGE, 2, device.pin)
    assert staging_pool.is_pinned
    with staging_pool.lease() as staging_buffer:
        assert staging_buffer.tensor.is_pinned()
    staging_pool.close()
    again = StagingPool(_PAGE, 2, device.pin)  # the driver refuses to register memory twice
    again.close()


def test_an_upload_runs_beside_the_computation(device: CudaDevice, staging_pool: StagingPool) -> None:
    target = torch.zeros(_PAGE, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize()
    with staging_pool.lease() as staging_buffer:
        staging_buffer.tensor.fill_(7)
        torch.cuda._sleep(_LONG_CYCLES)
        computed = device.mark()
        fence = device.upload(target, staging_buffer.tensor, None)
        device.synchronize(fence)
        assert not device.is_done(computed), "the copy waited for the computation"
        assert torch.equal(target.cpu(), staging_buffer.tensor)


def test_a_download_runs_beside_the_computation(device: CudaDevice, staging_pool: StagingPool) -> None:
    source = torch.full((_PAGE,), 9, dtype=torch.uint8, device=device.torch_device)
    after = device.mark()
    torch.cuda.synchronize()
    with staging_pool.lease() as staging_buffer:
        staging_buffer.tensor.zero_()
        torch.cuda._sleep(_LONG_CYCLES)
        computed = device.mark()
        device.synchronize(device.download(staging_buffer.tensor, source, after))
        assert not device.is_done(computed), "the copy waited for the computation"
        assert bool((staging_buffer.tensor == 9).all())


def test_a_copy_waits_for_what_it_has_to_follow(device: CudaDevice, staging_pool: StagingPool) -> None:
    """The memory is still read by an earlier kernel; the new weights must not come before it has ended."""
    memory = torch.full((_PAGE,), 1, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize()
    with staging_pool.lease() as staging_buffer:
        staging_buffer.tensor.fill_(2)
        torch.cuda._sleep(_LONG_CYCLES)
        before = memory.clone()
        fence = device.upload(memory, staging_buffer.tensor, device.mark())
        assert not device.is_done(fence)
        device.synchronize(fence)
        assert bool((before == 1).all())
        assert bool((memory == 2).all())


def test_the_computation_waits_for_an_upload_and_the_host_does_not(
    device: CudaDevice, staging_pool: StagingPool
) -> None:
    target = torch.zeros(_PAGE, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with staging_pool.lease() as staging_buffer, torch.cuda.stream(other):
        staging_buffer.tensor.fill_(3)
        torch.cuda._sleep(_LONG_CYCLES)
        late = device.mark()
        fence = device.upload(target, staging_buffer.tensor, late)
        with torch.cuda.stream(torch.cuda.default_stream()):
            device.compute_waits_for(fence)
            total = target.sum()
            assert not device.is_done(late), "the host waited"
            assert not device.is_done(fence)
            assert int(total) == 3 * _PAGE
        device.synchronize(fence)


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_copy_between_two_places_of_the_gpu_follows_the_kernels_before_it(device: CudaDevice, direction: str) -> None:
    """An optimizer on the GPU: its results are uploaded into the flat buffer, weights are downloaded into its scratch."""
    after = device.mark()
    source = torch.zeros(1 << 20, device=device.torch_device)
    target = torch.zeros(1 << 20, device=device.torch_device)
    torch.cuda.synchronize()
    torch.cuda._sleep(_LONG_CYCLES)
    source.fill_(5)
    seen = target.clone()
    if direction == "upload":
        device.synchronize(device.upload(target, source, after))
    else:
        device.synchronize(device.download(target, source, after))
    assert bool((target == 5).all())
    assert not seen.any()


def test_flat_buffers_count_their_views_and_keep_their_memory_for_them(device: CudaDevice) -> None:
    load_libraries(8)
    before = torch.cuda.memory_allocated()
    flat = device.allocate_flat(4 * _PAGE)
    assert isinstance(flat, CudaFlatBuffer)
    assert not flat.has_views
    weight = flat.tensor().view(torch.float32)[:64].view(8, 8)
    assert weight.untyped_storage().data_ptr() == flat.address
    weight.fill_(2)
    x = torch.ones(3, 8, device=device.torch_device, requires_grad=True)
    out = torch.nn.functional.linear(x, weight)
    del weight
    assert flat.has_views, "autograd holds one"
    flat.release()
    gc.collect()
    assert torch.cuda.memory_allocated() >= before + 4 * _PAGE
    out.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 16).all())
    del out
    gc.collect()
    assert not flat.has_views
    assert torch.cuda.memory_allocated() < before + 4 * _PAGE


@pytest.mark.parametrize("num_staging_buffers", [2, 4])
def test_units_arrive_whole_through_few_pinned_pages(device: CudaDevice, num_staging_buffers: int) -> None:
    with Swapper.in_memory(32 * _PAGE) as swapper, StagingPool(_PAGE, num_staging_buffers, device.pin) as staging_pool:
        store = WeightStore(swapper, device, staging_pool)
        units, values = [], []
        for index, size in enumerate((5, 1, 3)):
            numel = size * _PAGE // 4
            layout = UnitLayout([ParameterSpec("p", (numel,), (1,), torch.float32, False)])
            unit = Unit(index, f"unit {index}", [], layout)
            store.allocate(unit)
            values.append(torch.randint(256, (unit.num_bytes,), dtype=torch.uint8))
            store.write_all(unit, values[-1])
            unit.adopt(device.allocate_flat(unit.num_bytes))
            units.append(unit)
        for _ in range(3):
            arrivals = [store.fetch(unit, is_demand=False) for unit in units]
            for unit, value, arrival in zip(units, values, arrivals, strict=True):
                arrival.wait()
                assert unit.flat is not None
                seen = unit.flat.tensor().clone()  # on the compute stream, which waits for the event
                unit.flat.tensor().zero_()
                assert torch.equal(seen.cpu(), value)
        store.close()


@pytest.mark.parametrize("numel", [1, 1000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_gradients_are_torchs(numel: int, dtype: torch.dtype) -> None:
    gradients = [torch.randn(numel + index, device="cuda").to(dtype) for index in range(3)]
    together = torch._foreach_norm([gradient.float() for gradient in gradients], 2.0)
    for gradient, expected in zip(gradients, together, strict=True):
        assert torch.equal(gradient_norm(gradient), expected)
