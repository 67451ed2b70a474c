"""`python -m lt_runtime`."""

import sys

from lt_runtime.cli import main

sys.exit(main())
