"""Makes the injector of each kind of fault."""

from __future__ import annotations

from harness.faults.bad_batches import TamperedCorpus
from harness.faults.clock import ClockJump
from harness.faults.compute import FlippedPass
from harness.faults.device import BusyDevice
from harness.faults.fault_plan import FaultKind
from harness.faults.files import DamagedCheckpoint, FullDisk
from harness.faults.forward import LogitGrowth, NanOutput, Outlier, Overflow
from harness.faults.gradient import CorruptGradient
from harness.faults.network import NetworkDown
from harness.faults.optimizer import CutWarmup, FlippedWeight, RateSpike, ResetMoments
from harness.faults.process import (
    MismatchedCollective,
    ProcessSignal,
    RaisedError,
    RankSleep,
    TrackingDown,
    UnhealthyNode,
)
from harness.faults.site import FaultInjector, Site


def make_injector(site: Site) -> FaultInjector:
    """Install one fault in the run."""
    match site.fault.kind:
        case FaultKind.nan_loss | FaultKind.nan_activation:
            return NanOutput(site)
        case FaultKind.nan_grad | FaultKind.inf_grad | FaultKind.big_grad | FaultKind.bit_flip_grad:
            return CorruptGradient(site)
        case FaultKind.bit_flip_weight:
            return FlippedWeight(site)
        case FaultKind.bit_flip_activation | FaultKind.bit_flip_read | FaultKind.bit_flip_backward:
            return FlippedPass(site)
        case (
            FaultKind.poisoned_batch
            | FaultKind.scrambled_batch
            | FaultKind.duplicate_batch
            | FaultKind.repeated_batch
            | FaultKind.data_shift
        ):
            return TamperedCorpus(site)
        case FaultKind.lr_spike:
            return RateSpike(site)
        case FaultKind.warmup_cut:
            return CutWarmup(site)
        case FaultKind.optimizer_reset:
            return ResetMoments(site)
        case FaultKind.fp16_overflow:
            return Overflow(site)
        case FaultKind.fp8_outlier:
            return Outlier(site)
        case FaultKind.logit_growth:
            return LogitGrowth(site)
        case FaultKind.slow_rank:
            return RankSleep(site)
        case FaultKind.slow_device:
            return BusyDevice(site)
        case FaultKind.hung_rank | FaultKind.kill_rank | FaultKind.kill_node | FaultKind.preemption:
            return ProcessSignal(site)
        case FaultKind.unhealthy_node:
            return UnhealthyNode()
        case FaultKind.raised_error:
            return RaisedError(site)
        case FaultKind.mismatched_collective:
            return MismatchedCollective(site)
        case FaultKind.full_disk:
            return FullDisk(site)
        case FaultKind.corrupted_checkpoint | FaultKind.truncated_checkpoint:
            return DamagedCheckpoint(site)
        case FaultKind.network_down:
            return NetworkDown(site)
        case FaultKind.tracking_down:
            return TrackingDown(site)
        case FaultKind.clock_jump:
            return ClockJump(site)
