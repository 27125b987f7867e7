"""BoTorch is imported here first, and what it changes for the process put back."""

import contextlib

from tests.neutral_settings import kept_settings

with kept_settings(), contextlib.suppress(ModuleNotFoundError):
    import botorch  # noqa: F401
