"""`python -m infinity`: the same as the command `infinity`."""

import sys

from infinity.cli import main

sys.exit(main())
