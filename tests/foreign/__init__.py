"""Test suites that others wrote, over Convoy through adapters: ``python -m tests.foreign``."""
