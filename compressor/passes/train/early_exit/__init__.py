"""``early-exit``: easy samples leave the network early."""
