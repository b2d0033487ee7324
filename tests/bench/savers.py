"""The training loop of the checkpoint benchmark, and the ways to save its state: this harness's and torch's own.

`dcp.async_save` is measured in four variants. A thread or a process writes. The state is copied by torch's default (new
memory, inside the call) or by a `DefaultStager`, which copies in a thread during the next forward pass. The stager
reuses its buffers in torch 2.13; in torch 2.11 a stager works only once, so every save creates a new one. On a GPU the
buffers are pinned; the writer process reads them from shared memory. The loop waits for the copy before the next
update, as torch requires.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as save_shards_async
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from harness.build import Parts
from harness.checkpoint import saver, store
from harness.config.schema import Config
from harness.core.state import RunState
from harness.distributed.shards import local
from harness.step import finish_step, forward_backward
from tests.bench.clock import wait_for

OURS = "this harness: snapshot, written by a thread"
CONTROL = "control: no save"
REUSES_STAGER = (2, 13)
"""The first version of torch known to stage more than once with one `DefaultStager`."""


@dataclass(slots=True)
class Loop:
    """The training loop whose time a save takes."""

    cfg: Config
    parts: Parts
    directory: Path
    index: int = 0
    _ahead: deque[torch.cuda.Event] = field(default_factory=deque)

    def step(self, before_update: Callable[[], object] | None = None) -> None:
        """One training iteration, with the host at most `sentinel.lag` steps ahead of the device."""
        forward_backward(self.parts, self.parts.batches[self.index], cfg=self.cfg, probe=False)
        if before_update is not None:
            before_update()
        finish_step(self.parts, cfg=self.cfg, probe=False)
        self.index += 1
        if self.parts.world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ahead.append(event)
            if len(self._ahead) > self.cfg.sentinel.lag:
                self._ahead.popleft().synchronize()

    def wait(self) -> None:
        self._ahead.clear()
        wait_for(self.parts.world.device)

    def step_s(self, num_steps: int) -> float:
        """Mean seconds of a step without a save, over some consecutive steps."""
        self.wait()
        start_s = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        self.wait()
        return (time.perf_counter() - start_s) / num_steps

    @property
    def state(self) -> RunState:
        return RunState(step=self.index, iteration=self.index)


class Save(NamedTuple):
    """A save in progress."""

    work: Future[Any]
    before_update: Callable[[], object] | None = None
    """The loop calls it before the update; it returns when the state has been copied."""


class Contender(NamedTuple):
    name: str
    begin: Callable[[Loop, Path], Save]
    restore: Callable[[Loop, Path], object] | None
    """None if the contender saves nothing."""


def completed_save() -> Save:
    """The result of a synchronous save."""
    work: Future[Any] = Future()
    work.set_result(None)
    return Save(work)


def begin_harness_save(writer: Executor, loop: Loop, path: Path) -> Save:
    """As in a run: take a snapshot, which a thread writes."""
    ring, state = loop.parts.ring, loop.state
    slot = ring.take_snapshot(state)
    slot.complete(step=state.step, refused_in_row=0)

    def write() -> None:
        slot.wait()
        saver.write(path, slot.sharded, slot.state, world=loop.parts.world, rollback={})

    return Save(writer.submit(write))


def restore_harness(loop: Loop, path: Path) -> None:
    assert store.load_newest(path, loop.parts.tensors(), world=loop.parts.world).loaded is not None


def begin_async_dcp(
    kind: AsyncCheckpointerType, stager: Callable[[], DefaultStager] | None, loop: Loop, path: Path
) -> Save:
    response = save_shards_async(
        loop.parts.tensors(),
        checkpoint_id=path,
        process_group=loop.parts.world.background_group,
        async_checkpointer_type=kind,
        async_stager=None if stager is None else stager(),
    )
    if isinstance(response, Future):
        return Save(response)
    return Save(response.upload_completion, response.staging_completion.result)


def begin_dcp(loop: Loop, path: Path) -> Save:
    save_shards(loop.parts.tensors(), checkpoint_id=path)
    return completed_save()


def restore_dcp(loop: Loop, path: Path) -> None:
    load_shards(loop.parts.tensors(), checkpoint_id=path)


def begin_torch(loop: Loop, path: Path) -> Save:
    path.mkdir(parents=True)
    torch.save({name: local(t.detach()) for name, t in loop.parts.tensors().items()}, path / "state.pt")
    return completed_save()


def restore_torch(loop: Loop, path: Path) -> None:
    loaded = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    for name, tensor in loop.parts.tensors().items():
        local(tensor.detach()).copy_(loaded[name])


def begin_nothing(seconds: float, _: Loop, path: Path) -> Save:
    """Save nothing and complete after `seconds`: what is measured is the noise."""
    path.mkdir(parents=True)
    work: Future[Any] = Future()
    Timer(seconds, work.set_result, [None]).start()
    return Save(work)


def control(seconds: float) -> Contender:
    return Contender(CONTROL, partial(begin_nothing, seconds), None)


def _open_stager(stack: ExitStack, options: StagingOptions) -> DefaultStager:
    return stack.enter_context(closing(DefaultStager(options)))


@contextmanager
def contenders(device: torch.device) -> Iterator[list[Contender]]:
    """This harness, then its rivals, the fastest first."""
    on_gpu = device.type == "cuda"
    staging = "pinned asynchronous staging" if on_gpu else "asynchronous staging"
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    with ExitStack() as stack:
        writer = stack.enter_context(ThreadPoolExecutor(max_workers=1))

        def stager(*, shared: bool) -> Callable[[], DefaultStager]:
            options = StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=shared, use_async_staging=True, use_non_blocking_copy=on_gpu
            )
            build = partial(_open_stager, stack, options)
            return cache(build) if tuple(map(int, torch.__version__.split(".")[:2])) >= REUSES_STAGER else build

        def async_save(
            how: str, kind: AsyncCheckpointerType, build_stager: Callable[[], DefaultStager] | None
        ) -> Contender:
            return Contender(f"`dcp.async_save`, {how}", partial(begin_async_dcp, kind, build_stager), restore_dcp)

        yield [
            Contender(OURS, partial(begin_harness_save, writer), restore_harness),
            async_save("thread", thread, None),
            async_save(f"thread, {staging}", thread, stager(shared=False)),
            async_save("process", process, None),
            async_save(f"process, {staging} in shared memory", process, stager(shared=True)),
            Contender("`dcp.save`", begin_dcp, restore_dcp),
            Contender("`torch.save`", begin_torch, restore_torch),
        ]
