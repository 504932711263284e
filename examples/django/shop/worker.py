"""What a worker process imports: `taskrunner worker shop.worker:runner`."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from shop.runner import runner  # noqa: E402  it reads the settings, and they must be there

__all__ = ["runner"]
