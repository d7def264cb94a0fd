"""`python -m bindery_bookie`: the same as `bindery-bookie`."""

import sys

from bindery_bookie.main import main

sys.exit(main())
