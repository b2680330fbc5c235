"""What the prediction of a step is made from: the units, what the config asks for, and the order of need.

Can be written down as JSON and read again, so that a plan can be asked what it would be with other means, long after the
engine is gone. Knows sizes and numbers; must not know how anything moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.planning.bandwidth_cache import Bandwidth
from infinity.planning.cost_model import Prediction, Traffic, predict
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import Placement
from infinity.planning.plan import Plan
from infinity.planning.retention import Retention


@dataclass(frozen=True)
class Workload:
    """Of one step.

    Attributes:
        units: all of them.
        request: what a placement was asked.
        order: in which a micro-batch (a whole step, if `traffic` is vertical) needs its units: forward, then backward.
        backward_start: place in `order` at which backward begins.
        traffic: the order of the last step.
    """

    units: tuple[UnitSize, ...]
    request: Request
    order: tuple[int, ...]
    backward_start: int
    traffic: Traffic

    def prediction(self, placement: Placement) -> Prediction:
        """What a step moves with a placement, but for `Traffic.extra_bytes`."""
        request = self.request
        if self.traffic.is_vertical:  # the order is that of a whole step
            request = dataclasses.replace(request, num_micro_batches=1)
        return predict(self.units, request, placement, self.order, self.backward_start)

    def predicted(self, plan: Plan) -> Plan:
        """The plan with what its placement moves in a step."""
        found, extra = self.prediction(plan.placement), self.traffic.extra_bytes
        return dataclasses.replace(
            plan,
            predicted_read_bytes_per_step=found.read_bytes + extra,
            predicted_write_bytes_per_step=found.write_bytes + extra,
            traffic=self.traffic,
        )


def as_record(workload: Workload, plan: Plan) -> dict[str, Any]:
    """Both, in what JSON has. `of_record` makes them of it again."""
    known, made_of = dataclasses.asdict(plan), dataclasses.asdict(workload)
    known["predicted_seconds"] = plan.predicted_step_seconds  # for whoever reads the file alone
    known["placement"] |= {name: sorted(known["placement"][name]) for name in ("resident_units", "hosted_units")}
    form = workload.request.record_format
    made_of["request"] |= {
        "record_format": [str(form.weight_dtype).removeprefix("torch."), form.main.name, form.states.value],
        "used_together": [sorted(each) for each in workload.request.used_together],
    }
    return {"plan": known, "workload": made_of}


def of_record(record: Mapping[str, Any]) -> tuple[Workload, Plan]:
    """What `as_record` was given.

    Raises:
        KeyError, TypeError, ValueError: it is not what `as_record` gives.
    """
    found, known = record["workload"], dict(record["plan"])
    dtype, main, states = found["request"]["record_format"]
    weight_dtype = getattr(torch, dtype)
    if not isinstance(weight_dtype, torch.dtype):
        raise ValueError(f"no dtype: {dtype!r}")
    request = found["request"] | {
        "record_format": ChunkFormat(weight_dtype, MainWeight[main], StateFormat(states)),
        "used_together": tuple(map(frozenset, found["request"]["used_together"])),
    }
    units = tuple(
        UnitSize(**unit | {"layer": None if unit["layer"] is None else tuple(unit["layer"])}) for unit in found["units"]
    )
    workload = Workload(
        units, Request(**request), tuple(found["order"]), found["backward_start"], Traffic(**found["traffic"])
    )
    placement = known["placement"]
    placement |= {name: frozenset(placement[name]) for name in ("resident_units", "hosted_units")}
    placement |= {name: tuple(placement[name]) for name in ("gradients_in_memory", "states_in_memory")}
    known.pop("predicted_seconds")
    known |= {
        "placement": Placement(**placement),
        "units": tuple((name, size) for name, size in known["units"]),
        "traffic": Traffic(**known["traffic"]),
        "bandwidth": None if known["bandwidth"] is None else Bandwidth(**known["bandwidth"]),
        "retention": None if known.get("retention") is None else Retention(**known["retention"]),
    }
    return workload, Plan(**known)
