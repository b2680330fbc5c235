"""Where the host may wait for a GPU in the rooms that are at work within a step: nothing else does, by the looks of it.

Each of these calls waits until all that was launched has run, if its argument is a tensor on a GPU, and a step slows down
without any sign. So each has its reason here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import infinity

_PACKAGE = Path(infinity.__file__).parent
_ROOMS = ("activations", "device", "gradients", "loop", "paging", "tiers", "units", "updates", "vertical")
_MODULES = (
    *("engine/train_batch.py", "engine/engine.py", "engine/loop_settings.py", "optim/fused_adam.py"),
    *("metrics/clock.py", "metrics/report.py", "metrics/reporter.py", "metrics/timeline.py"),
)
_METHODS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
_FUNCTIONS = {"bool", "float", "int"}

_BACKGROUND = "in a thread of the engine's own"
_ASSIGNED = "what a user assigns to a parameter's .data, once each time"
_NO_TENSOR = "of no tensor"
_HOST = "of host memory"
_ALLOWED: dict[str, dict[str, str]] = {
    "activations/caches.py": {"bool(layer and value.get_seq_length(layer) == 0)": _NO_TENSOR},
    "activations/boundary.py": {"bool(top[0] == self._pack)": _NO_TENSOR},
    "device/compute.py": {
        "fence.synchronize()": "the one way to wait, see who calls it",
        "event.synchronize()": "a stream on which nothing else runs",
        "bool(fence.query())": "asks, and does not wait",
        "int(free)": _NO_TENSOR,
        "int(torch.cuda.max_memory_allocated(self.torch_device))": _NO_TENSOR,
    },
    "device/landing.py": {
        "self._device.synchronize(self.coming[0].fence)": "gradients that somebody asks for, or their ring is full",
        "self._device.synchronize(fence)": "gradients that are larger than the ring in which they arrive",
        "self._device.synchronize(self._last)": "at the end",
    },
    "device/host_memory.py": {
        "bool(getattr(torch.cuda.get_device_properties(torch_device), 'is_integrated', 0))": _NO_TENSOR,
        "int(share * free)": _NO_TENSOR,
        "int(psutil.virtual_memory().available)": _NO_TENSOR,
        "int(limit)": _NO_TENSOR,
        "int((folder / usage_name).read_text())": _NO_TENSOR,
        "int(statistics[statistics.index(cache_key) + 1])": _NO_TENSOR,
        "int(fields[1])": _NO_TENSOR,
        "int(fields[2])": _NO_TENSOR,
    },
    "engine/engine.py": {"float(self._stepper.grad_norm)": "after the step, where it is to be shown"},
    "engine/loop_settings.py": {
        "float(norm)": "after the step, where it was asked for",
        "float(group.get('lr', 0.0))": _NO_TENSOR,
    },
    "engine/train_batch.py": {"bool(taken)": _NO_TENSOR},
    "gradients/collector.py": {"bool(self._fired)": _NO_TENSOR},
    "gradients/held_gradients.py": {
        "bool(num_owners(storage) > 2 or not storage.resizable())": _NO_TENSOR,
        "bool(tensor.requires_grad or sys.getrefcount(tensor) > 3 or tensor._use_count() > 1)": _NO_TENSOR,
    },
    "gradients/loss_scaler.py": {
        "float(state['scale'])": "of a checkpoint",
        "int(state['patience'])": "of a checkpoint",
        "int(state['num_finite'])": "of a checkpoint",
        "int(state.get('num_steps', 0))": "of a checkpoint",
    },
    "gradients/reducer.py": {
        "gradient_norm(buffer.view(slot)).detach().cpu()": _HOST,
        "int(norm.view(torch.int32))": _HOST,
    },
    "gradients/rank_checks.py": {
        "int(norm.detach().cpu().float().view(torch.int32))": "once a step, where there are several ranks",
        "norm.detach().cpu()": "likewise",
        "torch.tensor(of_ranks, dtype=torch.int32, device='cpu').view(torch.float32).tolist()": _HOST,
    },
    "gradients/norms.py": {"float(each.norm)": "once a step, where processes have different parts of the model"},
    "gradients/sources.py": {
        "self._device.synchronize(fence)": _BACKGROUND,
    },
    "loop/loader.py": {
        "int(state['num_given'])": "of a checkpoint",
        "int(state['num_epochs'])": "of a checkpoint",
        "int(state['num_samples'])": "of a checkpoint",
        "int(getattr(self.sampler, 'num_replicas', 1))": _NO_TENSOR,
    },
    "loop/style.py": {"float(self._counts.num_micro_batches if self.divides else 1)": _NO_TENSOR},
    "optim/fused_adam.py": {
        "float(scale)": f"on the CPU, {_BACKGROUND}",
        "float(count)": _NO_TENSOR,
        "float(step)": f"on the CPU, {_BACKGROUND}",
        "float(group['lr'])": "a number, or a tensor on the CPU: `GpuAdam.runs` takes no other",
        "bool(group.get('decoupled_weight_decay', self._is_decoupled))": _NO_TENSOR,
        "int(self._is_decoupled_in(group))": _NO_TENSOR,
        "bool(lerp_weight < 0.5)": _NO_TENSOR,
        "int(gradient.dtype == torch.bfloat16)": _NO_TENSOR,
        "int(scale is not None)": _NO_TENSOR,
        "int(np.float32(value).view(np.int32))": _NO_TENSOR,
    },
    "paging/assigned.py": {
        "bool(self._memory.expired())": _NO_TENSOR,
        "int(values.storage_offset())": _NO_TENSOR,
        "values.detach().resolve_conj().resolve_neg().cpu()": _ASSIGNED,
    },
    "paging/compiled_forwards.py": {"bool(spanned)": _NO_TENSOR},
    "loop/pager.py": {"int(is_inside)": _NO_TENSOR},
    "loop/parameter_handler.py": {
        "int(value.storage_offset())": _NO_TENSOR,
        "int(values.storage_offset())": _NO_TENSOR,
    },
    "paging/saved_tensors.py": {
        "int(self.offset)": _NO_TENSOR,
        "bool(pack == self._pack or (isinstance(pack, functools.partial) and "
        "pack.func in (self._pack_for, self._pack_over)))": _NO_TENSOR,
    },
    "metrics/reporter.py": {
        "float(loss)": "once a step, when its report is made",
        "float(detached)": "on the CPU",
    },
    "metrics/timeline.py": {"of_row.tolist()": "of NumPy's, when the timeline is saved"},
    "tiers/state_store.py": {"memory.view(torch.uint8).numpy()": _HOST},
    "tiers/user_copies.py": {"values.view(torch.uint8).numpy()": _HOST},
    "tiers/weight_store.py": {
        "self._device.synchronize(fence)": _BACKGROUND,
        "self._device.synchronize(self._fence)": f"before its memory is written to, {_BACKGROUND}",
    },
    "tiers/weight_exchange.py": {
        "self._device.synchronize(self._device.upload(flat[start:start + found.numel()], found, self._device.mark()))": (
            "where several ranks exchange weights"
        ),
        "self._device.synchronize(self._device.download(target, source, self._device.mark()))": "likewise",
    },
    "units/adapters.py": {"bool(getattr(model, '_hf_peft_config_loaded', False))": _NO_TENSOR},
    "units/originals.py": {"value.cpu()": "in `initialize`", "bool(value.sum().isnan())": "in `initialize`"},
    "units/parameter.py": {
        "bool(kwargs.pop('materialize_grads', False))": _NO_TENSOR,
        "bool(kwargs.get('create_graph'))": _NO_TENSOR,
    },
    "units/partition.py": {"bool(hits)": _NO_TENSOR},
    "units/tiles.py": {
        "int(flat.min())": "which tiles of an embedding are needed, its tokens alone tell",
        "int(flat.max())": "likewise",
        "((flat >= start) & (flat < stop)).nonzero()": "likewise",
    },
    "updates/chunk_updater.py": {
        "float(job.clip_coefficient)": f"on the CPU, {_BACKGROUND}",
        "float(step)": f"on the CPU, {_BACKGROUND}",
    },
    "updates/job.py": {"device.synchronize(device.download(here, coefficient.reshape(1), device.mark()))": _BACKGROUND},
    "updates/momenta.py": {
        "bool(found)": _NO_TENSOR,
        "int(state.scalars['step'])": _HOST,
        "int(norm.detach().cpu().float().view(torch.int32))": "once a step, where there are several ranks",
        "norm.detach().cpu()": "likewise",
        "multiplier.cpu()": "before ranks exchange what was multiplied, which waits for all of them",
    },
    "updates/step_groups.py": {"value.tolist()": "once a step, where there are several ranks"},
    "updates/stepper.py": {
        "bool(unit.gathered)": _NO_TENSOR,
        "bool(self.updated)": _NO_TENSOR,
        "bool(self.updated or self._waiting)": _NO_TENSOR,
        "bool(torch.isfinite(self.grad_norm))": "once a step, where one with overflows is to be skipped",
    },
    "updates/stream.py": {
        "self._device.synchronize(self._device.download(workspace.weight, flat, job.after))": _BACKGROUND,
        "self._device.synchronize(self._device.download(source, workspace.weight, self._device.mark()))": _BACKGROUND,
        "self._device.synchronize(item.upload)": _BACKGROUND,
        "self._device.synchronize(self._device.mark())": f"once for each unit, {_BACKGROUND}",
    },
    "vertical/arguments.py": {"bool(a == b)": _NO_TENSOR},
}


def _waits(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        is_function = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if is_method or (is_function and node.args and not isinstance(node.args[0], ast.Constant)):
            yield ast.unparse(node)


def test_whatever_may_wait_for_the_device_has_its_reason() -> None:
    paths = [
        *(path for room in _ROOMS for path in (_PACKAGE / room).rglob("*.py")),
        *(_PACKAGE / each for each in _MODULES),
    ]
    found = {str(path.relative_to(_PACKAGE)): set(_waits(path.read_text())) for path in paths}
    assert {path: waits for path, waits in found.items() if waits} == {
        path: set(waits) for path, waits in _ALLOWED.items()
    }


def test_what_waits_is_found() -> None:
    source = "a = x.item() + float(y) + z[0].cpu()\nif bool(w): torch.cuda.synchronize()\nv = float('nan') + int(1)\n"
    assert set(_waits(source)) == {"x.item()", "float(y)", "z[0].cpu()", "bool(w)", "torch.cuda.synchronize()"}
