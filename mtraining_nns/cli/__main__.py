"""`python -m mtraining_nns.cli VERB ...`: the command line without the installed script."""

import sys

from mtraining_nns.cli import main

sys.exit(main())
