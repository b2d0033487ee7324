"""Open files of the coordinator: one connection for each other launcher, and one for each client of torch's store.

Why: the usual soft limit of 1,024 open files ends a run of more than about 100 nodes of 8 ranks at its start, with an
error that names neither the limit nor the number of ranks.
"""

from __future__ import annotations

import resource
import sys

OTHER_FILES = 100
"""Open files of a launcher beside its connections."""


def files_needed(num_nodes: int, nproc: int) -> int:
    """Open files of node 0: links to the other launchers, then their store clients and those of all ranks."""
    return 2 * num_nodes + num_nodes * nproc + OTHER_FILES


def warn_about_files(num_nodes: int, nproc: int) -> None:
    """Raise the limit of open files of node 0, and warn if it is too low for this run."""
    needed = files_needed(num_nodes, nproc)
    allowed = raise_file_limit(needed)
    if needed > allowed:
        what = f"node 0 needs about {needed} open files for {num_nodes * nproc} ranks"
        print(f"harness: warning: {what}, and may have {allowed}; raise `ulimit -Hn`", file=sys.stderr, flush=True)


def raise_file_limit(needed: int) -> int:
    """Allow this process that many open files, or as many as the system lets it have; returns the limit.

    Not more: it is inherited, and some programs close every file up to the limit when they start.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return sys.maxsize
    if needed > allowed:
        allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    return allowed
