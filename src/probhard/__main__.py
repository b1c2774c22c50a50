"""``python -m probhard``, the same as the command ``probhard``."""

from __future__ import annotations

import sys

from probhard.cli import main

if __name__ == "__main__":
    sys.exit(main())
