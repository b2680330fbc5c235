"""A plan is arithmetic: `infinity.plan` imports nothing that moves bytes."""

from __future__ import annotations

from tests.unit.test_architecture import dependencies, load_modules

_MAY_IMPORT = (
    *("infinity.config", "infinity.errors", "infinity.console", "infinity.plan"),
    *("infinity.numerics.chunk_format", "infinity.numerics.state_format"),  # how large a chunk is
    *("infinity.units", "infinity.packed"),  # how a model is cut, and what of it is stored packed
    *("infinity.optim", "infinity.torch_internals.names"),  # which states an optimizer has
    *("infinity.paging.prefetch_schedule", "infinity.metrics"),  # what a step needed, and took
    *(
        "infinity.device.host_memory",
        "swapper.volumes.directory",
    ),  # what a budget is by itself, and names of directories
    "swapper.wrappers.versions",  # how large the map of a durable run is
)


def test_a_plan_imports_nothing_that_moves_bytes() -> None:
    modules = load_modules()
    imported = {
        each
        for name, module in modules.items()
        if name.startswith("infinity.plan")
        for each in dependencies(module, modules)
    }
    assert {each for each in imported if not each.startswith(_MAY_IMPORT)} == set()
    assert "infinity.plan.placement" in imported
