"""What Ray is told of this machine.

    ray start --head --resources="$(python -m aquifer_ray resources [--keep BYTES])" --labels="$(python -m aquifer_ray labels)"
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from .memory import here, labels, resources


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aquifer_ray", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["resources", "labels", "memories"], help="for ray start, or the memories as JSON")
    parser.add_argument("--keep", type=int, default=0, metavar="BYTES", help="of each GPU, for contexts and programs beside Ray")
    asked = parser.parse_args()
    found = here(asked.keep)
    if asked.what == "labels":
        print(",".join(f"{name}={value}" for name, value in labels(found).items()))
    else:
        print(json.dumps(resources(found) if asked.what == "resources" else [dataclasses.asdict(memory) for memory in found]))


if __name__ == "__main__":
    main()
