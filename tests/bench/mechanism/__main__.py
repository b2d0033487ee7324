"""`python -m tests.bench.mechanism`."""

import sys

from harness.config.errors import EXIT_BAD_CONFIG, ConfigError
from tests.bench.mechanism.grid import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"mechanism: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
