"""``make fuzz``: try cases up to a number, resume where an earlier run stopped, and render the page."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.reliability import tables
from experiments.reliability.runs import CASES
from experiments.table import Request

if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CASES
    request = Request("reliability", Path(sys.argv[2] if len(sys.argv) > 2 else "results"))
    for message in tables.table(request, count).make(request):
        print(message)
