"""``python -m hangup.cli``."""

import sys

from . import main

sys.exit(main())
