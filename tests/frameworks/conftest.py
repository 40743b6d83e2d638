"""One framework at a time, each in its own environment: `pytest tests/frameworks --framework torch`."""

import pytest
from frames import FRAMES


def pytest_addoption(parser):
    parser.addoption("--framework", choices=sorted(FRAMES), help="the framework whose environment this is")


def pytest_ignore_collect(collection_path, config):
    """The other frameworks' tests are not even imported."""
    stem, name = collection_path.stem, config.getoption("--framework")
    of_all = stem in ("test_conformance", "test_conventions") or (stem == "test_command_line" and name != "keras")
    return True if stem.startswith("test_") and not of_all and not stem.startswith(f"test_{name}_") else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--framework") is None:
        raise pytest.UsageError("these tests need --framework NAME, and that framework's environment")


@pytest.fixture(scope="session")
def frame(pytestconfig):
    return FRAMES[pytestconfig.getoption("--framework")]()
