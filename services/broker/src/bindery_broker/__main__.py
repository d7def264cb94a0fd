"""`python -m bindery_broker`."""

import sys

from bindery_broker.main import main

sys.exit(main())
