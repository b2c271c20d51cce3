"""Says why an example or a test does not run here, and ends: an error where a GPU is required."""

import os
import sys


def skip(why):
    print(f"skipped: {why}")
    sys.exit(1 if os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else 0)
