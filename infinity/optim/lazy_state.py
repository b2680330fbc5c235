"""Optimizer state that is read from where it lies only when somebody looks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any, NoReturn

from torch import Tensor

_READ_ONLY = (
    "{what}: this optimizer's state lies outside memory, and what is read of it are copies. "
    "Change state with optimizer.load_state_dict(...)"
)


class LazyEntry(dict[str, Any]):
    """One parameter's state. Every way of reading it gathers the values as they are at that moment, as copies.

    It is a dict so that torch takes it for one in `load_state_dict`; pickling (`torch.save`) and `copy.deepcopy` turn
    it into a plain mapping with values. It is never filled, and refuses to be written to.

    Args:
        gather: reads the parameter's state from where it is kept.
        name: the parameter's name, for messages.
    """

    __slots__ = ("_gather", "_name")

    def __init__(self, gather: Callable[[], dict[str, Any]], name: str) -> None:
        super().__init__()
        self._gather = gather
        self._name = name

    def gather(self) -> dict[str, Any]:
        """The values now, in a plain dict that the caller owns: one read for all of them."""
        return self._gather()

    def __getitem__(self, key: str) -> Any:
        return self._gather()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._gather().get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._gather())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._gather())

    def __len__(self) -> int:
        return len(self._gather())

    def __contains__(self, key: object) -> bool:
        return key in self._gather()

    def __bool__(self) -> bool:
        return True  # an entry exists only for a parameter that has state

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict promises its own view class
        return self._gather().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._gather().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._gather().items()

    def copy(self) -> dict[str, Any]:
        return self._gather()

    def __or__(self, other: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]  # dict has overloads
        return self._gather() | dict(other)

    def __ror__(self, other: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(other) | self._gather()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = None

    def __repr__(self) -> str:
        return f"<optimizer state of '{self._name}', not in memory: read it with entry['...'] or dict(entry)>"

    def __copy__(self) -> dict[str, Any]:
        return self._gather()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self._gather()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch.load(weights_only=True) knows OrderedDict by name, and not the builtin dict.
        return OrderedDict, (), None, None, iter(self._gather().items())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_READ_ONLY.format(what=f"cannot change the optimizer state of '{self._name}'"))

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class LazyState(MutableMapping[Tensor, LazyEntry]):
    """`optimizer.state`: maps each parameter that has state to its lazy entry. Nothing is stored here.

    Args:
        params: the optimizer's parameters in the order of its groups.
        has_state: whether a tensor is a parameter of the optimizer that has had an update.
        entry: makes a parameter's entry.
    """

    def __init__(
        self,
        params: Callable[[], Iterator[Tensor]],
        has_state: Callable[[Tensor], bool],
        entry: Callable[[Tensor], LazyEntry],
    ) -> None:
        self._params = params
        self._has_state = has_state
        self._entry = entry

    def __getitem__(self, param: Tensor) -> LazyEntry:
        # As torch's, which is a defaultdict: a parameter without state gives an empty entry.
        return self._entry(param)

    def __contains__(self, param: object) -> bool:
        return isinstance(param, Tensor) and self._has_state(param)

    def __iter__(self) -> Iterator[Tensor]:
        return (param for param in self._params() if self._has_state(param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, param: Tensor, value: Mapping[str, Any]) -> NoReturn:
        raise TypeError(_READ_ONLY.format(what="cannot assign optimizer state"))

    def __delitem__(self, param: Tensor) -> NoReturn:
        raise TypeError(_READ_ONLY.format(what="cannot delete optimizer state"))

    def __repr__(self) -> str:
        return f"<optimizer state of {len(self)} parameters, not in memory>"
