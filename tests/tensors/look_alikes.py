"""Tensor subclasses and modules laid out like those of quantisation libraries."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing


class Scaled(torch.Tensor):
    """A wrapper subclass: int8 values and a scale."""

    inner_names: ClassVar[list[str]] = ["values", "scale"]

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, unit: str) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values, made.scale, made.unit = values, scale, unit
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.inner_names, {"unit": self.unit}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["values"], inner["scale"], context["unit"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].values, args[0].scale, args[0].unit)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is torch.ops.aten.copy_.default:
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(str(func))


class Doubly(Scaled):
    """A wrapper around a wrapper, as nested quantisation makes them."""


class BlockState:
    """What a 4-bit weight needs beside its packed bytes."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, kind: str, shape: torch.Size) -> None:
        self.absmax, self.code, self.kind, self.shape = absmax, code, kind, shape


class Packed(nn.Parameter):
    """A parameter subclass: packed bytes, with the quantisation state as an attribute."""

    state: BlockState

    @staticmethod
    def __new__(cls, data: torch.Tensor, state: BlockState) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made


class Linear4(nn.Module):
    """Keeps its weight packed, and writes the quantisation state into its `state_dict` beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (8, 1), dtype=torch.uint8, generator=generator)
        state = BlockState(
            torch.rand(2, generator=generator), torch.rand(16, generator=generator), "nf4", torch.Size([4, 4])
        )
        self.weight = Packed(data, state)
        self.bias = nn.Parameter(torch.rand(4, generator=generator))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.state
        destination[f"{prefix}weight.absmax"], destination[f"{prefix}weight.code"] = state.absmax, state.code
        text = f"{state.kind};{list(state.shape)}".encode()
        destination[f"{prefix}weight.packed"] = torch.tensor(list(text), dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        absmax, code = state_dict.pop(f"{prefix}weight.absmax"), state_dict.pop(f"{prefix}weight.code")
        kind, shape = bytes(state_dict.pop(f"{prefix}weight.packed").tolist()).decode().split(";")
        sizes = torch.Size(int(size) for size in shape.strip("[]").split(","))
        self.weight.state = BlockState(absmax, code, kind, sizes)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class QuantisedAdam(torch.optim.Optimizer):
    """Keeps its moments in wrapper subclasses and in bytes of fewer than 8 bits, whatever the parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Moments that depend on the gradient."""
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            grad = parameter.grad.float() * 100 if parameter.grad is not None else torch.zeros(())
            state["exp_avg"] = Scaled(grad.to(torch.int8), grad.abs().max() + 1, "8 bit")
            state["codes"] = grad.to(torch.uint8).view(torch.uint4)
            parameter.sub_(grad.sign().to(parameter.dtype), alpha=0.01)
