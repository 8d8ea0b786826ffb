"""`python -m infinity`: runs the command `infinity`."""

import sys

from infinity.cli import main

sys.exit(main())
