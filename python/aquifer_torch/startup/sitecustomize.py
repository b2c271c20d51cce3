"""Runs as a Python process starts below `python -m aquifer_torch` or `python -m aquifer_plugs`: see aquifer_torch/launch.py.

Costs a process that never imports PyTorch, or another framework, a look at one variable.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any, Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds frameworks where others find them, and prepares the installation once one is imported."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.awaited = {"torch", *settings.get("plugs", ())}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.awaited:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        # A program may look for it without importing it, so it stays awaited.
        if found is None or found.loader is None:
            return None
        run = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.awaited.discard(name)
            if name == "torch":
                from aquifer_torch import launch

                launch.at_first_use(self.settings)
            else:
                import aquifer_plugs

                aquifer_plugs.plug(name, self.settings)

        # This loader is of this spec alone.
        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _run_the_next() -> None:
    """Runs the `sitecustomize` that this one hides."""
    path = [place for place in sys.path if os.path.abspath(place) != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if found is not None and found.loader is not None:
        module = importlib.util.module_from_spec(found)
        sys.modules["sitecustomize"] = module
        found.loader.exec_module(module)


_settings = os.environ.get("AQUIFER_TORCH")
if _settings is not None:
    sys.meta_path.insert(0, _AfterImport(json.loads(_settings)))
_run_the_next()
