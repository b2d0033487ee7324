"""Sees every operator that runs while it is entered, forward and backward, below autograd.

Private API: `torch.utils._python_dispatch.TorchDispatchMode`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_operator` after every operator. Operators that this method runs itself are not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def on_operator(self, namespace: str, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        """`name` is that of the operator without its overload; `inputs` leave out the argument `out`."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        output = func(*args, **options)
        inputs = (*args, *(value for key, value in options.items() if key != "out"))
        self.on_operator(func.namespace, func.overloadpacket.__name__, inputs, output)
        return output
