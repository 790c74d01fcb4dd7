"""`python -m crystallite` is the `crystallite` command."""

import sys

from crystallite.cli import main

sys.exit(main())
