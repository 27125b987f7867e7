"""BoTorch is imported here first, and the settings it changes for the process are restored."""

import contextlib

from tests.neutral_settings import kept_settings

with kept_settings(), contextlib.suppress(ModuleNotFoundError):
    import botorch  # noqa: F401
