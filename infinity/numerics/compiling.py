"""How loops over memory are compiled by numba, and operations that numba lacks.

Whoever imports a module of kernels waits until they are compiled, or read from numba's cache. That costs half a second and
60 MB even for one that is in the cache. So they are imported where they are used.

numba's cache looks at the file of a kernel alone. Who changes what kernels of other files compile into themselves, here or
in ``infinity.packed.blocks``, has to touch those files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]


def can_compile() -> bool:
    """Whether numba compiles at all: ``NUMBA_DISABLE_JIT`` is there for debugging."""
    return not getattr(numba.config, "DISABLE_JIT", False)


def kernel(*signatures: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function for these signatures and this processor, or read it from numba's cache.

    The cache is where numba finds room: ``NUMBA_CACHE_DIR`` if set, beside the function's file, or in the user's cache
    directory. If none can be written, each process compiles for itself.
    """
    # Signatures are given, so that numba compiles here and not in the first call. `::1`: no gaps, so loops become
    # vector code. Without the GIL, so that update workers run side by side. A division by zero gives an infinity, as in
    # torch.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def compiled(function: Kernel) -> Kernel:
        try:
            found: Any = numba.njit(list(signatures), cache=True, **options)(function)
            # Processes that compile at once may overwrite each other's index of the cache, which has no lock.
            if can_compile() and len(found.signatures) < len(signatures):
                raise RuntimeError(f"the cache has {found.signatures} of {signatures}")
        except Exception as error:  # no directory, a full disk, a broken file: none of it may stop a training
            logger.debug("compiling %s without a cache: %s", function.__name__, error)
            found = numba.njit(list(signatures), **options)(function)
        kernel: Kernel = found
        return kernel

    return compiled


def inlined(function: Kernel) -> Kernel:
    """A function that is compiled into each kernel that calls it: every combination of dtypes has a loop of its own."""
    found: Kernel = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return found


def _conversion(source: Any, target: Any, instruction: str) -> Any:
    """An LLVM instruction that makes a value of one type from one of another."""

    def typed(typing: Any, value: Any) -> Any:
        return target(source), lambda context, builder, signature, args: getattr(builder, instruction)(
            args[0], context.get_value_type(target)
        )

    return intrinsic(typed)


# The first two reinterpret bits: no conversion of numbers, no memory access.
bits_of = _conversion(types.float32, types.int32, "bitcast")
float_of = _conversion(types.int32, types.float32, "bitcast")
pointer = _conversion(types.int64, types.voidptr, "inttoptr")


def _multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    signature = types.float32(types.float32, types.float32, types.float32)
    # One rounding for a * b + c. numba never contracts a product and a sum by itself (that needs fastmath).
    return signature, lambda context, builder, signature, args: builder.fma(*args)


def _widened(typing: Any, value: Any) -> Any:
    """A gradient as float32: from float32, or from the bits of a bf16. Chosen by type, when a loop is compiled."""
    if value == types.float32:
        return types.float32(types.float32), lambda context, builder, signature, args: args[0]

    def from_half(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # A bf16 is the upper half of a float32.
        wide = builder.zext(args[0], context.get_value_type(types.int32))
        bits = builder.shl(wide, context.get_constant(types.int32, 16))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return types.float32(types.int16), from_half


multiply_add: Any = intrinsic(_multiply_add)
widened: Any = intrinsic(_widened)
