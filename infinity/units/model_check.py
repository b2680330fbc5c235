"""Refuses models that an engine cannot page, before anything is written."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch import nn

from infinity.errors import ModelError, OtherNumbersWarning
from infinity.torch_internals.operations import leaves
from infinity.units.parameter import PagedParameter, ResidentParameter, host_of
from infinity.units.unit import dense_strides, is_float8

_SHORT = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Attributes of a module that are not looked into for stray tensors: parameters may hold their own memory, buffers are
# looked at by themselves, and children are visited by `named_modules`.
_OTHER_HOLDERS = frozenset({"_parameters", "_buffers", "_modules"})

# Compared by name, so that FSDP need not be imported.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})

_OF_BITSANDBYTES = {"Params4bit": "Linear4bit", "Int8Params": "Linear8bitLt"}
"""Class of a parameter -> that of its module."""


def check_model(model: nn.Module) -> None:
    """Check modules and parameters.

    Raises:
        ModelError: a subclass says what is wrong with which module or parameter, and the cure.
    """
    for fqn, module in model.named_modules():
        # A scripted module runs in C++ and reads its parameters there, past hooks and __torch_function__.
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"module '{fqn or type(module).__name__}' was compiled with torch.jit, which hides its accesses to parameters",
                cure="Pass the model as it was before compiling",
                fqn=fqn,
            )
        # The MRO is searched, so that a subclass of DistributedDataParallel is found, and only torch's own class of
        # that name.
        of_torch = (each for each in type(module).__mro__ if each.__module__.partition(".")[0] == "torch")
        wrapper = next((each for each in of_torch if each.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ModelError(
                f"module '{fqn or type(module).__name__}' is wrapped in torch's {wrapper.__name__}, which exchanges gradients "
                "or weights of its own",
                cure="Pass the bare module: infinity.initialize exchanges what zero_optimization.stage says, among the processes "
                "that torchrun or infinity launch has started",
                fqn=fqn,
            )
    parameters = list(model.named_parameters())
    meta = [fqn for fqn, parameter in parameters if parameter.is_meta]
    if meta:
        others = f" (and {len(meta) - 1} more)" if len(meta) > 1 else ""
        raise ModelError(
            f"parameter '{meta[0]}'{others} is on the meta device and has no values. Give the model its weights: "
            "infinity.load_pretrained(model, directory, config=...) reads them from files; or build it inside `with "
            "infinity.Init(config=...)`, where weights are initialized on the drive, without memory for them",
            fqn=meta[0],
        )
    for fqn, parameter in parameters:
        if isinstance(parameter, PagedParameter | ResidentParameter) or host_of(parameter) is not None:
            raise ModelError(
                f"the model (its parameter '{fqn}') already belongs to an engine. Close that engine first: "
                "engine.close(), or infinity.engine_of(model).close() if no variable refers to it",
                fqn=fqn,
            )
        # A DTensor of FSDP. Those of `parallelize_module` have given their place to local tensors: see
        # `infinity.distributed.dtensors`.
        if hasattr(parameter, "device_mesh"):
            raise ModelError(
                f"parameter '{fqn}' is a DTensor",
                cure="Leave fully_shard out: ZeRO's stages divide the model. (DTensors of parallelize_module are "
                "supported.)",
                fqn=fqn,
            )
        is_trained_fp8 = is_float8(parameter.dtype) and parameter.requires_grad
        # Subclasses of Parameter (quantized ones of torchao and bitsandbytes, UninitializedParameter) keep data of
        # their own that a flat buffer does not hold. While an engine holds a parameter, its class is replaced by one of
        # ours.
        if parameter.is_sparse or is_trained_fp8 or type(parameter) is not nn.Parameter:
            kind = f"{parameter.dtype} that is trained" if is_trained_fp8 else type(parameter).__name__
            if kind in _OF_BITSANDBYTES:
                raise ModelError(
                    f"parameter '{fqn}' is a {kind} of bitsandbytes' {_OF_BITSANDBYTES[kind]}, which has its own "
                    "codes and scales, and keeps the whole weight in autograd's graph: it cannot be paged",
                    cure="Load the model without quantization_config, or its quantized files by infinity.load_pretrained, and "
                    'set "infinity": {"frozen_dtype": "nf4"} (or "int8"): its linear layers are then stored packed, with the '
                    "same codes. Or dequantize the model",
                    fqn=fqn,
                )
            raise ModelError(
                f"parameter '{fqn}' is a {kind}{' (sparse)' if parameter.is_sparse else ''}",
                cure="Freeze it (requires_grad_(False)), or convert it to another dtype"
                if is_trained_fp8
                else "Only dense torch.nn.Parameter can be paged: materialise or convert it first (a lazy one: run the model "
                "on a batch; a quantized one, as of torchao or bitsandbytes: dequantize the model, or load it without "
                "quantization_config)",
                fqn=fqn,
            )
        if parameter.requires_grad and parameter.is_complex():
            raise ModelError(
                f"trainable parameter '{fqn}' is complex",
                fqn=fqn,
                cure="Keep it as two real parameters (torch.view_as_real)",
            )
    _check_memory(parameters)
    _check_views(model, parameters)
    if not parameters:
        raise ModelError("the model has no parameters. Pass the module that has them")


def warn_of_other_dtypes(model: nn.Module) -> None:
    """Warn once if an fp32 config changes parameters' dtype to fp32, as DeepSpeed does. Frozen fp64 ones keep
    theirs."""
    others = [
        (fqn, parameter)
        for fqn, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dtype != torch.float32
        and (parameter.requires_grad or (parameter.dtype != torch.float64 and not is_float8(parameter.dtype)))
    ]
    if not others:
        return
    fqn, parameter = others[0]
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    trained = " and trained" if parameter.requires_grad else ""
    what = (
        f"is {_SHORT.get(parameter.dtype, parameter.dtype)}{more}, but is computed with{trained} in fp32: the numbers are not "
        "those of torch"
    )
    cure = "Convert it before infinity.initialize (model.float()) and give it fp32 inputs"
    if parameter.dtype == torch.float64:
        cure += "; frozen ones stay fp64"
    else:
        cure += ', or set "bf16" or "fp16" in the config'
    warnings.warn(OtherNumbersWarning.of_parameter(fqn, what, cure=cure), stacklevel=3)


def warn_of_gaps(model: nn.Module) -> None:
    """Warn once of parameters whose memory has gaps or overlaps, as that of a slice: the engine stores them dense."""
    for fqn, parameter in model.named_parameters():
        strides = dense_strides(tuple(parameter.shape), tuple(parameter.stride()))
        if strides != tuple(parameter.stride()):
            what = (
                f"is a slice of a larger tensor (strides {tuple(parameter.stride())}), and gets the strides "
                f"{strides}: the last bits may differ from torch's"
            )
            cure = "Give it memory of its own before infinity.initialize (parameter.data = parameter.data.clone())"
            warnings.warn(OtherNumbersWarning.of_parameter(fqn, what, cure=cure), stacklevel=3)
            return


def _check_memory(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory: each would get memory of its own, and they would no longer be tied."""
    # Sorted by address, so only neighbours are compared: (storage, first byte, end, name). Two slices of one tensor
    # that do not overlap share a storage and are accepted.
    spans = sorted(
        (parameter.untyped_storage().data_ptr(), *_span(parameter), fqn)
        for fqn, parameter in parameters
        if parameter.numel()
    )
    for (storage, _, stop, first), (other, start, _, second) in itertools.pairwise(spans):
        if storage == other and start < stop:
            raise ModelError(
                f"parameters '{first}' and '{second}' are different objects over the same memory",
                cure="Tie them by assigning one nn.Parameter to both places, or clone one of them",
                fqn=second,
            )


