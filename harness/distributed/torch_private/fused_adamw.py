"""AdamW's fused kernel for tensors of one device and dtype, with a mask that skips the update.

Private API: `torch._fused_adamw_` and `torch._foreach_sub_`. Checked on torch 2.13.

Why: `torch.optim.adamw.adamw` checks and groups its tensors at every call. For the shards of a small model that takes
five times as long as the kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, _foreach_add_, _foreach_sub_, _fused_adamw_


def fused_adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    steps: list[Tensor],
    *,
    grad_scale: Tensor,
    found_inf: Tensor,
    **options: Any,
) -> None:
    """What `adamw(fused=True)` does with `lr`, `beta1`, `beta2`, `weight_decay` and `eps`: count the step, update, and
    take the step back if `found_inf` is 1."""
    _foreach_add_(steps, 1)
    _fused_adamw_(
        parameters,
        gradients,
        firsts,
        seconds,
        [],
        steps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
        **options,
    )
    _foreach_sub_(steps, [found_inf] * len(steps))
