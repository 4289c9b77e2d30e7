"""`python -m meshpar.launch`."""

import sys

from meshpar.launch.command import main

sys.exit(main(sys.argv[1:], prog="python -m meshpar.launch"))
