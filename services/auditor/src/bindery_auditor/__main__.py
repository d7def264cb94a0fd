"""`python -m bindery_auditor`."""

import sys

import bindery_kit.lean_imports  # noqa: F401 - first

from bindery_auditor.main import main

sys.exit(main())
