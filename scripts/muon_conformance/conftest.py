"""In a clone, where nothing is installed, pytest finds the kit's options here."""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the plugin add them, unless it is here already."""
    pluginmanager.import_plugin("muon_conformance.plugin")
