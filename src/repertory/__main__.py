"""`python -m repertory` is `repertory`."""

import sys

from repertory.commands import main

if __name__ == "__main__":
    sys.exit(main())
