"""Divides the host memory budget, and predicts what a step will read and write.

Pure arithmetic on sizes: knows units' bytes and the budget; must not know tensors or files.

    host memory budget
    | fixed: what the config keeps in RAM | weights: flat buffers | pages | gradients and their scratch |
On a GPU the flat buffers are device memory, and pages for uploads take their place in the host budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import BudgetTooSmallError, ConfigValueError, format_bytes
from infinity.layout import CHUNK_GRANULE
from infinity.records import record_bytes, workspace_bytes
from infinity.trace import simulate_fetches

HOST_KEY = "infinity.host_memory_budget"
DEVICE_KEY = "infinity.device_memory_budget"
_FP32_BYTES = 4
_PAGE_GRANULE = 4096
_FEWEST_PAGES = 3
"""One chunk being read, one updated, one written."""
_MOST_PAGES = 16
_PREFERRED_PAGES = 8
_SMALLEST_CHUNK = 32 * CHUNK_GRANULE
_LARGEST_CHUNK = 1024 * CHUNK_GRANULE
_UPLOAD_PAGE_BYTES = 4 << 20
_FEWEST_UPLOAD_PAGES = 2
_PREFERRED_UPLOAD_PAGES = 8
_ACTIVATIONS_SHARE = 4
"""One part in so many of what is left after the pages."""


@dataclass(frozen=True)
class UnitSize:
    """What placement has to know of a unit. Bytes of its flat buffer, elements of its trainable segment (padding included)."""

    name: str
    weight_bytes: int
    trainable_numel: int
    num_states: int
    """Per-element optimizer states."""
    is_all_trainable: bool


@dataclass(frozen=True)
class Request:
    """What the config asks for."""

    budget_bytes: int
    device_budget_bytes: int | None
    param_tier: str
    optimizer_tier: str
    weight_itemsize: int
    shares_host_memory: bool
    updates_in_backward: bool
    num_micro_batches: int
    page_bytes: int | None
    prefetches: bool
    can_spill: bool
    """Whether there is an NVMe tier that gradients could be spilled to."""
    keeps_activations: bool = False
    """Whether all micro-batches may go through a unit together."""
    used_together: tuple[frozenset[int], ...] = ()
    """For each block, the units in which its parameters lie."""


@dataclass(frozen=True)
class Placement:
    """The division of the budget."""

    weights_bytes: int
    """Capacity for flat buffers (device memory on a GPU)."""
    page_bytes: int
    num_pages: int
    chunk_numel: int
    upload_page_bytes: int
    num_upload_pages: int
    gradient_bytes: int
    """For gradients in RAM: main gradients, or those on their way into an update in backward."""
    gradient_scratch_bytes: int
    gradients_in_memory: tuple[int, ...]
    """Units whose main gradients stay in RAM; those of the others are spilled."""
    fixed_bytes: int
    minimum_bytes: int
    activation_bytes: int = 0
    """For inputs of units, which wait for backward when all micro-batches go through a unit together."""

    @property
    def spills(self) -> bool:
        """Whether some main gradients go to NVMe."""
        return self.gradient_scratch_bytes > 0


@dataclass(frozen=True)
class Prediction:
    """Bytes that the NVMe tier reads and writes in one step, in the steady state, when every parameter gets a gradient."""

    read_bytes: int
    write_bytes: int


def place(units: Sequence[UnitSize], request: Request) -> Placement:
    """Divide the budget.

    Raises:
        BudgetTooSmallError: names the minimum.
        ConfigValueError: ``page_bytes`` is too small for one chunk.
    """
    sizes = sorted((unit.weight_bytes for unit in units), reverse=True)
    total_weights = sum(sizes)
    widest = max((unit.num_states for unit in units), default=0)
    per_element = workspace_bytes(1, widest, request.weight_itemsize)
    largest_numel = max(unit.trainable_numel for unit in units)

    smallest_page, chunk_numel = _smallest_page(request, per_element, largest_numel)
    pages_minimum = _FEWEST_PAGES * smallest_page if request.optimizer_tier != "none" else 0
    uploads_minimum = 0
    if not request.shares_host_memory and request.param_tier != "none":
        uploads_minimum = _FEWEST_UPLOAD_PAGES * _UPLOAD_PAGE_BYTES
    weights_minimum = total_weights if request.param_tier == "none" else _weights_needed_together(units, request)
    total_gradients = sum(unit.trainable_numel for unit in units) * _FP32_BYTES
    # Even with updates in backward, the first step keeps all gradients: nothing is known of the model yet.
    gradients_minimum = total_gradients if not request.can_spill else largest_numel * _FP32_BYTES
    fixed = total_weights if request.param_tier == "cpu" else 0
    records = sum(record_bytes(u.trainable_numel, u.num_states, request.weight_itemsize) for u in units)
    if request.optimizer_tier == "cpu" or (request.optimizer_tier == "none" and request.shares_host_memory):
        fixed += records
    if request.optimizer_tier == "none" and request.shares_host_memory:
        pages_minimum = smallest_page

    weights_on_host = weights_minimum if request.shares_host_memory else 0
    minimum = fixed + weights_on_host + pages_minimum + uploads_minimum + gradients_minimum
    if request.budget_bytes < minimum:
        raise BudgetTooSmallError(
            HOST_KEY,
            budget_bytes=request.budget_bytes,
            minimum_bytes=minimum,
            reason=_explain(units, request, fixed, weights_on_host, pages_minimum + uploads_minimum, gradients_minimum),
        )
    left = request.budget_bytes - minimum

    # Pages first: they keep both directions of the drive busy. Then what saves most bytes per byte of memory.
    page_bytes, num_pages = smallest_page, _FEWEST_PAGES
    if request.optimizer_tier != "none":
        area = pages_minimum + left // 4
        if request.page_bytes is None:
            chunk_numel = _chunk_for(area // _PREFERRED_PAGES, per_element, largest_numel)
            page_bytes = _page_for(chunk_numel, per_element)
        num_pages = max(min(area // page_bytes, _MOST_PAGES), _FEWEST_PAGES)
        left -= num_pages * page_bytes - pages_minimum
    upload_pages = 0
    if uploads_minimum:
        upload_pages = min(_FEWEST_UPLOAD_PAGES + left // 2 // _UPLOAD_PAGE_BYTES, _PREFERRED_UPLOAD_PAGES)
        left -= (upload_pages - _FEWEST_UPLOAD_PAGES) * _UPLOAD_PAGE_BYTES

    activations = left // _ACTIVATIONS_SHARE if request.keeps_activations else 0
    left -= activations
    wished = (
        2 * largest_numel * _FP32_BYTES
        if request.updates_in_backward and request.num_micro_batches == 1
        else total_gradients
    )
    gradients = gradients_minimum + min(max(wished - gradients_minimum, 0), left // 2)
    left -= gradients - gradients_minimum
    weights = weights_minimum
    if request.shares_host_memory:
        weights = min(total_weights, weights_minimum + left)
    else:
        weights = _device_weights(request, total_weights, weights_minimum)
    if request.shares_host_memory:
        left -= weights - weights_minimum
    if not request.shares_host_memory or weights == total_weights:
        gradients += max(min(left, total_gradients - gradients), 0)  # a plain loop keeps them all until its step
    in_memory, scratch = _keep_gradients(units, gradients)
    return Placement(
        weights_bytes=weights,
        page_bytes=page_bytes,
        num_pages=num_pages,
        chunk_numel=chunk_numel,
        upload_page_bytes=_UPLOAD_PAGE_BYTES,
        num_upload_pages=upload_pages,
        gradient_bytes=gradients,
        gradient_scratch_bytes=scratch,
        gradients_in_memory=in_memory,
        fixed_bytes=fixed,
        minimum_bytes=minimum,
        activation_bytes=activations,
    )


def _weights_needed_together(units: Sequence[UnitSize], request: Request) -> int:
    """The two largest units, or the units that one block uses and the largest other one."""
    sizes = sorted((unit.weight_bytes for unit in units), reverse=True)
    needed = sum(sizes[:2])
    for together in request.used_together:
        if len(together) > 1:
            others = [unit.weight_bytes for index, unit in enumerate(units) if index not in together]
            needed = max(needed, sum(units[index].weight_bytes for index in together) + max(others, default=0))
    return needed


def _smallest_page(request: Request, per_element: int, largest_numel: int) -> tuple[int, int]:
    if request.page_bytes is None:
        chunk_numel = min(_SMALLEST_CHUNK, largest_numel)
        return _page_for(chunk_numel, per_element), chunk_numel
    chunk_numel = request.page_bytes // per_element // CHUNK_GRANULE * CHUNK_GRANULE
    if chunk_numel == 0:
        least = _page_for(CHUNK_GRANULE, per_element)
        raise ConfigValueError(
            "infinity.page_bytes",
            request.page_bytes,
            f"a page must hold {CHUNK_GRANULE} parameters with all their optimizer state",
            cure=f"Set it to at least {format_bytes(least)}, or leave it out",
        )
    chunk_numel = min(chunk_numel, largest_numel)
    return _page_for(chunk_numel, per_element), chunk_numel


def _chunk_for(page_bytes: int, per_element: int, largest_numel: int) -> int:
    numel = page_bytes // per_element // CHUNK_GRANULE * CHUNK_GRANULE
    return min(max(numel, min(_SMALLEST_CHUNK, largest_numel)), _LARGEST_CHUNK, largest_numel)


def _page_for(chunk_numel: int, per_element: int) -> int:
    return -(-chunk_numel * per_element // _PAGE_GRANULE) * _PAGE_GRANULE


def _device_weights(request: Request, total: int, minimum: int) -> int:
    if request.device_budget_bytes is None:
        return total
    if request.device_budget_bytes < minimum:
        raise BudgetTooSmallError(
            DEVICE_KEY,
            budget_bytes=request.device_budget_bytes,
            minimum_bytes=minimum,
            reason="The two largest units must be resident together",
        )
    return min(total, request.device_budget_bytes)


def _keep_gradients(units: Sequence[UnitSize], capacity_bytes: int) -> tuple[tuple[int, ...], int]:
    """Which main gradients stay in RAM, and the scratch for spilling the others, so that least is spilled."""
    sizes = {index: unit.trainable_numel * _FP32_BYTES for index, unit in enumerate(units) if unit.trainable_numel}
    if sum(sizes.values()) <= capacity_bytes:
        return tuple(sizes), 0
    best: tuple[int, tuple[int, ...], int] | None = None
    for scratch in sorted(set(sizes.values()), reverse=True):
        kept = [index for index, size in sizes.items() if size > scratch]
        used = scratch + sum(sizes[index] for index in kept)
        if used > capacity_bytes:
            continue
        for index in sorted(sizes, key=lambda i: -sizes[i]):
            if index not in kept and used + sizes[index] <= capacity_bytes:
                kept.append(index)
                used += sizes[index]
        saved = sum(sizes[index] for index in kept)
        if best is None or saved > best[0]:
            best = (saved, tuple(sorted(kept)), scratch)
    if best is None:
        raise RuntimeError("the budget for gradients is below its minimum")
    return best[1], best[2]


def _explain(units: Sequence[UnitSize], request: Request, fixed: int, weights: int, pages: int, gradients: int) -> str:
    largest = sorted(units, key=lambda unit: -unit.weight_bytes)[:2]
    names = " and ".join(unit.name for unit in largest)
    parts = []
    if fixed:
        tiers = [
            key
            for key, tier in (("offload_param", request.param_tier), ("offload_optimizer", request.optimizer_tier))
            if tier != "nvme"
        ]
        parts.append(f'{format_bytes(fixed)} for what {" and ".join(tiers)} keep in RAM (device "nvme" would page it)')
    if weights:
        what = (
            'all weights (offload_param.device is "none")'
            if request.param_tier == "none"
            else f"the weights of {names}"
        )
        parts.append(f"{format_bytes(weights)} for {what}")
    parts.append(f"{format_bytes(pages)} for pages")
    whose = (
        "the largest unit"
        if gradients == max(u.trainable_numel for u in units) * _FP32_BYTES
        else "all units (no NVMe tier takes them)"
    )
    parts.append(f"{format_bytes(gradients)} for the gradients of {whose}")
    return "It must hold " + ", ".join(parts)


def predict(
    units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int], backward_start: int
) -> Prediction:
    """Bytes per step for a model that touches its units in ``order`` in each micro-batch."""
    sizes = [unit.weight_bytes for unit in units]
    read = write = 0
    num_micro_batches = request.num_micro_batches
    fetches = simulate_fetches(
        order, sizes, placement.weights_bytes, prefetches=request.prefetches, num_cycles=num_micro_batches
    )
    in_step = not request.updates_in_backward
    filled = (
        {unit for position, unit in fetches if position < backward_start and units[unit].is_all_trainable}
        if in_step and request.prefetches
        else set()
    )
    if request.param_tier == "nvme":
        seen: set[int] = set()
        for position, unit in fetches:
            if in_step and unit in filled and unit not in seen and position < backward_start:
                seen.add(unit)  # its update leaves the new weights in the buffer
                continue
            read += sizes[unit]
        write += sum(unit.trainable_numel * request.weight_itemsize for unit in units)
        if request.weight_itemsize == _FP32_BYTES:
            read += sum(units[unit].trainable_numel * _FP32_BYTES for unit in filled)
    records = sum(record_bytes(u.trainable_numel, u.num_states, request.weight_itemsize) for u in units)
    if request.optimizer_tier == "nvme":
        read += records
        write += records
    if in_step or num_micro_batches > 1:
        spilled = sum(
            unit.trainable_numel * _FP32_BYTES
            for index, unit in enumerate(units)
            if index not in placement.gradients_in_memory
        )
        # In backward, the last micro-batch's sum goes into the update without another detour.
        read += spilled * (num_micro_batches if in_step else num_micro_batches - 1)
        write += spilled * (num_micro_batches if in_step else num_micro_batches - 1)
    return Prediction(read, write)
