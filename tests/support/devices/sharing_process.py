"""A process that shares device memory of the driver for tests, until its standard input ends.

Arguments: the driver's library, and the number of bytes, each of which is 3. Prints the handle as hexadecimal
digits, and the offset of byte 100.
"""

from __future__ import annotations

import sys

from infinity import _tiers
from infinity.tiers.driver import Driver
from infinity.tiers.pool import tensor_over

if __name__ == "__main__":
    library, nbytes = sys.argv[1], int(sys.argv[2])
    region = _tiers.map_host(nbytes, huge_pages=False, shared=True)
    tensor_over(region).fill_(3)
    handle, offset = Driver.load(library).share(region.address + 100)
    print(handle.hex(), offset, flush=True)
    sys.stdin.read()
