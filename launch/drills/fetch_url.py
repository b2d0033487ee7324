"""`python -m launch.drills.fetch_url URL`: prints what a URL answers, for a server in another network namespace."""

from __future__ import annotations

import sys
import urllib.request

TIMEOUT_S = 30.0


def main(argv: list[str]) -> int:
    """Print the answer; returns 1 if there is none."""
    try:
        with urllib.request.urlopen(argv[0], timeout=TIMEOUT_S) as reply:
            sys.stdout.write(reply.read().decode())
    except OSError as error:
        print(f"harness: {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
