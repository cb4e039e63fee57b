"""`python -m kvdiag` is `kvdiag`."""

from __future__ import annotations

import sys

from kvdiag.commands import main

sys.exit(main())
