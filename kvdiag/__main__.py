"""`python -m kvdiag` is `kvdiag`."""

import sys

from kvdiag.commands import main

sys.exit(main())
