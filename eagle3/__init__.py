"""EAGLE-3 drafter training whose layer wiring is checked from capture to server."""

__version__ = "0.1.0"
