"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("gradclip", deadline=None, derandomize=True)
settings.load_profile("gradclip")
