"""The part of the memory budget that is for weights, and the errors if units do not fit into it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetTooSmallError, format_bytes, listed
from infinity.optim.groups import EXPERTS
from infinity.units.unit import Unit


@dataclass(frozen=True)
class WeightsBudget:
    """Bytes for flat buffers, and the config key that they are a part of."""

    key: str
    total_bytes: int
    """The value of ``key``."""
    weights_bytes: int

    def no_room(self, unit: Unit, units: Sequence[Unit], used_bytes: int, moving_bytes: int) -> BudgetTooSmallError:
        """The error if ``unit`` finds no room beside those of ``units`` that are in memory and cannot leave.

        Args:
            unit: what is needed.
            units: all units.
            used_bytes: of the flat buffers in use.
            moving_bytes: for the units that come and go.
        """
        inside = [each for each in units if each.flat is not None]
        kept_by_user = [
            each for each in inside if not each.num_active and each.flat is not None and each.flat.has_views
        ]
        held = [
            f"{u.name} ({u.num_bytes} bytes, {'kept by user code' if u in kept_by_user else 'in use'})" for u in inside
        ]
        lacking_bytes = used_bytes + unit.num_bytes - self.weights_bytes
        problem = (
            f"Unit {unit.name} ({unit.num_bytes} bytes) is needed together with {listed(held, '; ') or 'nothing else'}"
        )
        if not kept_by_user:
            return self.too_small(lacking_bytes, problem)
        if any(EXPERTS in each.name for each in kept_by_user):
            layers: Counter[str] = Counter()
            for each in units:
                if EXPERTS in each.name:
                    layers[each.name.partition(EXPERTS)[0].rpartition(".")[0]] += each.num_bytes
            others = sum(each.num_bytes for each in {unit, *inside} if EXPERTS not in each.name)
            return self.too_small(
                max(lacking_bytes, others + max(layers.values()) - self.weights_bytes),
                f"{problem}. Activation checkpointing (or user code) keeps the weights of a block that is computed once more in "
                "backward, so the experts that a layer uses have to be in memory together",
                cure="Set it to at least {minimum}; or checkpoint with use_reentrant=True, which keeps no weights",
            )
        # Code that keeps tensors of these units will keep those of others, too.
        lacking_bytes = max(lacking_bytes, moving_bytes_of(units) - moving_bytes)
        return self.too_small(
            lacking_bytes,
            f"{problem}. User code keeps tensors over the weights of {len(kept_by_user)} units that no module uses: by a "
            "checkpoint with use_reentrant=False that computes several units at once, in a list, as an attribute of an "
            "autograd.Function's context (`weight.data`), or by hooks for saved tensors that a module's forward puts up "
            "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu)",
            cure="Keep no such tensors: checkpoint unit by unit, or with use_reentrant=True; in an autograd.Function, call "
            "ctx.save_for_backward(weight); put hooks for saved tensors "
            "up around the call of the model. Otherwise all units have to be in memory: set it to at least {minimum}",
        )

    def too_small(self, lacking_bytes: int, problem: str, *, cure: str | None = None) -> BudgetTooSmallError:
        """The error if so many bytes are lacking; ``{minimum}`` in ``cure`` becomes the least value of the key."""
        minimum_bytes = self.total_bytes + 2 * lacking_bytes  # up to half of more goes into staging
        return BudgetTooSmallError(
            self.key,
            budget_bytes=self.total_bytes,
            minimum_bytes=minimum_bytes,
            reason=f"{format_bytes(self.weights_bytes)} of it are for weights. {problem}",
            cure=None if cure is None else cure.format(minimum=format_bytes(minimum_bytes, is_least=True)),
        )


def moving_bytes_of(units: Iterable[Unit]) -> int:
    """Bytes of flat buffers of those units that come and go."""
    return sum(unit.num_bytes for unit in units if not unit.is_persistent)
