"""`python -m bindery_broker`."""

import sys

import bindery_kit.lean_imports  # noqa: F401 - first

from bindery_broker.main import main

sys.exit(main())
