"""Finds the first operation that produces a non-finite value from finite inputs, during one step.

How: a dispatch mode checks the output of every operator, forward and backward; hooks tell which module it runs in.
Attention and the loss take their reference paths, whose softmax, scores and logits are operators of their own and not
hidden in a fused kernel. Values that a hook or a fault puts between operators are found at the borders of the modules:
finite inputs and a non-finite output. Each check is a host sync; a replay can afford it. Outside a replay no hook and
no mode exists.
Left out: modules inside a compiled block, which run as one. A replay is not compiled. `flex_attention`, which runs
compiled only, and Transformer Engine's attention are replaced by `scaled_dot_product_attention`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.analysis.replay.operation_names import LOGITS_GRADIENT, Scope, name_operation
from harness.distributed.shards import local
from harness.distributed.torch_private.operator_mode import OperatorMode
from harness.model.attention_layer import Attention, reference_attention
from harness.model.transformer import SwiGLU, Transformer

CHECKED_NAMESPACES = ("aten", "harness")
UNCHECKED = ("empty", "new_empty", "resize", "set_", "scalar_tensor", "full", "where", "masked_fill", "fill", "zeros")
"""Beginnings of operators that create memory or select values: masks hold -Inf on purpose."""
MAX_PATH = 6


@final
@dataclass(slots=True)
class NonFiniteModules:
    """Modules and operations with non-finite values in a step, on one rank; empty if everything was finite."""

    forward: str = ""
    """The first module or operation with a non-finite output from finite inputs."""
    broken_weights: str = ""
    """The first module with non-finite weights."""
    backward: str = ""
    """The first module or operation, from the loss down, with a non-finite gradient from finite ones."""
    gradients: list[str] = field(default_factory=list)
    """Parameters with a non-finite gradient after the backward pass."""
    path: list[str] = field(default_factory=list)
    """How the value spreads in the forward pass: operations with a non-finite output from the first on, as NaN or Inf.
    """

    @property
    def is_clean(self) -> bool:
        return not (self.forward or self.broken_weights or self.backward or self.gradients)


@contextmanager
def watch_modules(model: nn.Module, *, on_reference_path: bool = True) -> Iterator[NonFiniteModules]:
    """Check every operation of the model while the context is open."""
    seen = NonFiniteModules()
    watch = _Watch(seen)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # hooks return views
        stack.enter_context(reference_path(model) if on_reference_path else reference_attention(model))
        for handle in _add_hooks(model, watch):
            stack.callback(handle.remove)
        stack.enter_context(watch)
        yield seen
    seen.gradients = [name for name, parameter in model.named_parameters() if not is_finite(parameter.grad)]


@contextmanager
def reference_path(model: nn.Module) -> Iterator[None]:
    """Compute attention and the loss operator by operator instead of in fused kernels."""
    options = model.loss_options if isinstance(model, Transformer) else None
    with sdpa_kernel(SDPBackend.MATH), reference_attention(model):
        try:
            if isinstance(model, Transformer):
                model.loss_options = replace(model.loss_options, own_kernels=False)
            yield
        finally:
            if isinstance(model, Transformer) and options is not None:
                model.loss_options = options


class _Watch(OperatorMode):  # type: ignore[no-untyped-call]
    """Checks every operator, and keeps the stack of the modules that run."""

    def __init__(self, seen: NonFiniteModules) -> None:
        super().__init__()
        self.seen = seen
        self.scopes: list[Scope] = []
        self.is_paused = False
        """A hook looks at values: its own operators are not part of the model."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def on_operator(self, namespace: str, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        is_checked = namespace in CHECKED_NAMESPACES and not name.startswith(UNCHECKED)
        if self.scopes and not self.is_paused and is_checked:
            self._check(self.scopes[-1], name, inputs, output)

    def _check(self, scope: Scope, operator: str, inputs: tuple[Any, ...], output: Any) -> None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        named = name_operation(scope, operator.rstrip("_"), shape)
        is_forward = scope.is_forward and named != LOGITS_GRADIENT
        is_open = len(self.seen.path) < MAX_PATH if is_forward else not self.seen.backward
        if not is_open or is_finite(output):
            return
        if not is_forward:
            if is_finite(inputs):
                self.seen.backward = named
            return
        activations = _without_weights(inputs, scope.module)
        if not self.seen.forward and activations and is_finite(activations):
            self.seen.forward = named
        point = f"{named} ({'NaN' if has_nan(output) else 'Inf'})"
        if self.seen.forward and point not in self.seen.path:
            self.seen.path.append(point)

    def enter(self, name: str, module: nn.Module) -> None:
        """A module is called: check its weights."""
        if isinstance(module, Transformer):
            self.scopes.clear()
        self.scopes.append(Scope(name=name, module=module, is_forward=True))
        for weights_of, part in _own_weights(name, module):
            if not self.seen.broken_weights and not is_finite(list(part.parameters(recurse=False))):
                self.seen.broken_weights = weights_of

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module returns; after the model itself follows the backward pass."""
        self.scopes.pop()
        if not self.seen.forward and not is_finite(output) and is_finite(inputs):
            self.seen.forward = name or "loss"
        if isinstance(module, Transformer):
            self.scopes.append(Scope(name="", module=module, is_forward=False))

    def enter_backward(self, name: str, module: nn.Module) -> None:
        """The gradient of a module's output has arrived."""
        for scope in self.scopes:
            scope.saw_softmax = True  # a module runs backward, so the loss is done
        self.scopes.append(Scope(name=name, module=module, is_forward=False))

    def leave_backward(self, name: str, outgoing: Any, incoming: Any) -> None:
        """The gradient of a module's input is complete."""
        places = [at for at, scope in enumerate(self.scopes) if scope.name == name and not scope.is_forward]
        if places:
            del self.scopes[places[-1] :]
        if not self.seen.backward and not is_finite(outgoing) and is_finite(incoming):
            self.seen.backward = name


