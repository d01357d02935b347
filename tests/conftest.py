"""Fixtures that every test file may use."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from treadle.config import environment

if TYPE_CHECKING:
    from tests.spmd import Ranks

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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes for SPMD tests, started when one first needs them; other modules see none of them."""
    from tests.spmd import Ranks

    four = Ranks(4)
    yield four
    four.close()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One Ray for a module, with more cores than there are: back ends find it and leave it running. Its threads work in
    this process, and tests elsewhere measure what this process works."""
    import ray

    with environment.changed({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}):
        quiet: Any = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
        ray.init(num_cpus=8, object_store_memory=1 << 30, **quiet)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def native_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def native(native_directory: Path) -> Iterator[None]:
    """The native library of the checkout, or one of this session: whether it was built changes no other module."""
    from treadle.native import library

    with pytest.MonkeyPatch.context() as patch:
        if not library.built():
            patch.setattr(library, "_DIRECTORY", native_directory)
            library.build()
        library.load()
        yield
