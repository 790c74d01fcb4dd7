"""`python -m crystallite` is the `crystallite` command."""

import sys

from crystallite.cli.main import main

sys.exit(main())
