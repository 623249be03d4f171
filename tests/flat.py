"""Small flat programs for the tests of passes: written as text, built, and with a pass switched off."""

from __future__ import annotations

from manymesh._passes import _build, _run


def switch_off(monkeypatch, name):
    """From here on to the end of the test, programs are built without one pass."""
    assert name in [p.name for p in _run.PASSES], f"no pass is called {name!r}"
    monkeypatch.setattr(_build, "PASSES", tuple(p for p in _run.PASSES if p.name != name))
