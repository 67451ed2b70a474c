"""Runs the package's command line (`lt_runtime.cli`) for `python -m lt_runtime`."""

import sys

from lt_runtime.cli import main

sys.exit(main())
