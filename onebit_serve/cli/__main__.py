"""`python -m onebit_serve.cli`, for where the script is not installed."""

from __future__ import annotations

import sys

from onebit_serve.cli import main

sys.exit(main())
