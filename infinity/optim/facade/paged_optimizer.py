"""The optimizer that `initialize` returns: a torch optimizer whose state lies elsewhere. And the one that was passed to it."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import chain
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from infinity.errors import EngineClosedError, OptimizerNotPageableError, StepError
from infinity.optim.facade.lazy_state import AssignedTensors, LazyEntry, LazyState, ReadOnlyTensor, unprotected
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.facade.state_loader import StateLoader, check_entry
from infinity.optim.main_weights import PENDING, with_main_weight, without_main_weight
from infinity.optim.slice_updater import SliceUpdater, attribute_names, is_of_the_class
from infinity.optim.wrapped_optimizer import WrappedOptimizer


class PagedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` in front of the engine.

    `param_groups` is the wrapped optimizer's list, so learning rate schedulers of any kind work on either.
    `state_dict()` costs nothing: its entries read a parameter's state at the first look, or while they are pickled, and
    then give what it is at that time.

    Args:
        wrapped_optimizer: class, hyperparameters and groups.
        updater: knows which state there is.
        backend: the engine, which has weights and gradients, and runs the updates (`optimizer_step`, ``optimizer_...``).
        keeper: has the states (`has_place`, `has_state`, `gather_state`, `load_state`, and ``num_loads``, how often they were
            replaced).
        loose: updates what is added later; whose step the backend makes.
        mains: has the main weights (`gather_main_weight`, `load_main_weight`), where those are something else than the
            parameters; else None.
    """

    def __init__(
        self,
        wrapped_optimizer: WrappedOptimizer,
        updater: SliceUpdater,
        backend: Any,
        keeper: Any,
        loose: LooseParameters,
        mains: Any = None,
    ) -> None:
        # Not Optimizer.__init__: it would make groups of its own. The wrapped optimizer last: from then on, names that the
        # user's class has, and that are not here, are those of its optimizer.
        self._updater = updater
        self._backend = backend
        self._keeper = keeper  # reads and replaces the states
        self._loose = loose
        self._mains = mains  # reads and replaces main weights; None: the parameters are the main weights
        source = wrapped_optimizer.optimizer
        self._assigned = AssignedTensors()
        # For entries of state dicts, which may outlive the engine: the script's own instance is no paged one then.
        self._paged = self
        # The parameter that was looked at last, and its entry: a loop over a parameter's states reads once.
        self._last_entry: tuple[Tensor, LazyEntry] | None = None
        self._num_changes = 0
        self._state = LazyState(
            wrapped_optimizer.params, self.has_state, self._entry, self._loose.state, wrapped_optimizer.known
        )
        super().__setstate__(
            {"defaults": source.defaults}
            # The very dictionaries: hooks registered before `initialize` run, and their handles still remove them.
            | {name: hooks for name, hooks in vars(source).items() if name.endswith("_hooks")}
        )
        self._passed: Optimizer | None = None
        self._wrapped_optimizer = wrapped_optimizer

    def adopt_optimizer(self, passed: Optimizer) -> None:
        """The script's own instance is this optimizer from now on, see `PassedOptimizer`."""
        self._passed = passed

    def __getattr__(self, name: str) -> Any:
        """What else the user's class has: attributes, and methods, which then work on these groups and states."""
        wrapped_optimizer = vars(self).get("_wrapped_optimizer")
        if wrapped_optimizer is not None and not name.startswith("__"):
            source = wrapped_optimizer.optimizer
            if name in attribute_names(source):
                return vars(source)[name]
            if is_of_the_class(source, name):
                return getattr(type(source), name)
            method = getattr(type(source), name, None)
            if isinstance(method, FunctionType):  # bound to this instance, so that it sees these groups and states
                return MethodType(method, self)
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped_optimizer = vars(self).get("_wrapped_optimizer")
        is_own = name in vars(self) or name in dir(type(self))
        source = None if is_own or wrapped_optimizer is None else wrapped_optimizer.optimizer
        if source is not None and (name in attribute_names(source) or is_of_the_class(source, name)):
            setattr(source, name, value)  # `SliceUpdater.check_attributes` sees it
        else:
            super().__setattr__(name, value)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups: whatever is changed in them, or assigned, is what the next step goes by."""
        return self._wrapped_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped_optimizer.optimizer.param_groups = groups  # the user's own instance has them, too

    @property
    def state(self) -> Any:
        """The states, see `LazyState`: what is read is a read-only copy, and what is assigned is stored."""
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state.replace(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickled or old states: groups and state go through the setters above, where torch would write to __dict__.
        for name in ("state", "param_groups"):
            if name in state:
                setattr(self, name, state[name])
        super().__setstate__({name: value for name, value in state.items() if name not in ("state", "param_groups")})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient, with the hyperparameters as they are now.

        Args:
            closure: recomputes the loss with gradients; called once, before the update.

        Returns:
            What the closure returned, or None without one.
        """
        loss = None
        # Outside of the lock: the closure runs forward and backward.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._backend.optimizer_lock("optimizer.step()"):
            self._assigned.check()
            self._backend.optimizer_step()
            if not self._backend.was_step_skipped():  # else all entries that were read are still right
                self.expire_states()
        # where a scheduler looks for whether a step came before its own
        for each in (self, self._wrapped_optimizer.optimizer):
            vars(each)["_opt_called"] = True
        return loss

    @property
    def overflow(self) -> bool:
        """Whether the last step changed nothing, because its gradients were not finite."""
        return bool(self._backend.was_step_skipped())

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1 unless the compute dtype is fp16."""
        return float(self.loss_scaler.loss_scale)

    cur_scale = loss_scale
    """DeepSpeed's other name for it."""

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the steps."""
        return bool(self.loss_scaler.dynamic)

    @property
    def loss_scaler(self) -> Any:
        """The loss scale and its rule, as they are after each step; to be read."""
        return self._backend.loss_scaler()

    loss_scale_config = loss_scaler
    """DeepSpeed's name for it where there is no ZeRO."""

    def needs_scaler(self) -> bool:
        """Whether a ``loss.backward()`` of one's own needs ``engine.scale(loss)`` before."""
        return bool(self.loss_scaler.is_active)

    @property
    def optimizer(self) -> Optimizer:
        """Where DeepSpeed has the optimizer that it wraps: this one, with the same groups and states."""
        name = type(self._wrapped_optimizer.optimizer).__name__  # loggers show it
        unwrapped: Optimizer = type(name, (_Unwrapped,), {})(self)
        return unwrapped

    @cached_property
    def parameter_offload(self) -> SimpleNamespace:
        """Where DeepSpeed's stage 3 has its hooks, which TRL takes off the model while it generates. There are none."""
        module = nn.Module()
        vars(module)["ds_external_parameters"] = tuple
        taken_without_effect = {"_register_deepspeed_module": lambda module: None}
        return SimpleNamespace(module=module, forward_hooks=[], backward_hooks=[], **taken_without_effect)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set those that are there to zero: they then decay all the same."""
        self._backend.optimizer_zero_grad(set_to_none=set_to_none)
        self._loose.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Its parameters are the model's, or new ones that the engine does not hold: these stay ordinary parameters, with
        gradient and state in memory beyond the budget. For those of the model that were frozen and in no group until now,
        all is laid out anew, which reads and writes everything once and takes as much space on the drives again meanwhile.

        Raises:
            BudgetTooSmallError, StorageError: there is no room for their states; the group is not added then.
            StepError: weights are in use: in forward, backward, or gathered.
            ModelError: the run is durable, and has no room for states that come later.
        """
        # First torch's checks, which may refuse the group; then room for its states, which may fail as well.
        self._wrapped_optimizer.add_group(param_group)
        with self._backend.optimizer_lock("optimizer.add_param_group()"):
            self._backend.make_room()

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's layout; the state's entries are lazy, see the class. Their tensors are copies: what is
        written into them takes effect by `load_state_dict`.

        With 16-bit weights, the entries hold the fp32 main weights as well: see ``infinity.optim.main_weights``.
        """
        with self._backend.optimizer_lock("optimizer.state_dict()"):
            # A write to an assigned tensor would be missing from the dict.
            self._assigned.check()
            for pre_hook in self._optimizer_state_dict_pre_hooks.values():
                pre_hook(self)
            groups = [
                # Tiles are an engine's matter: in the dict is the whole parameter, as in plain torch.
                {**group, "params": self._wrapped_optimizer.tiled.without_tiles(group["params"])}
                for group in self.param_groups
            ]
            keys = {param: key for key, param in enumerate(chain.from_iterable(group["params"] for group in groups))}
            state, pending = self._lazy_entries(keys)
            for group in groups:
                group["params"] = [keys[param] for param in group["params"]]
            found: Any = {"state": state, "param_groups": groups} | ({PENDING: pending} if pending else {})
            for post_hook in self._optimizer_state_dict_post_hooks.values():
                found = post_hook(self, found) or found
            return dict(found)

    def _lazy_entries(self, keys: Mapping[Tensor, int]) -> tuple[dict[Any, Any], dict[int, LazyEntry]]:
        """Entries of parameters with state, and of those with a main weight alone."""
        state: dict[Any, Any] = {}
        pending: dict[int, LazyEntry] = {}
        for param, key in keys.items():
            parts = self._wrapped_optimizer.tiled.all_of(param)
            if parts[0] not in self._wrapped_optimizer:  # a loose parameter: below
                continue
            has_main = self._mains is not None and all(map(self.has_place, parts))
            num_with_state = sum(map(self.has_state, parts))
            # Tiles of which only some have state cannot be one entry: such a parameter gets none.
            if num_with_state == len(parts) or (has_main and not num_with_state):
                read = partial(self._paged._read_whole, param, has_main=has_main)
                tiled = self._wrapped_optimizer.tiled.of(param)
                fqn = self._wrapped_optimizer.fqn(param) if tiled is None else tiled.fqn
                (state if num_with_state else pending)[key] = LazyEntry(read, self._paged._clock, fqn)
        others: Mapping[Any, Any] = self._loose.state  # whatever else a class keeps is there, too
        for other, entry in others.items():
            if not isinstance(other, Tensor) or other in keys:
                state[keys[other] if isinstance(other, Tensor) else other] = entry
        return state, pending

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what the `state_dict()` of this optimizer, or of the plain torch one it stands for, returned.

        Checks come first, so a refused dict changes nothing. State is then written parameter by parameter; a parameter
        without an entry starts anew. Hyperparameters are those of the dict, as in torch. Where the dict holds fp32 main
        weights and this training has any, it has those of the dict, and model weights are their cast: the order in which
        model and optimizer are loaded does not matter.

        Raises:
            ValueError: groups of other number or sizes, a state of another shape, or state that this optimizer does
                not keep under the hyperparameters it was made with.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        # All checks: nothing is changed before `load_into`.
        loader = StateLoader(self._wrapped_optimizer, self._updater, state_dict)
        with self._backend.optimizer_lock("optimizer.load_state_dict()"):
            loader.load_into(self, self._mains)
            self.expire_states()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def update_by(self, updater: SliceUpdater, keeper: Any, mains: Any) -> None:
        """Use these from now on, because the backend has laid everything out anew. See the constructor's arguments."""
        self._updater, self._keeper, self._mains = updater, keeper, mains
        self.expire_states()

    # ------------------------------------------------------------------------------------------------ the states

    def expire_states(self) -> None:
        """States have changed: entries are read anew."""
        self._num_changes += 1
        self._last_entry = None
        self._assigned.forget()

    def _clock(self) -> object:
        return self._num_changes, self._keeper.num_loads  # steps here, and loads that go past this object

    def _read(self, param: Tensor) -> dict[str, Any]:
        if self._backend.is_closed:
            which = f"the state of '{self._wrapped_optimizer.fqn(param)}'"
            raise EngineClosedError(f"{which} was not read before the engine was closed. {_CURE_OF_GONE}")
        with self._backend.optimizer_lock("optimizer.state"):  # all of one step
            self._assigned.check()  # what the script wrote after assigning is not stored: it would read other values
            return self.gather_state(param)

    def _read_whole(self, param: Tensor, *, has_main: bool) -> dict[str, Any]:
        """A parameter's entry of a state dict, joined from its tiles."""
        with self._backend.optimizer_lock("optimizer.state"):  # all of one step
            parts, tiled = self._wrapped_optimizer.tiled.all_of(param), self._wrapped_optimizer.tiled.of(param)
            entries = [self._read(part) for part in parts]
            if has_main:
                mains = [self._mains.gather_main_weight(part) for part in parts]
                entries = [with_main_weight(entry, main) for entry, main in zip(entries, mains, strict=True)]
            return entries[0] if tiled is None else tiled.join_entries(entries)

    def _store(self, param: Tensor, values: dict[str, Any]) -> None:
        with self._backend.optimizer_lock("optimizer.state"):  # all of one step
            self._assigned.check()
            plain = {
                # A value that was read and is stored again is a protected copy: the keeper gets the tensor itself.
                key: unprotected(value) if isinstance(value, ReadOnlyTensor) else value
                for key, value in values.items()
            }
            self.load_state(param, plain)
            self._assigned.add(self._wrapped_optimizer.fqn(param), values)

    def has_state(self, param: Tensor) -> bool:
        """Whether a parameter has state."""
        if param not in self._wrapped_optimizer:
            return bool(self._loose.state.get(param))
        return param in self._wrapped_optimizer.started or self._keeper.has_state(param)

    def has_place(self, param: Tensor) -> bool:
        """Whether a parameter can have state."""
        return param not in self._wrapped_optimizer or self._keeper.has_place(param)

    def gather_state(self, param: Tensor) -> dict[str, Any]:
        """Copies of a parameter's state after all updates asked for; before the first step, what the constructor made."""
        return self._keeper.gather_state(param) or self._wrapped_optimizer.started_state(param)

    def check_scalars(self, param: Tensor, scalars: Mapping[str, Any]) -> None:
        """Check those of a state that was saved after an update. Raises ValueError where the next step could not go on."""
        values = self._wrapped_optimizer.read().of(param)
        if values is None:
            return
        schema = self._updater.schema_under(values)
        for name in schema.scalars:
            if name not in scalars or isinstance(scalars[name], Tensor) != (name in schema.tensors):
                there = f"{scalars[name]!r:.40} as" if name in scalars else "no"
                raise ValueError(f"the state of '{self._wrapped_optimizer.fqn(param)}' has {there} '{name}'")

    def load_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's state; with an empty one it starts anew. Tensors belong to the caller, and are copied.

        Raises:
            ValueError: it does not fit, or lacks what the optimizer needs; nothing has been changed.
        """
        if param not in self._wrapped_optimizer:
            self._loose.load_state(param, state)
            return
        state, main = without_main_weight(state)
        values = self._wrapped_optimizer.read().of(param)
        if state and values is not None:
            check_entry(self._wrapped_optimizer.fqn(param), state, self._updater.schema_under(values))
        self._keeper.load_state(param, state)
        self._wrapped_optimizer.started.pop(param, None)  # the constructor's state does not count any more
        if main is not None and self._mains is not None:
            self._mains.load_main_weight(param, main)

    def _entry(self, param: Tensor) -> LazyEntry | None:
        tiled = self._wrapped_optimizer.tiled.of(param)
        # An entry is one parameter's state as it is; that of tiles would have to be joined and cut.
        if tiled is not None:
            raise tiled.access_error("optimizer.state")
        if param not in self._wrapped_optimizer:
            return None
        if self._last_entry is None or self._last_entry[0] is not param:
            read, store = partial(self._read, param), partial(self._store, param)
            self._last_entry = param, LazyEntry(read, self._clock, self._wrapped_optimizer.fqn(param), store)
        return self._last_entry[1]

    def __repr__(self) -> str:
        return f"Paged{self._wrapped_optimizer.optimizer!r}"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer whose state is stored outside of memory cannot be copied or pickled. Use "
            "optimizer.state_dict() with torch.save or copy.deepcopy"
        )


class _Unwrapped(PagedOptimizer):
    """The same optimizer, but for its attribute ``optimizer``: whoever unwraps comes to an end."""

    def __init__(self, optimizer: PagedOptimizer) -> None:
        # One object under two classes: whatever is changed in either is changed in both.
        self.__dict__ = optimizer.__dict__

    def __eq__(self, other: object) -> bool:
        """In DeepSpeed it is the very one that was passed, in which schedulers are looked for."""
        return other is self._counterpart or (isinstance(other, _Unwrapped) and vars(other) is vars(self))

    def __hash__(self) -> int:
        return hash(self._counterpart)

    @property
    def _counterpart(self) -> Optimizer:
        return self._passed or self._wrapped_optimizer.optimizer

    @property
    def optimizer(self) -> Optimizer:
        # Code that unwraps while there is an attribute of this name ends here.
        raise AttributeError("optimizer")


logger = logging.getLogger(__name__)


class PassedOptimizer:
    """Turns a script's optimizer into a paged one, and back.

    While the engine lives, the script's class and attributes are exchanged for those of the paged optimizer, so that every
    reference to it works: the script's, a scheduler's, a trainer's. At the end of the engine it gets its own back. The states
    are gone then: they may be larger than memory, so nothing is copied. A script that goes on without them gets an error.
    """

    def __init__(self, passed: Any, own: Optimizer, paged: PagedOptimizer) -> None:
        """
        Args:
            passed: what the script has.
            own: has the class and the very attributes of ``passed``, and keeps them meanwhile.
            paged: the engine's, whose attributes both have from now on.

        Raises:
            OptimizerNotPageableError: Python cannot exchange the class.
        """
        self.optimizer = passed
        """The script's, which is a `PagedOptimizer` until `restore`."""
        self._own = own
        name = type(own).__name__  # loggers show it
        try:
            # A class of the same name. `object.__setattr__`, because the script's class may have a __setattr__ of its
            # own.
            object.__setattr__(passed, "__class__", type(name, (PagedOptimizer,), {}))
        except TypeError as error:
            raise OptimizerNotPageableError(
                name,
                f"Python cannot turn the instance into the one that makes the engine's steps ({error})",
                cure="Pass the class, or a functools.partial of it: initialize(optimizer=functools.partial(cls, lr=...))",
            ) from error
        object.__setattr__(passed, "__dict__", vars(paged))
        # torch's schedulers wrap `step` on the instance, and warn if the mark is missing. The script's scheduler has
        # marked its optimizer before: the paged one gets the same mark.
        if hasattr(vars(own).get("step"), "_wrapped_by_lr_sched"):
            step: Any = functools.partial(PagedOptimizer.step, passed)  # it is a PagedOptimizer now
            step._wrapped_by_lr_sched = True
            vars(paged)["step"] = step
        paged.adopt_optimizer(passed)

    def restore(self, *, had_states: bool) -> None:
        """The script's optimizer is what it was, but for what was changed in its groups. May be called again.

        Args:
            had_states: it would have states in plain torch.
        """
        if not isinstance(self.optimizer, PagedOptimizer):
            return
        object.__setattr__(self.optimizer, "__dict__", vars(self._own))
        object.__setattr__(self.optimizer, "__class__", type(self._own))
        # In plain torch the states would be here: an empty dict would let a script start anew without notice.
        if had_states and not self.optimizer.state:
            self.optimizer.state = _Gone()


_GONE = "the engine that held the states of this optimizer is closed, and the states are lost"
_CURE_OF_GONE = (
    "Call copy.deepcopy(optimizer.state_dict()) before engine.close(), and load the result with "
    "optimizer.load_state_dict()"
)
"""Without the copy, a state dict reads each state when it is first looked at."""


class _Gone(defaultdict[Any, Any]):
    """`optimizer.state` after its engine: refuses steps and state dicts, until ``load_state_dict`` puts another in its place."""

    def __getitem__(self, key: Any) -> NoReturn:
        raise StepError.order("step()", _GONE, cure=_CURE_OF_GONE)

    def items(self) -> NoReturn:
        raise StepError.order("state_dict()", _GONE, cure=_CURE_OF_GONE)


def begin_anew(optimizer: Optimizer) -> None:
    """An optimizer is passed that may have been passed before."""
    if isinstance(optimizer.state, _Gone):
        optimizer.state = defaultdict(dict)
        logger.warning(
            "the optimizer was passed to an earlier engine, and its states were lost when that engine closed: it "
            "starts without states. To keep them, call copy.deepcopy(optimizer.state_dict()) before engine.close() and "
            "load the result"
        )