def _add_hooks(model: nn.Module, watch: _Watch) -> Iterator[Any]:
    for name, module in model.named_modules():
        is_leaf = not any(module.children())
        if isinstance(module, nn.Identity) or not (is_leaf or isinstance(module, Attention | SwiGLU | Transformer)):
            continue

        def on_call(layer: nn.Module, _inputs: Any, *, name: str = name) -> None:
            with watch.paused():
                watch.enter(name, layer)

        def on_return(layer: nn.Module, inputs: Any, output: Any, *, name: str = name) -> None:
            with watch.paused():
                watch.leave(name, layer, inputs, output)

        def on_gradient(layer: nn.Module, _incoming: Any, *, name: str = name) -> None:
            watch.enter_backward(name, layer)

        def on_input_gradient(_layer: nn.Module, outgoing: Any, incoming: Any, *, name: str = name) -> None:
            with watch.paused():
                watch.leave_backward(name, outgoing, incoming)

        yield module.register_forward_pre_hook(on_call)
        yield module.register_forward_hook(on_return, always_call=True)
        if not isinstance(module, nn.Embedding | Transformer):  # their inputs have no gradient
            yield module.register_full_backward_pre_hook(on_gradient)
            yield module.register_full_backward_hook(on_input_gradient)


def _own_weights(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules whose weights a module multiplies by: its own, and for the model those of the head."""
    if isinstance(module, Transformer):
        return [] if module.head is None else [("head", module.head)]
    return [(name, module)]


def _without_weights(inputs: tuple[Any, ...], module: nn.Module) -> list[Tensor]:
    """The tensors among the inputs of an operator that are not weights of its module, nor views of them."""
    parts = [part for _, part in _own_weights("", module)]
    parts += [module.embedding] if isinstance(module, Transformer) and module.head is None else []
    weights = {_storage_of(weight) for part in parts for weight in part.parameters(recurse=False)}
    nested = [item for value in inputs for item in (value if isinstance(value, tuple | list) else [value])]
    return [value for value in nested if isinstance(value, Tensor) and _storage_of(value) not in weights]


def _storage_of(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def is_finite(value: Any) -> bool:
    """Whether all values of a tensor, or of nested tensors, are finite; other objects count as finite."""
    match value:
        case Tensor():
            return not value.is_floating_point() or bool(torch.isfinite(_comparable(value)).all())
        case tuple() | list():
            return all(is_finite(item) for item in value)
        case _:
            return True


def has_nan(value: Any) -> bool:
    """Whether a tensor, or one of nested tensors, holds a NaN."""
    match value:
        case Tensor():
            return value.is_floating_point() and bool(torch.isnan(_comparable(value)).any())
        case tuple() | list():
            return any(has_nan(item) for item in value)
        case _:
            return False


def _comparable(tensor: Tensor) -> Tensor:
    """The local values; those of an fp8 format in fp32, because torch has no `isfinite` for most of them."""
    values = local(tensor)
    return values.float() if values.dtype.itemsize == 1 else values