def _check_views(model: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse buffers and attributes of modules that are views of a parameter: they would keep its old memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for fqn, parameter in parameters:
        if parameter.numel():
            start, stop = _span(parameter)
            spans.setdefault(parameter.untyped_storage().data_ptr(), []).append((start, stop, fqn))
    for prefix, module in model.named_modules():
        held = {name: value for name, value in vars(module).items() if name not in _OTHER_HOLDERS}
        for name, value in (*module._buffers.items(), *held.items()):
            for tensor in leaves(value):
                seen = _seen_by(tensor, spans)
                # torch.nn.utils.weight_norm keeps a computed tensor under the weight's name, and replaces it in a
                # forward pre-hook whose `name` is that of the weight. A stale one is never used.
                is_made_anew = any(getattr(hook, "name", None) == name for hook in module._forward_pre_hooks.values())
                if seen is not None and not is_made_anew:
                    fqn = f"{prefix}.{name}" if prefix else name
                    raise ModelError(
                        f"'{fqn}' is a view of parameter '{seen}', and would keep its first values",
                        cure="Compute it from the parameter in forward (in a property, say), or assign the nn.Parameter itself",
                        fqn=fqn,
                    )


def _seen_by(value: object, spans: dict[int, list[tuple[int, int, str]]]) -> str | None:
    """FQN of a parameter whose bytes overlap those of ``value``; None if there is none."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or not spans:
        return None
    if value.layout is not torch.strided or value.is_meta or not value.numel():
        return None
    start, stop = _span(value)
    found = spans.get(value.untyped_storage().data_ptr(), [])
    return next((fqn for first, last, fqn in found if first < stop and start < last), None)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor. Bytes in the gaps of a strided one count as its own."""
    # Offset of the last element, in elements: shape (3, 4) with strides (10, 1) ends at 2 * 10 + 3 * 1 = 23, so 24
    # elements.
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
