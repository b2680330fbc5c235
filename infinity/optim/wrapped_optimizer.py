"""The optimizer instance whose parameter groups the user sees, and whose state is kept elsewhere."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from infinity.errors import ConfigError, ModelError, OptimizerNotPageableError
from infinity.optim.classes import Muon, is_for_muon
from infinity.optim.executor import OptimizerExecutor, one_element, refuse_common
from infinity.optim.groups import Groups, Members, TiledGroups
from infinity.optim.main_weights import MAIN_WEIGHT, with_main_weight, without_main_weight
from infinity.optim.registry import Section, is_verified, refuse_not_pageable, refuse_wrapper, resolve

logger = logging.getLogger(__name__)

#: What `initialize(optimizer=...)` takes, or the config's block.
OptimizerSource: TypeAlias = "Section | Optimizer | type[Optimizer] | Callable[[Any], Optimizer]"


class WrappedOptimizer:
    """Hyperparameters by group, and which parameter is in which group, as they are at the moment.

    The optimizer instance never steps and holds no state.

    Args:
        optimizer: its list `param_groups` and the dicts in it are shared with the user and learning rate schedulers, and
            may be changed or replaced at any time.
        fqns: the model's parameters and their names.
        device: where updates run.
        tiled: which of them are tiles of others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        fqns: Mapping[Parameter, str],
        device: torch.device,
        tiled: TiledGroups | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.tiled = tiled or TiledGroups()
        self._moved: dict[Parameter, tuple[dict[str, torch.dtype], Tensor | None]] = {}
        """The dtypes of states that `pop_initial_states` has moved out, and main weights, to restore them."""
        self._untouched: dict[Any, Any] = {}
        """States that the optimizer's constructor made and no step has changed, as torch's ``optimizer.state``."""
        # What constructors of known classes fill states with: zeros, or Adagrad's initial_accumulator_value.
        initial = {0.0, *(group.get("initial_accumulator_value", 0.0) for group in optimizer.param_groups)}
        self._initial = initial if is_verified(type(optimizer)) else None
        if all(self._is_untouched(state) for state in optimizer.state.values()):
            # The constructor made them: each slice's first step makes the same again, so nothing has to be stored.
            self._untouched = dict(optimizer.state)
            optimizer.state.clear()
        self.started = {
            param: {name: _compact(value) for name, value in state.items()}
            for param, state in self._untouched.items()
            if is_verified(type(optimizer))
        }
        """Parameter -> the state that the optimizer's constructor made for it, and that it has until its first step.
        Each tensor is stored compactly, as the one value that fills it."""
        self._fqns = dict(fqns)
        self._known = frozenset(map(id, self._fqns))
        self._members = Members(optimizer.param_groups, self._known)
        self.reserved: dict[Parameter, None] = {}
        """Parameters that `reserve_states` has named, as an ordered set."""

    @property
    def name(self) -> str:
        """The optimizer's class, as messages call it."""
        return type(self.optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own list: changes to it take effect."""
        return self.optimizer.param_groups

    def executor(self) -> OptimizerExecutor:
        """Runs steps of the optimizer's class on tensors that it is given."""
        return OptimizerExecutor(self.optimizer, self.device)

    def params(self) -> Iterator[Parameter]:
        """All parameters in the order of the groups, frozen ones included."""
        for group in self.param_groups:
            yield from group["params"]

    def reserve_states(self, parameters: Iterable[Parameter]) -> None:
        """These have room and keep it where all is laid out anew, though they may have left their groups meanwhile."""
        self.reserved = dict.fromkeys(parameters)

    def with_states(self) -> list[Parameter]:
        """Parameters that get room for main weights and states: in a group, reserved, or trainable."""
        if not self.param_groups:
            return []
        # Once each, in this order: groups, parameters that had left them, and trainable ones that may still join.
        trainable = (parameter for parameter in self._fqns if parameter.requires_grad)
        return list(dict.fromkeys([*self.params(), *self.reserved, *trainable]))

    def members(self) -> Members:
        """Which parameter is in which group now."""
        groups = self.param_groups
        if not self._members.are_of(groups):
            self._members = Members(groups, self._known)
        return self._members

    def read(self) -> Groups:
        """The groups as they are now, for updates that run later. Tensors are copied.

        Raises:
            ModelError: a parameter is in two groups, or twice in one: it would be updated twice.
        """
        members = self.members()
        if members.twice is not None:
            param, indices = members.twice
            raise ModelError.in_two_groups(self.fqn(param), group_indices=indices)
        return Groups(self.param_groups, members)

    def known(self) -> Iterator[Parameter]:
        """All parameters of the model, whether they are in a group or not."""
        return iter(self._fqns)

    def __contains__(self, param: object) -> bool:
        """Whether it is a parameter of the model (others may have been added to the groups)."""
        return id(param) in self._known

    def fqn(self, param: Tensor) -> str:
        """The parameter's name in the model, or what it is if it is none of the model's."""
        known = self._fqns.get(param)  # type: ignore[call-overload]  # any tensor may be asked for
        return known or f"a tensor of shape {tuple(param.shape)}"

    def add_group(self, param_group: dict[str, Any]) -> None:
        """As torch's ``add_param_group``, with its errors. Nothing is kept of a refused one."""
        before = list(self.param_groups)
        state = self.optimizer.state
        self.optimizer.state = defaultdict(dict)  # a class may start states here, as large as the parameters
        try:
            self.optimizer.add_param_group(self.tiled.with_tiles(param_group))
        except BaseException:
            self.param_groups[:] = before
            raise
        finally:
            self.optimizer.state = state

    def started_state(self, param: Tensor) -> dict[str, Any]:
        """The state that the constructor made for the parameter, empty if none."""
        return {
            name: torch.full(param.shape, value, dtype=torch.float32, device="cpu")
            if isinstance(value, float)
            else value.clone()
            for name, value in self.started.get(param, {}).items()
        }

    def pop_initial_states(self) -> Iterator[tuple[Parameter, dict[str, Any]]]:
        """Move out the state that the optimizer had when it was passed in: of a training that goes on.

        Yields:
            Each parameter that has such state, with it: element-wise tensors as float32, the rest as it is, and a main
            weight under `MAIN_WEIGHT` if one came with it. What is yielded is no longer referenced from here but for main
            weights, so memory goes as the caller goes on.
        """
        executor = self.executor()
        groups = self.read()
        for param in list(self.params()):
            state, main = without_main_weight(self.optimizer.state.get(param) or {})
            if main is not None or not self._is_untouched(state):
                large = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
                # Small entries go through the class's own load_state_dict, with one element in place of each large
                # tensor.
                small = {name: one_element() if name in large else value for name, value in state.items()}
                # Step counts may have to move to where updates run.
                loaded = executor.load(groups.of(param) or {}, small, one_element(self.device))
                with_main = {} if main is None else {MAIN_WEIGHT: main}
                yield param, {name: _as_main(large.get(name, value)) for name, value in loaded.items()} | with_main
                # Only now that the caller has stored it: until then, an undo leaves it where it is. The main weight is
                # kept for `restore_states`: the caller's may have been freed.
                self._moved[param] = {name: value.dtype for name, value in large.items()}, main
                del large, small, loaded
            elif state:
                self._untouched[param] = state
            self.optimizer.state.pop(param, None)
            del state
        self.optimizer.state.clear()  # keys that are no parameters of the groups: torch's step would ignore them

    def _is_untouched(self, state: Mapping[str, Any]) -> bool:
        """Whether a constructor started it: no step has been made with it, and nobody has written numbers of its own into it."""
        step = state.get("step")
        if state and not (isinstance(step, Tensor | int | float) and float(step) == 0):
            return False
        # Of a class that is not known, nothing but a step count of zero can be asked.
        return self._initial is None or all(
            any(bool((value == each).all()) for each in self._initial)
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )

    def restore_states(self, read: Callable[[Parameter], Mapping[str, Any]]) -> None:
        """Undo `pop_initial_states`: the optimizer has its states again, in the dtypes that they had.

        Args:
            read: gives a state that was taken, from where it was put.
        """
        for param, (dtypes, main) in self._moved.items():
            state = read(param)
            given = {name: value.to(dtypes[name]) if name in dtypes else value for name, value in state.items()}
            self.optimizer.state[param] = given if main is None else with_main_weight(given, main)
        self.restore_untouched()

    def restore_untouched(self) -> None:
        """The optimizer has the states again that its constructor made."""
        self.optimizer.state.update(self._untouched)

    def forget_untouched(self) -> None:
        """`restore_states` will not be called."""
        self._untouched.clear()
        self._moved.clear()


def wrap_optimizer(
    source: OptimizerSource,
    named_params: Iterable[tuple[str, Parameter]],
    device: torch.device | str,
    *,
    model_parameters: Iterable[Any] | None = None,
    tiled: TiledGroups | None = None,
) -> WrappedOptimizer:
    """Make the wrapped optimizer from what the user gave.

    A known class (from the config, passed, or in a `functools.partial`) is constructed on one-element stand-ins for the
    parameters, because some constructors allocate the whole state (Adagrad). Any other class or callable gets the true
    parameters, because it may look at their shapes.

    Args:
        source: the config's optimizer block, an optimizer, its class, or a callable that takes parameters or groups
            and returns one.
        named_params: all parameters of the model, frozen ones too.
        device: where updates will run.
        model_parameters: parameters, (name, parameter) pairs or groups for the sources that construct. None: all
            trainable ones in one group. Ignored for an instance, as in DeepSpeed.
        tiled: which of the model's parameters are tiles of others.

    Raises:
        ConfigError: the source is none of these, or the constructor refuses its arguments.
        OptimizerNotPageableError: the class is known to mix elements.
        ModelError: a trainable parameter is in two groups, or twice in one; a group holds a tensor that is no parameter
            of the model.
    """
    fqns = _names_of(named_params)
    device = torch.device(device)
    if isinstance(source, Optimizer):
        # The script's own instance is turned into the engine's later (`PassedOptimizer`): another instance keeps
        # its attributes.
        optimizer = _same(source)
    else:
        if model_parameters is None:
            model_parameters = [param for param in fqns if param.requires_grad]
        given: list[Any] = (
            [model_parameters] if isinstance(model_parameters, Tensor | Mapping) else list(model_parameters)
        )
        is_grouped = bool(given) and isinstance(given[0], Mapping)
        groups = [_fresh(group) for group in (given if is_grouped else [{"params": given}])]
        _check_groups([[_member(item) for item in group["params"]] for group in groups], fqns)
        optimizer = _construct(source, groups, fqns, device, is_grouped=is_grouped)
    refuse_not_pageable(type(optimizer))
    refuse_wrapper(optimizer)
    # States under other keys belong to no parameter, and a slice could not use them.
    keys: list[Any] = list(optimizer.state)
    refuse_common(optimizer, [key for key in keys if not isinstance(key, Tensor)])
    missing = _check_groups([group["params"] for group in optimizer.param_groups], fqns)
    # Only a warning, as torch trains such models, too: it is often intended (an adapter's base).
    if missing:
        logger.warning(
            "%d trainable parameters are in no parameter group (the first is '%s'): as in torch, they get gradients "
            "and no updates. Freeze them with requires_grad_(False), which saves the memory and time for their "
            "gradients and states",
            len(missing),
            missing[0],
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerNotPageableError(
                type(optimizer).__name__,
                f"group {index} has differentiable=True, and no graph is kept through an update",
                cure="Leave `differentiable` out",
            )
    return WrappedOptimizer(optimizer, fqns, device, tiled)


def _same(optimizer: Optimizer) -> Optimizer:
    """Another instance with the very attributes of this one: it remains when the script's is made the engine's."""
    cls = type(optimizer)
    same = cls.__new__(cls)
    object.__setattr__(same, "__dict__", vars(optimizer))
    return same


class _Absent(Optimizer):
    def __init__(self) -> None:
        # Not Optimizer.__init__, which raises for an empty list of parameters.
        super().__setstate__({"defaults": {}, "state": defaultdict(dict), "param_groups": []})

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError("there is no optimizer")


def no_optimizer(named_params: Iterable[tuple[str, Parameter]], device: torch.device) -> WrappedOptimizer:
    """The optimizer of an engine that only evaluates its model: no groups, no states.

    Args:
        named_params: all parameters of the model.
        device: where updates would run.
    """
    return WrappedOptimizer(_Absent(), _names_of(named_params), device)


def _names_of(named_params: Iterable[tuple[str, Parameter]]) -> dict[Parameter, str]:
    """The first name of each."""
    fqns: dict[Parameter, str] = {}
    for fqn, param in named_params:
        fqns.setdefault(param, fqn)
    return fqns


def _fresh(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of its own, into which constructors may write."""
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _divided_for_muon(groups: Iterable[dict[str, Any]], fqns: Mapping[Parameter, str]) -> list[dict[str, Any]]:
    """Each group that does not say ``use_muon`` becomes two."""
    divided: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            divided.append(group)
            continue
        # A matrix for Muon, a vector or embedding for Adam: one group of each kind that occurs.
        of_kind: dict[bool, list[Any]] = {True: [], False: []}
        for item in group["params"]:
            of_kind[is_for_muon(fqns[_member(item)], _member(item))].append(item)
        kinds = [kind for kind, items in of_kind.items() if items] or [False]
        divided += [{**group, "params": of_kind[kind], "use_muon": kind} for kind in kinds]
    return divided


def _member(item: Any) -> Any:
    return item[1] if isinstance(item, tuple) else item


def _construct(
    source: Any, groups: list[dict[str, Any]], fqns: Mapping[Parameter, str], device: torch.device, *, is_grouped: bool
) -> Optimizer:
    recipe = _recipe(source, device)
    cls: Any = None if recipe is None else recipe.func
    if cls is not None:
        refuse_not_pageable(cls)
    if cls is Muon:
        groups = _divided_for_muon(groups, fqns)
    # Classes that are not known get the true parameters, because they may look at shapes or values.
    if recipe is None or not is_verified(cls):
        given: Any = groups if is_grouped else groups[0]["params"]
        optimizer = source(given) if recipe is None else _made(recipe, given)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"the optimizer callable returned {type(optimizer).__name__}. It must return a torch.optim.Optimizer",
                key="optimizer",
            )
        return optimizer
    originals: dict[Tensor, Tensor] = {}

    def stand_in(item: Any) -> Any:
        param = _member(item)
        # As many dimensions as the parameter: Muon refuses vectors. One element, because Adagrad allocates its states
        # here.
        small = Parameter(one_element(device, num_dims=param.dim()), requires_grad=param.requires_grad)
        originals[small] = param
        return (item[0], small) if isinstance(item, tuple) else small

    optimizer = _made(recipe, [{**group, "params": list(map(stand_in, group["params"]))} for group in groups])
    for group in optimizer.param_groups:
        group["params"] = [originals[small] for small in group["params"]]
    states = {originals[small]: state for small, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)
    return optimizer


def _made(recipe: functools.partial[Optimizer], groups: list[Any]) -> Optimizer:
    try:
        return recipe(groups)
    # LookupError: AdamW with one beta. ArithmeticError: a division by an argument.
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError) as error:
        problem = f"{str(error) or type(error).__name__}. Correct its arguments"
        given = f" with {recipe.keywords}" if recipe.keywords else ""
        raise ConfigError(f"optimizer {recipe.func.__name__}{given}: {problem}", key="optimizer") from error


def _recipe(source: Any, device: torch.device) -> functools.partial[Optimizer] | None:
    """A class, and the keyword arguments to construct it with besides the parameters; None for any other callable."""
    if isinstance(source, type) and issubclass(source, Optimizer):
        return functools.partial(source)
    if isinstance(source, functools.partial) and isinstance(source.func, type) and not source.args:
        return source
    if callable(source):
        return None
    if isinstance(source, Section):
        return resolve(source, device)
    raise ConfigError(
        f"cannot make an optimizer from {type(source).__name__}. Pass a torch.optim.Optimizer, its class, a callable "
        'that takes parameters and returns one, or name one in the config\'s "optimizer" block',
        key="optimizer",
    )


def _check_groups(members: Sequence[Sequence[Any]], fqns: Mapping[Parameter, str]) -> list[str]:
    """See that groups hold parameters of the model, each trainable one once. Returns names of those that are in none."""
    places: dict[Tensor, list[int]] = {}
    for index, group in enumerate(members):
        for param in group:
            if not isinstance(param, Tensor):
                raise ConfigError(
                    f"parameter group {index} holds a {type(param).__name__}. Pass parameters, "
                    "(name, parameter) pairs, or groups of them",
                    key="model_parameters",
                )
            if param not in fqns:
                raise ModelError(
                    f"parameter group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter "
                    "of the model. Make the optimizer from the parameters of the model that you pass to "
                    "infinity.initialize, after any .to() or cast. Add parameters outside of the model later: "
                    'optimizer.add_param_group({"params": [...]}) of the optimizer that infinity.initialize returns'
                )
            places.setdefault(param, []).append(index)
    trainable = {param: fqn for param, fqn in fqns.items() if param.requires_grad}
    repeated = [param for param in trainable if len(places.get(param, [])) > 1]
    if repeated:
        raise ModelError.in_two_groups(
            trainable[repeated[0]], group_indices=places[repeated[0]], num_others=len(repeated) - 1
        )
    return [fqn for param, fqn in trainable.items() if param not in places]


def _compact(value: Any) -> Any:
    """A float for a tensor of one value for each element; others as they are."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return float(value.reshape(-1)[0]) if value.numel() else 0.0
    return value


def _as_main(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point() else value
