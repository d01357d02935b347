"""Fixtures that every test file may use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
settings.register_profile(
    "unhurried", deadline=None
)  # how long an example takes says more about the machine than about us
settings.load_profile("unhurried")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny random byte model (untouched: copy it before changing it)."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    _load(ROOT / "examples" / "make_models.py").make_tiny(out)
    return out
