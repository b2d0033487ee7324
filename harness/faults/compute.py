"""Injects silent data corruption: flips a bit of what one rank computes or reads, in single passes or in all of them.

Why: faulty hardware rarely produces NaN. It returns numbers that are slightly wrong, now and then or always.
How: a fault that lasts one iteration is transient: it strikes one pass. One that lasts longer strikes every pass of its
iterations, also one that only checks another. Which value is hit is drawn anew for each pass, or is always the same
one (`is_stuck`). Values that are exactly zero are hit as well. A layer inside a block runs without torch.compile.
"""

from __future__ import annotations

import random
from typing import Any, final

import torch
from torch import Tensor

from harness.distributed.bit_digests import INTEGERS
from harness.faults.fault_plan import FaultKind
from harness.faults.forward import disable_compile
from harness.faults.gradient import affected_group, change_gradient
from harness.faults.site import Site

HALF_BITS = 16


@final
class FlippedPass:
    """bit_flip_activation, bit_flip_read, bit_flip_backward: flips one bit in a forward or backward pass."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._armed = False
        self._rng = random.Random(0)
        match site.fault.kind:
            case FaultKind.bit_flip_activation:
                site.layer.register_forward_hook(self._corrupt_output)
                disable_compile(site)
            case FaultKind.bit_flip_read:
                site.weight(site.fault.layer)  # it must have one
                owner = site.run.parts.model.get_submodule(affected_group(site))
                owner.register_forward_pre_hook(self._corrupt_weight)  # after that of FSDP2, which gathers the weights
                disable_compile(site)
            case _:
                change_gradient(site, self._corrupt)

    def before(self, iteration: int) -> None:
        site = self._site
        self._armed = site.strikes(iteration)
        if self._armed:
            self._rng = site.fault.rng(site.seed, iteration, site.run.parts.world.rank)
            what = {
                FaultKind.bit_flip_activation: f"the output of {site.fault.layer}",
                FaultKind.bit_flip_read: f"the gathered weight of {site.fault.layer}",
            }.get(site.fault.kind, f"the gradient of {site.fault.layer} before the reduction")
            passes = "one pass" if site.fault.duration == 1 else "every pass"
            place = "the same value" if site.fault.is_stuck else "a random value"
            site.log_strike(f"bit {site.fault.bit} of {place} of {what} is flipped in {passes}")

    def after(self, iteration: int) -> None:
        pass

    def _corrupt_output(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if not (self._armed and torch.is_grad_enabled()):
            return output
        first, *others = output if isinstance(output, tuple) else (output,)
        changed = first.clone()
        self._corrupt(changed.detach())
        return (changed, *others) if isinstance(output, tuple) else changed

    def _corrupt_weight(self, _module: Any, _inputs: Any) -> None:
        if self._armed and torch.is_grad_enabled():
            weight = self._site.layer.weight
            assert isinstance(weight, Tensor)
            self._corrupt(weight.detach())

    def _corrupt(self, values: Tensor) -> None:
        """Flip a bit of one value, in place."""
        if not self._armed:
            return
        site, fault = self._site, self._site.fault
        self._armed = fault.duration > 1
        rng = fault.rng(site.seed, 0, site.run.parts.world.rank) if fault.is_stuck else self._rng
        flat = values.view(-1)
        bits = 8 * flat.element_size()
        bit = fault.bit if bits > HALF_BITS else max(fault.bit - HALF_BITS, 0)
        place = rng.randrange(len(flat))
        mask = -(2**bit) if bit == bits - 1 else 1 << bit
        flat[place : place + 1].view(INTEGERS[flat.element_size()]).bitwise_xor_(mask)
