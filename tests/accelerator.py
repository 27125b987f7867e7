"""A second device: a GPU, or without one the meta device, whose tensors' values are kept by the CPU here.

Under :func:`accelerated` every operation of torch runs on the CPU, and fails where CUDA would fail: for tensors of two
devices in one operation (except numbers and indices of a tensor), a generator of the other device, `.numpy()`. So code
that passes has the results of the CPU to the last bit, and never mixes devices.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

IS_REAL = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_REAL else torch.device("meta")
_MAY_MIX = {  # a CPU index of a tensor, and copies between devices
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_unsafe_index.Tensor",
    "aten::_index_put_impl_",
    "aten::copy_",
    "aten::_copy_from",
}
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class There(torch.Tensor):
    """A tensor on the accelerator."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"There({self.held!r})"

    def __format__(self, spec):
        return format(self.held, spec)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class _FromData(TorchFunctionMode):
    """Python numbers go to the CPU first: on the meta device they would be lost."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(args[0] if args else None, There):
            if function is torch.Tensor.tolist:
                return args[0].held.tolist()
            if function is torch.Tensor.numpy:
                raise TypeError("can't convert a tensor of the accelerator to numpy; use Tensor.cpu() first")
        if function is torch.Tensor.new_tensor:
            kwargs.setdefault("device", args[0].device)
            kwargs.setdefault("dtype", args[0].dtype)
            function, args = torch.tensor, args[1:]
        if function not in _FROM_DATA or isinstance(args[0], torch.Tensor):
            return function(*args, **kwargs)
        device = kwargs.pop("device", None)
        made = function(*args, **kwargs)
        return made if device is None else made.to(device)


def _tensors(values):
    """All tensors in sequences of sequences; torch's pytree would take most of the time of a test."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _mapped(function, value):
    """function(t) of a tensor, or of all in sequences of sequences; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_mapped(function, each) for each in value) if isinstance(value, tuple | list) else value


def _held(tensor):
    return tensor.held if isinstance(tensor, There) else tensor


def _run(operation, args, kwargs):
    tensors = _tensors((*args, *kwargs.values()))
    there = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, There)}
    name = operation.name()
    device = kwargs.get("device")
    goes_there = device is not None and torch.device(device) == DEVICE
    if not there and not goes_there:
        if _is_there(kwargs.get("generator")):
            raise RuntimeError(f"{name}: expected a generator of the CPU, got one of the accelerator")
        return operation(*args, **kwargs)
    here = [t for t in tensors if not isinstance(t, There) and t.dim()]
    if there and here and not (name in _MAY_MIX and (isinstance(args[0], There) or "copy" in name)):
        raise RuntimeError(
            f"{name}: expected all tensors on one device; got shapes {[tuple(t.shape) for t in here]} on the CPU and "
            f"{[tuple(t.shape) for t in there.values()]} on the accelerator"
        )
    returns_there = goes_there if device is not None else bool(there)
    generator = kwargs.get("generator")
    if generator is not None and returns_there != _is_there(generator):
        raise RuntimeError(f"{name}: expected a generator of the device of its result")
    if goes_there:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if torch.Tag.inplace_view in operation.tags:  # of wrappers, too
        with no_dispatch():
            operation(*args, **kwargs)
    result = operation(*_mapped(_held, args), **{key: _mapped(_held, value) for key, value in kwargs.items()})
    if name == "aten::copy_" and not isinstance(args[0], There):
        return args[0]

    def wrapped(value):
        if value._is_zerotensor():  # autograd's zero derivatives have no memory
            value = torch.zeros(value.shape, dtype=value.dtype)
        return there.get(id(value)) if id(value) in there else There(value)

    return _mapped(wrapped, result) if returns_there else result


class _IsGenerator(type(torch.Generator)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, torch._C.Generator)


class Generator(torch.Generator, metaclass=_IsGenerator):
    """torch.Generator, of either device."""

    there: dict[int, Generator] = {}  # torch passes another object of the same address

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        if torch.device(device) == DEVICE:
            cls.there[made._cdata] = made
        return made

    @property
    def device(self):
        return DEVICE if _is_there(self) else torch.device("cpu")


def _is_there(generator):
    return generator is not None and generator._cdata in Generator.there


@contextlib.contextmanager
def accelerated():
    """Let `DEVICE` compute: a GPU, or its simulation."""
    if IS_REAL:
        yield
        return
    checkpoints = mock.patch.object(torch, DEVICE.type, torch.cpu, create=True)  # torch 2.4 needs the device's module
    with _FromData(), _Operations(), mock.patch.object(torch, "Generator", Generator), checkpoints:
        yield


def sent(value):
    """Return a tensor, or a module with all its tensors, on `DEVICE`; a module is changed in place, as by `.cuda()`."""
    if IS_REAL:
        return value.to(DEVICE)
    if isinstance(value, torch.nn.Module):
        return value._apply(sent)
    return value if isinstance(value, There) else There(value.detach().clone())
